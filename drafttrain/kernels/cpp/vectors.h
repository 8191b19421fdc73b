// Vectors of fp32 as wide as the machine's registers.

#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))  // what Python calls

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
#if defined(__AVX512BF16__)
constexpr bool BF16_PRODUCTS = true;
#else
constexpr bool BF16_PRODUCTS = false;
#endif

#define UNROLL _Pragma("GCC unroll 16")  // accumulators have to be registers

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef int8_t vb __attribute__((vector_size(VL)));

static inline vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
static inline vf splat(float x) { return x - vf{}; }  // x + 0 would change -0, and so cost an addition
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
template <int... i> constexpr vi count_lanes(std::integer_sequence<int, i...>) { return vi{i...}; }
constexpr vi LANES = count_lanes(std::make_integer_sequence<int, VL>());
static inline float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#endif
  float s[VL];
  store(s, v);
  for (int step = VL / 2; step; step /= 2)
    for (int i = 0; i < step; i++) s[i] += s[i + step];
  return s[0];
}
static inline float max(vf v) {
  float s[VL];
  store(s, v);
  for (int step = VL / 2; step; step /= 2)
    for (int i = 0; i < step; i++) s[i] = s[i] > s[i + step] ? s[i] : s[i + step];
  return s[0];
}
// 2^(x / ln 2), relative error below 1e-7; the same for a value in any lane
static inline vf exp(vf x) {
  x = x < -87.f ? splat(-87.f) : x;
  x = x > 88.f ? splat(88.f) : x;
  vf scaled = x * 1.44269504f + 12582912.f;  // rounds to the nearest whole number
  vf whole = scaled - 12582912.f;
  vf r = fma(whole, splat(-0.693359375f), x);
  r = fma(whole, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.f);
  vi power = ((vi)scaled - 0x4B400000) << 23;
  vf result = (vf)((vi)p + power);
  return x == x ? result : x;  // NaN stays NaN
}
static inline uint16_t narrow(float x) {  // to bf16: the nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

static inline float one(const float* at) { return *at; }
static inline float one(const uint16_t* at) { return std::bit_cast<float>(uint32_t(*at) << 16); }
