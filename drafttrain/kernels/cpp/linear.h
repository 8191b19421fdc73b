// Linear layers of packed weights.
//
// Weights are packed into panels of 2 vectors of outputs: [out / PANEL][in / 2][PANEL][2] in bf16 (a 32-bit
// lane holds two neighbouring inputs, as vdpbf16ps reads them), [out / PANEL][in][PANEL] in fp32. A panel is one stream
// through memory. Sums are fp32; inputs of a product are rounded to bf16 where the machine multiplies bf16 (vdpbf16ps, or
// AMX, whose tiles of weights these panels are, too), each token's by itself, and stay fp32 elsewhere.
//
// Drafters' weights may be bytes of 7 bits with a scale for each output, [out / PANEL][in / 4][PANEL][4], as vpdpbusd reads
// them. Each GROUP inputs of a token are then rounded to 8 bits with a scale of their own, and multiplied as whole numbers.
// AMX widens these weights to bf16 (their panels are those of bf16).

#pragma once

#include <cmath>

#include "threads.h"
#include "vectors.h"

constexpr int64_t PANEL = 2 * VL;  // outputs of a panel
constexpr int64_t CHUNK = 192;     // tokens that go through layers together
constexpr int64_t GROUP = 64;      // inputs of a token that share a scale, for bytes

enum Kind : int64_t { BF16 = 0, FP32 = 1, BYTE = 2 };

struct Linear {
  const void* weight;  // packed; null: no such layer
  const float* bias;   // or null
  int64_t in, out, kind;
  const float* scales;  // of the outputs, [panels * PANEL]; for bytes
  int64_t panels() const { return (out + PANEL - 1) / PANEL; }
  int64_t pairs() const { return (in + 1) / 2; }
};

// Inputs of products, [tokens][2 * pairs]: fp32, or bf16 for vdpbf16ps.
template <class X> static inline void put(X* to, float x) {
  if constexpr (sizeof(X) == 2) *to = narrow(x); else *to = x;
}

static inline int64_t even(int64_t n) { return n + n % 2; }

// Tokens in the order in which tiles read them, each tile's side by side (AMX: as they were); valid until this thread
// arranges others.
template <class X> struct Arranged {
  const X* x;
  // for bytes
  const float* totals;   // of each token (AMX)
  const int8_t* rounded;
  const float* scales;   // of the groups of rounded inputs
  const int32_t* zeros;  // what the bytes of weights of 0 add to the groups' sums, to be taken off
};

// x [tokens][2 * pairs], for layers of this kind.
template <class X> Arranged<X> arrange(const X* x, int64_t tokens, int64_t pairs, int64_t kind);

// Arranged inputs times a panel, to y [tokens][width], which begins with the panel's outputs.
template <class X> void multiply(Arranged<X> arranged, int64_t tokens, const Linear& w, int64_t panel, float* y, int64_t width);

// Writes a token's inputs of products, normed where there is a weight, with zeros after them.
template <class X> void norm(const float* x, const float* weight, int64_t size, float eps, X* to, int64_t padded) {
  if (!weight) {
    for (int64_t i = 0; i < size; i++) put(to + i, x[i]);
  } else {
    vf squares = {};
    int64_t i = 0;
    for (; i + VL <= size; i += VL) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    float factor = 1.f / std::sqrt(total / float(size) + eps);
    for (i = 0; i < size; i++) put(to + i, x[i] * factor * weight[i]);
  }
  for (int64_t i = size; i < padded; i++) put(to + i, 0.f);
}

// y [tokens][out] = x [tokens][in] times a packed layer; every thread calls then(its number) when nothing is left to take.
template <class Then> void multiply_all(const Linear& layer, const float* x, int64_t tokens, float* y, bool round_inputs, int threads, Then&& then) {
  const int64_t stride = even(layer.in);
  auto run = [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    std::vector<X> h(std::min(CHUNK, tokens) * stride);
    for (int64_t start = 0; start == 0 || start < tokens; start += CHUNK) {  // each thread keeps a copy of a chunk
      const int64_t some = std::min(CHUNK, tokens - start);
      for (int64_t m = 0; m < some; m++) norm(x + (start + m) * layer.in, nullptr, layer.in, 0.f, h.data() + m * stride, stride);
      Queues queues(1, threads);
      Team::get().run(threads, [&](int t) {
        const Arranged<X> arranged = arrange<X>(h.data(), some, layer.pairs(), layer.kind);
        queues[0].take(layer.panels(), t, [&](Range panels) {
          for (int64_t panel = panels.begin; panel < panels.end; panel++) multiply(arranged, some, layer, panel, y + start * layer.out + panel * PANEL, layer.out);
        });
        if (start + some == tokens) then(t);
      });
    }
  };
  if (BF16_PRODUCTS && round_inputs && layer.kind != FP32) run((uint16_t*)nullptr); else run((float*)nullptr);
}
