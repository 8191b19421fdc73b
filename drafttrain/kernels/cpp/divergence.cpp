// Forward KL from one softmax to another, row by row, with its gradient: a row's logits stay in the cache between passes.

#include <cmath>

#include "threads.h"
#include "vectors.h"

static inline vf widen(const float* at) { return load(at); }
static inline vf widen(const uint16_t* at) {
  vh v;
  std::memcpy(&v, at, sizeof v);
  return (vf)(__builtin_convertvector(v, vu) << 16);
}
static inline void put(float* at, vf v) { store(at, v); }
static inline void put(uint16_t* at, vf v) {
  const vu bits = (vu)v;
  const vh rounded = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, vh);  // as `narrow`, NaN apart
  std::memcpy(at, &rounded, sizeof rounded);
}
static inline void put(float* at, float x) { *at = x; }
static inline void put(uint16_t* at, float x) { *at = narrow(x); }

// The largest of a row and the first place that has it.
template <class T> static float largest(const T* x, int64_t width, int64_t* place) {
  vf most = splat(-INFINITY);
  int64_t i = 0;
  for (; i + VL <= width; i += VL) {
    const vf some = widen(x + i);
    most = some > most ? some : most;
  }
  float found = max(most);
  for (; i < width; i++) found = one(x + i) > found ? one(x + i) : found;
  for (i = 0; i + VL <= width; i += VL) {
    int32_t lanes[VL], any = 0;
    const vi equal = widen(x + i) == found;
    std::memcpy(lanes, &equal, sizeof equal);
    for (int j = 0; j < VL; j++) any |= lanes[j];
    if (any) break;
  }
  while (i < width && one(x + i) != found) i++;
  *place = i;
  return found;
}

template <class T> static float log_sum(const T* x, int64_t width, float most) {
  vf part = {};
  int64_t i = 0;
  for (; i + VL <= width; i += VL) part += exp(widen(x + i) - most);
  float total = sum(part);
  for (; i < width; i++) total += exp(splat(one(x + i) - most))[0];
  return most + std::log(total);
}

// Writes the gradient with respect to q in its place; returns whether both have their largest at one place.
template <class Q, class P> static bool divergence(Q* q, const P* p, int64_t width, float* loss) {
  int64_t first_q, first_p, i = 0;
  const float log_q = log_sum(q, width, largest(q, width, &first_q));
  const float log_p = log_sum(p, width, largest(p, width, &first_p));
  vf part = {};
  for (; i + VL <= width; i += VL) {
    const vf of_q = widen(q + i) - log_q, of_p = widen(p + i) - log_p, share = exp(of_p);
    part += share * (of_p - of_q);
    put(q + i, exp(of_q) - share);
  }
  float total = sum(part);
  for (; i < width; i++) {
    const float of_q = one(q + i) - log_q, of_p = one(p + i) - log_p, share = exp(splat(of_p))[0];
    total += share * (of_p - of_q);
    put(q + i, exp(splat(of_q))[0] - share);
  }
  *loss = total;
  return first_q == first_p;
}

// Of each row of logits q and p [rows][width], bf16 or fp32 each: the divergence, in `losses` [rows], and whether both
// have their largest at one place, in `same` [rows]. q becomes the gradient.
EXPORT void divergences(void* q, int64_t q_is_bf16, const void* p, int64_t p_is_bf16, int64_t rows, int64_t width, float* losses, uint8_t* same, int64_t threads) {
  auto go = [&](auto* to, const auto* from) {
    Team::get().run(int(threads), [&](int t) {
      const Range own = share(rows, t, int(threads));
      for (int64_t i = own.begin; i < own.end; i++) same[i] = divergence(to + i * width, from + i * width, width, losses + i);
    });
  };
  auto with_p = [&](auto* to) { p_is_bf16 ? go(to, (const uint16_t*)p) : go(to, (const float*)p); };
  q_is_bf16 ? with_p((uint16_t*)q) : with_p((float*)q);
}
