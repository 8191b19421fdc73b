// Attention computes in fp32; where the machine multiplies bf16, scores with bf16 keys are such products, of queries
// written as sums of two bf16 numbers.

#include "attention.h"

#include <cmath>

#include "linear.h"

constexpr int64_t FETCH = 64;     // keys, or values, between those that are read and what is fetched for later

// Halves the terms of two sums over lanes: those of a are left in the lanes whose number has not `half` in it, those
// of b in the others.
template <int half> static inline vf fold(vf a, vf b) {
  vf own, other;
#if defined(__clang__)
  for (int i = 0; i < VL; i++) own[i] = i & half ? b[i] : a[i], other[i] = i & half ? b[i - half] : a[i + half];
#else
  vi at_own, at_other;
  UNROLL for (int i = 0; i < VL; i++) {
    at_own[i] = i & half ? VL + i : i;  // a blend, which is cheaper than a permutation
    at_other[i] = i & half ? VL + i - half : i + half;
  }
  own = __builtin_shuffle(a, b, at_own), other = __builtin_shuffle(a, b, at_other);
#endif
  return own + other;
}

template <int half> static inline vf fold_all(vf* parts) {
  if constexpr (half > 0) {
    UNROLL for (int i = 0; i < half; i++) parts[i] = fold<half>(parts[i], parts[i + half]);
    return fold_all<half / 2>(parts);
  }
  return parts[0];
}

// Two vectors of a key or a value: its next numbers, or, in bf16, which are widened as they are read, first those of
// even and then those of odd dims.
static inline void two(const float* at, vf& first, vf& second) { first = load(at), second = load(at + VL); }
static inline void two(const uint16_t* at, vf& even, vf& odd) {
  vu pairs;
  std::memcpy(&pairs, at, sizeof pairs);
  even = (vf)(pairs << 16), odd = (vf)(pairs & 0xffff0000u);
}

// Calls use(d, place) for each dim of a head with its place where `two` reads `size` dims that way and the rest singly.
template <class K, class Use> static inline void places(int64_t dim, int64_t size, Use&& use) {
  const int64_t end = std::is_same_v<K, float> ? 0 : dim / size * size;
  for (int64_t d = 0; d < end; d++) use(d, d / (2 * VL) * (2 * VL) + d % 2 * VL + d % (2 * VL) / 2);
  for (int64_t d = end; d < dim; d++) use(d, d);
}

// Puts a head's query into the order in which `dots` reads it beside keys of this kind. Where bf16 is multiplied and keys are
// bf16, each of its numbers becomes the sum of two, [2][dim] in bf16: nothing but its last bits is lost.
template <class K> static inline void arrange_query(const float* q, int64_t dim, float* to) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(K) == 2) {
    for (int64_t d = 0; d < dim; d += VL) {
      const __mmask16 some = __mmask16((1u << std::min<int64_t>(VL, dim - d)) - 1);
      const __m512 x = _mm512_maskz_loadu_ps(some, q + d);
      const __m256i large = (__m256i)_mm512_cvtneps_pbh(x);
      const __m512 rest = _mm512_sub_ps(x, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(large), 16));
      _mm256_mask_storeu_epi16((uint16_t*)to + d, some, large);
      _mm256_mask_storeu_epi16((uint16_t*)to + dim + d, some, (__m256i)_mm512_cvtneps_pbh(rest));
    }
    return;
  }
#endif
  places<K>(dim, 2 * VL, [&](int64_t d, int64_t place) { to[place] = q[d]; });
}

// q · key for VL keys, of which key(i) is the i-th; every lane sums in the same order. DIM: dim, or 0.
template <int DIM, class Key> static inline vf dots(const float* q, Key&& key, int64_t dim) {
  vf parts[VL];
  UNROLL for (int i = 0; i < VL; i++) parts[i] = vf{};
  const int64_t end = DIM ? DIM : dim;
  int64_t d = 0;
#if defined(__AVX512BF16__)
  if constexpr (sizeof(*key(0)) == 2) {
    const uint16_t *large = (const uint16_t*)q, *small = large + end;
    for (; d + 2 * VL <= end; d += 2 * VL) {
      const __m512bh first = (__m512bh)_mm512_loadu_si512(large + d), second = (__m512bh)_mm512_loadu_si512(small + d);
      UNROLL for (int i = 0; i < VL; i++) {
        const __m512bh some = (__m512bh)_mm512_loadu_si512(key(i) + d);
        parts[i] = (vf)_mm512_dpbf16_ps((__m512)parts[i], first, some);
        parts[i] = (vf)_mm512_dpbf16_ps((__m512)parts[i], second, some);
      }
    }
    vf sums = fold_all<VL / 2>(parts);
    if constexpr (DIM == 0 || DIM % (2 * VL))
      for (; d < end; d++) {
        uint16_t both[2];
        std::memcpy(both, large + d, 2), std::memcpy(both + 1, small + d, 2);
        for (int i = 0; i < VL; i++) sums[i] += (one(both) + one(both + 1)) * one(key(i) + d);
      }
    return sums;
  }
#endif
  for (; d + 2 * VL <= end; d += 2 * VL) {
    const vf first = load(q + d), second = load(q + d + VL);
    UNROLL for (int i = 0; i < VL; i++) {
      vf a, b;
      two(key(i) + d, a, b);
      parts[i] = fma(first, a, parts[i]);
      parts[i] = fma(second, b, parts[i]);
    }
  }
  vf sums = fold_all<VL / 2>(parts);
  if constexpr (DIM == 0 || DIM % (2 * VL))
    for (; d < end; d++)
      for (int i = 0; i < VL; i++) sums[i] += q[d] * one(key(i) + d);
  return sums;
}

// Fetches every n-th line of some keys or values, from the t-th on, into the second cache: all would wait for each other.
// Always inline: gcc drops calls of a function that does nothing else.
template <class K> __attribute__((always_inline)) static inline void fetch(const K* from, int64_t count, int64_t t, int64_t n) {
  constexpr int64_t LINE = 64 / sizeof(K);
  for (int64_t i = t * LINE; i < count; i += n * LINE) __builtin_prefetch(from + i, 0, 2);
}

// Scores of some keys, of which key(i) is the i-th, and up to VL - 1 numbers after them. before(i) is called for each VL.
template <int DIM, class Key, class Before> static inline void score(const float* q, int64_t count, Key&& key, Before&& before, float scale, int64_t dim, float* scores) {
  int64_t i = 0;
  for (; i + VL <= count; i += VL) {
    before(i);
    store(scores + i, dots<DIM>(q, [&](int j) { return key(i + j); }, dim) * scale);
  }
  if (i < count) store(scores + i, dots<DIM>(q, [&](int j) { return key(std::min(i + j, count - 1)); }, dim) * scale);
}

// Writes a head's sums of values, which are in the order in which `weigh` adds those, as inputs of a product.
template <class K, class X> static inline void put_sums(const float* sums, int64_t dim, X* to) {
  int64_t begin = 0;
  if constexpr (sizeof(K) == 2 && sizeof(X) == 2) {
    auto rounded = [](vf x) {  // as `narrow`, in the upper halves
      const vu bits = (vu)x;
      return x != x ? vu{} + 0x7fc00000u : bits + 0x7fffu + (bits >> 16 & 1u);
    };
    for (; begin + 4 * VL <= dim; begin += 4 * VL)
      for (int64_t d = begin; d < begin + 4 * VL; d += 2 * VL) {
        const vu pairs = rounded(load(sums + d)) >> 16 | (rounded(load(sums + d + VL)) & 0xffff0000u);
        std::memcpy(to + d, &pairs, sizeof pairs);
      }
  }
  places<K>(dim, 4 * VL, [&](int64_t d, int64_t place) { if (d >= begin) put(to + d, sums[place]); });
}

constexpr int TOGETHER = VL == 16 ? 4 : 2;  // queries whose sums fit into registers

// Adds values, of which value(j) is the j-th, by the weights of Q queries, each in the order of values. DIM: dim, or 0.
template <int Q, int DIM, class Value> static inline void weigh(const float* const* weights, int64_t count, Value&& value, int64_t ahead, int64_t dim, float* const* sums) {
  const int64_t end = DIM ? DIM : dim;
  int64_t d = 0;
  for (; d + 4 * VL <= end; d += 4 * VL) {
    vf acc[Q][4];
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int m = 0; m < Q; m++) acc[m][i] = load(sums[m] + d + i * VL);
    for (int64_t j = 0; j < count; j++) {
      if (ahead) fetch(value(j + ahead) + d, 4 * VL, 0, 1);
      vf v[4];
      two(value(j) + d, v[0], v[1]);
      two(value(j) + d + 2 * VL, v[2], v[3]);
      UNROLL for (int m = 0; m < Q; m++) {
        const vf weight = splat(weights[m][j]);
        UNROLL for (int i = 0; i < 4; i++) acc[m][i] = fma(weight, v[i], acc[m][i]);
      }
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int m = 0; m < Q; m++) store(sums[m] + d + i * VL, acc[m][i]);
  }
  if constexpr (DIM == 0 || DIM % (4 * VL))
    for (; d < end; d++)
      for (int m = 0; m < Q; m++)
        for (int64_t j = 0; j < count; j++) sums[m][d] += weights[m][j] * one(value(j) + d);
}

template <int Q, int DIM, class Value> static inline void weigh_some(int q, const float* const* weights, int64_t count, Value&& value, int64_t ahead, int64_t dim, float* const* sums) {
  if (q == Q) weigh<Q, DIM>(weights, count, value, ahead, dim, sums);
  else if constexpr (Q > 1) weigh_some<Q - 1, DIM>(q, weights, count, value, ahead, dim, sums);
}

// Queries that share keys and values, over the slots they see, in order of position. They go through their runs
// together, some slots at a time, which stay in the cache that is next to the core. DIM: dim, or 0.
template <int DIM, class X, class K> static void attend(std::span<const Query<X>> queries, const K* keys, const K* values, float scale, int64_t dim) {
  Range all = queries[0].run;
  for (const Query<X>& query : queries) {
    all = {std::min(all.begin, query.run.begin), std::max(all.end, query.run.end)};
    arrange_query<K>(query.q, dim, query.sums);
  }
  for (int64_t part = all.begin; part < all.end; part += KEYS) {
    for (size_t i = 0; i < queries.size(); i++) {
      const Range own = queries[i].of_run(part);
      auto fetch_next = [&](int64_t key) __attribute__((always_inline)) {  // after the last keys the first values
        const int64_t slot = own.begin + key + FETCH;
        fetch(slot < all.end ? keys + slot * dim : values + (all.begin + slot - all.end) * dim, VL * dim, i, queries.size());
      };
      score<DIM>(queries[i].sums, own.end - own.begin, [at = keys + own.begin * dim, dim](int64_t key) { return at + key * (DIM ? DIM : dim); }, fetch_next, scale, dim, queries[i].scores + own.begin - queries[i].run.begin);
    }
  }
  for (const Query<X>& query : queries)
    score<DIM>(query.sums, query.path_length, [&](int64_t key) { return keys + query.path[key] * dim; }, [](int64_t) {}, scale, dim, query.scores + query.before());
  for (const Query<X>& query : queries) {
    float* scores = query.scores;
    for (int64_t i = query.count(); i % VL; i++) scores[i] = -INFINITY;
    vf largest = splat(-INFINITY), total = {};
    for (int64_t i = 0; i < query.count(); i += VL) largest = load(scores + i) > largest ? load(scores + i) : largest;
    float most = largest[0];
    for (int i = 1; i < VL; i++) most = std::max(most, largest[i]);
    for (int64_t i = 0; i < query.count(); i += VL) {
      vf e = exp(load(scores + i) - most);
      if (i + VL > query.count()) e = LANES < vi{} + int32_t(query.count() - i) ? e : vf{};
      store(scores + i, e);
      total += e;
    }
    const float inverse = 1.f / sum(total);
    for (int64_t i = 0; i < query.count(); i += VL) store(scores + i, load(scores + i) * inverse);
    std::fill(query.sums, query.sums + dim, 0.f);
  }
  for (int64_t part = all.begin; part < all.end; part += KEYS) {
    for (size_t i = 0; i < queries.size();) {
      const int64_t ahead = i || part + FETCH >= all.end ? 0 : FETCH;
      const Range own = queries[i].of_run(part);
      const float* weights[TOGETHER];
      float* sums[TOGETHER];
      int q = 0;
      for (; q < TOGETHER && i < queries.size() && queries[i].of_run(part) == own; q++, i++)
        weights[q] = queries[i].scores + own.begin - queries[i].run.begin, sums[q] = queries[i].sums;
      weigh_some<TOGETHER, DIM>(q, weights, own.end - own.begin, [at = values + own.begin * dim, dim](int64_t j) { return at + j * (DIM ? DIM : dim); }, ahead, dim, sums);
    }
  }
  for (const Query<X>& query : queries) {
    const float* weights = query.scores + query.before();
    weigh<1, DIM>(&weights, query.path_length, [&](int64_t j) { return values + query.path[j] * dim; }, 0, dim, &query.sums);
    put_sums<K>(query.sums, dim, query.to);
  }
}

template <class X, class K> void attend(std::span<const Query<X>> queries, const K* keys, const K* values, float scale, int64_t dim) {
  if (dim == 64) attend<64>(queries, keys, values, scale, dim);  // keys at distances that the compiler knows
  else if (dim == 128) attend<128>(queries, keys, values, scale, dim);
  else attend<0>(queries, keys, values, scale, dim);
}

#define INSTANTIATE(X, K) template void attend(std::span<const Query<X>>, const K*, const K*, float, int64_t);
INSTANTIATE(float, float)
INSTANTIATE(float, uint16_t)
INSTANTIATE(uint16_t, float)
INSTANTIATE(uint16_t, uint16_t)
