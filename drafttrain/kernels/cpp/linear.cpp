// Products with packed weights: `tile` by vectors, `multiply_tiles` by AMX; packing.

#include "linear.h"

#include <cstdlib>
#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(AVX_VNNI) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#pragma GCC target("avxvnni")
#define MULTIPLIES_BYTES
#endif

#if defined(__AVX512F__)
constexpr int TILE = 12;
#elif defined(__AVX2__)
constexpr int TILE = 5;
#else
constexpr int TILE = 4;
#endif
#if defined(FETCH_ALWAYS)
constexpr bool ALWAYS = true;  // Intel's cores fetch too little by themselves, at any number of tokens
#else
constexpr bool ALWAYS = false;
#endif
constexpr int64_t AHEAD = 128;  // steps of a panel between a product and the weights that are fetched for later ones
constexpr int64_t TILES_AHEAD = 64 * PANEL;  // the same for AMX
#if defined(__AMX_BF16__)
constexpr bool TILES = true;
#else
constexpr bool TILES = false;
#endif
constexpr int ZERO = 64;      // the byte of a weight of 0; all are 0 ... 127
constexpr int RAISED = 128;   // with 0x43 above it a byte is the bf16 of RAISED + byte

#if defined(__AVX2__) && !defined(__AVX512F__)
#define KEEP_APART(a, b) asm volatile("" : "+x"(a), "+x"(b))  // else both halves are in registers at once
#else
#define KEEP_APART(a, b)
#endif

// Where the byte of an input and an output is in a panel.
static int64_t byte_place(int64_t input, int64_t lane) {
  if (!TILES) return (input / 4 * PANEL + lane) * 4 + input % 4;
  // unpacking takes the lower, then the upper halves of 16 bytes each
  return input / 2 * PANEL * 2 + lane % VL / 4 * 16 + lane / VL * 8 + lane % 4 * 2 + input % 2;
}

static int64_t quads_of(int64_t in) { return (in + 3) / 4; }
static int64_t groups_of(int64_t in) { return (in + GROUP - 1) / GROUP; }
static int64_t byte_inputs(int64_t in) { return TILES ? even(in) : quads_of(in) * 4; }  // those that a panel has

// Writes a token's outputs from `first` on, with their bias.
static inline void put_outputs(vf sums, const Linear& w, int64_t first, float* to) {
  if (first + VL <= w.out) return store(to, w.bias ? sums + load(w.bias + first) : sums);
  float values[VL];
  store(values, sums);
  for (int64_t i = 0; first + i < w.out && i < VL; i++) to[i] = values[i] + (w.bias ? w.bias[first + i] : 0.f);
}

// Fetches the weights of a later step, which has SIZE bytes, where that helps with M tokens: if products take as long as
// memory, both go on at once only by this. Always inline: gcc drops calls of a function that does nothing else.
template <int M, class X, int64_t SIZE> __attribute__((always_inline)) static inline void fetch(const void* step) {
  if constexpr (ALWAYS || (sizeof(X) == 2 && M >= 6))
    for (int64_t i = 0; i < SIZE; i += 64) __builtin_prefetch((const char*)step + AHEAD * SIZE + i, 0, 2);
}

// M tokens times a panel, to y [M][width], which begins with the panel's outputs; sums over inputs from the first
// to the last. x is [pairs][M][2].
template <int M, class X> static inline void tile(const X* x, const Linear& w, int64_t panel, float* y, int64_t width) {
  vf acc[2][M];
  UNROLL for (int m = 0; m < M; m++) acc[0][m] = acc[1][m] = vf{};
  const int64_t pairs = w.pairs();
  if (w.kind == BF16) {
    const uint32_t* base = (const uint32_t*)w.weight + panel * pairs * PANEL;
    for (int64_t k = 0; k < pairs; k++) {
      const uint32_t* at = base + k * PANEL;
      vu a, b;
      std::memcpy(&a, at, sizeof a);
      std::memcpy(&b, at + VL, sizeof b);
      fetch<M, X, PANEL * 4>(at);
#if defined(__AVX512BF16__)
      if constexpr (sizeof(X) == 2) {
        UNROLL for (int m = 0; m < M; m++) {
          int32_t two;
          std::memcpy(&two, x + (k * M + m) * 2, 4);
          __m512bh both = (__m512bh)_mm512_set1_epi32(two);
          acc[0][m] = (vf)_mm512_dpbf16_ps((__m512)acc[0][m], (__m512bh)a, both);
          acc[1][m] = (vf)_mm512_dpbf16_ps((__m512)acc[1][m], (__m512bh)b, both);
        }
        continue;
      }
#endif
      if constexpr (sizeof(X) == 4) {
        vf a0 = (vf)(a << 16), b0 = (vf)(b << 16);
        UNROLL for (int m = 0; m < M; m++) {
          vf even = splat(x[(k * M + m) * 2]);
          acc[0][m] = fma(a0, even, acc[0][m]);
          acc[1][m] = fma(b0, even, acc[1][m]);
        }
        KEEP_APART(a, b);
        vf a1 = (vf)((a >> 16) << 16), b1 = (vf)((b >> 16) << 16);
        UNROLL for (int m = 0; m < M; m++) {
          vf odd = splat(x[(k * M + m) * 2 + 1]);
          acc[0][m] = fma(a1, odd, acc[0][m]);
          acc[1][m] = fma(b1, odd, acc[1][m]);
        }
      }
    }
  } else if constexpr (sizeof(X) == 4) {
    for (int64_t k = 0; k < w.in; k++) {
      const float* at = (const float*)w.weight + (panel * w.in + k) * PANEL;
      fetch<M, X, PANEL * 4>(at);
      vf a = load(at), b = load(at + VL);
      UNROLL for (int m = 0; m < M; m++) {
        vf one = splat(x[(k / 2 * M + m) * 2 + k % 2]);
        acc[0][m] = fma(a, one, acc[0][m]);
        acc[1][m] = fma(b, one, acc[1][m]);
      }
    }
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int half = 0; half < 2; half++)
      put_outputs(acc[half][m], w, panel * PANEL + half * VL, y + m * width + half * VL);
}

#if defined(__AVX2__)

// sums + the four products of each lane: of a byte below 128 of `a` and a signed one of `b`.
static inline vi add_products(vi sums, vi a, vi b) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)  // two of them together fit 16 bits
  const __m512i two = _mm512_maddubs_epi16((__m512i)a, (__m512i)b);
  return sums + (vi)_mm512_madd_epi16(two, _mm512_set1_epi16(1));
#elif defined(MULTIPLIES_BYTES)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)a, (__m256i)b);
#else
  const __m256i two = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
  return sums + (vi)_mm256_madd_epi16(two, _mm256_set1_epi16(1));
#endif
}

// `tile` for bytes: x is [quads][M][4], its scales and zeros are [groups][M].
template <int M> static inline void byte_tile(const int8_t* x, const float* scales, const int32_t* zeros, const Linear& w, int64_t panel, float* y, int64_t width) {
  vf acc[2][M];
  UNROLL for (int m = 0; m < M; m++) acc[0][m] = acc[1][m] = vf{};
  const int64_t quads = quads_of(w.in), groups = groups_of(w.in);
  const uint8_t* base = (const uint8_t*)w.weight + panel * quads * PANEL * 4;
  for (int64_t group = 0; group < groups; group++) {
    vi sums[2][M];
    UNROLL for (int m = 0; m < M; m++) sums[0][m] = sums[1][m] = zeros[group * M + m] - vi{};
    const int64_t end = std::min(quads, (group + 1) * (GROUP / 4));
    for (int64_t k = group * (GROUP / 4); k < end; k++) {
      const uint8_t* at = base + k * PANEL * 4;
      vi a, b;
      std::memcpy(&a, at, sizeof a);
      std::memcpy(&b, at + sizeof a, sizeof b);
      fetch<M, uint16_t, PANEL * 4>(at);
      UNROLL for (int m = 0; m < M; m++) {
        int32_t four;
        std::memcpy(&four, x + (k * M + m) * 4, 4);
        const vi all = four - vi{};
        sums[0][m] = add_products(sums[0][m], a, all);
        sums[1][m] = add_products(sums[1][m], b, all);
      }
    }
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int half = 0; half < 2; half++)
        acc[half][m] = fma(__builtin_convertvector(sums[half][m], vf), splat(scales[group * M + m]), acc[half][m]);
  }
  UNROLL for (int m = 0; m < M; m++)
    UNROLL for (int half = 0; half < 2; half++) {
      const int64_t first = panel * PANEL + half * VL;
      put_outputs(acc[half][m] * load(w.scales + first), w, first, y + m * width + half * VL);
    }
}

static inline vf load(const uint16_t* p) {  // of bf16
  vh some;
  std::memcpy(&some, p, sizeof some);
  return (vf)(__builtin_convertvector(some, vi) << 16);
}

// Rounds a group of a token's inputs to whole numbers up to 127. NaN and infinity make the scale NaN.
template <class X> static inline void round_group(const X* x, int8_t* to, float& scale, int32_t& zero) {
  vf values[GROUP / VL], most = {}, strange = {};
  UNROLL for (int i = 0; i < GROUP / VL; i++) {
    values[i] = load(x + i * VL);
    const vf positive = (vf)((vi)values[i] & 0x7fffffff);
    most = positive > most ? positive : most;
    strange += values[i] * 0.f;
  }
  const float largest = max(most);
  scale = largest / 127.f + sum(strange);
  const vf factor = splat(largest > 1e-30f ? 127.f / largest : 0.f);
  vi total = {};
  UNROLL for (int i = 0; i < GROUP / VL; i++) {
    const vi whole = (vi)(values[i] * factor + 12582912.f) - 0x4B400000;  // the nearest
    const vb bytes = __builtin_convertvector(whole, vb);
    std::memcpy(to + i * VL, &bytes, sizeof bytes);
    total += whole;
  }
  zero = -ZERO * int32_t(sum(__builtin_convertvector(total, vf)));  // up to 64 * 127, so exact
}

#endif

static Range part_of(int64_t tokens, int64_t i) {
  int64_t tiles = (tokens + TILE - 1) / TILE;
  return share(tokens, int(i), int(tiles));
}

template <int M, class X> static void tile_of(Arranged<X> arranged, int64_t m, int64_t begin, const Linear& w, int64_t panel, float* y, int64_t width) {
  if (m == M) {
#if defined(__AVX2__)
    if (w.kind == BYTE) {
      const int64_t groups = begin * groups_of(w.in);
      return byte_tile<M>(arranged.rounded + begin * byte_inputs(w.in), arranged.scales + groups, arranged.zeros + groups, w, panel, y, width);
    }
#endif
    tile<M>(arranged.x + begin * w.pairs() * 2, w, panel, y, width);
  } else if constexpr (M > 1) {
    tile_of<M - 1>(arranged, m, begin, w, panel, y, width);
  }
}

#if defined(__AMX_BF16__)

static float total(const uint16_t* x, int64_t size) {  // of bf16
  vf sums = {};
  int64_t i = 0;
  for (; i + VL <= size; i += VL) sums += load(x + i);
  float all = sum(sums);
  for (; i < size; i++) all += one(x + i);
  return all;
}

#endif

template <class X> Arranged<X> arrange(const X* x, int64_t tokens, int64_t pairs, int64_t kind) {
  static thread_local std::vector<X> arranged;
#if defined(__AMX_BF16__)
  if constexpr (sizeof(X) == 2) {
    static thread_local std::vector<float> totals;
    if (kind == BYTE) {
      totals.resize(std::max(totals.size(), size_t(tokens)));
      for (int64_t m = 0; m < tokens; m++) totals[m] = total(x + m * pairs * 2, pairs * 2);
    }
    return {x, totals.data(), nullptr, nullptr, nullptr};
  }
#elif defined(__AVX2__)
  if (kind == BYTE) {
    static thread_local std::vector<int8_t> rounded;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<int32_t> zeros;
    const int64_t in = pairs * 2, quads = quads_of(in), groups = groups_of(in);
    rounded.resize(std::max(rounded.size(), size_t(tokens * quads * 4)));
    scales.resize(std::max(scales.size(), size_t(tokens * groups)));
    zeros.resize(scales.size());
    for (int64_t i = 0; i * TILE < tokens; i++) {
      const Range part = part_of(tokens, i);
      const int64_t m = part.end - part.begin;
      int8_t* to = rounded.data() + part.begin * quads * 4;
      for (int64_t j = 0; j < m; j++)
        for (int64_t group = 0; group < groups; group++) {
          const int64_t begin = group * GROUP, size = std::min(GROUP, in - begin), place = (part.begin * groups + group * m) + j;
          const X* from = x + (part.begin + j) * in + begin;
          X padded[GROUP] = {};
          if (size < GROUP) from = (const X*)std::memcpy(padded, from, size * sizeof(X));
          int8_t bytes[GROUP];
          round_group(from, bytes, scales[place], zeros[place]);
          for (int64_t k = 0; k < quads_of(size); k++) std::memcpy(to + ((begin / 4 + k) * m + j) * 4, bytes + k * 4, 4);
        }
    }
    return {x, nullptr, rounded.data(), scales.data(), zeros.data()};
  }
#endif
  if (tokens == 1) return {x, nullptr, nullptr, nullptr, nullptr};
  arranged.resize(std::max(arranged.size(), size_t(tokens * pairs * 2)));
  for (int64_t i = 0; i * TILE < tokens; i++) {
    Range part = part_of(tokens, i);
    const int64_t m = part.end - part.begin;
    X* to = arranged.data() + part.begin * pairs * 2;
    for (int64_t j = 0; j < m; j++)
      for (int64_t k = 0; k < pairs; k++) std::memcpy(to + (k * m + j) * 2, x + ((part.begin + j) * pairs + k) * 2, 2 * sizeof(X));
  }
  return {arranged.data(), nullptr, nullptr, nullptr, nullptr};
}

#if defined(__AMX_BF16__)

// A token's products with bytes as they were read, from `first` on, made those with the weights that they stand for.
static inline vf of_bytes(vf sums, float total, const Linear& w, int64_t first) {
  return (sums - total * float(RAISED + ZERO)) * load(w.scales + first);
}

// Tiles 0 to 3 are the sums of two parts of up to 16 tokens with the panel's halves, 4 and 5 the parts' inputs, 6 and 7
// weights. Each is 16 pairs deep, and a token's sums are the same with any others.
void configure_tiles(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = i < 6 ? uint8_t(rows) : 16;
  asm volatile("" : : "r"(&config) : "memory");  // the intrinsic may not say that it reads
  _tile_loadconfig(&config);
}

// One step of 16 pairs.
template <bool BOTH> static inline void add_tiles(const uint16_t* first, const uint16_t* second, int64_t stride, const uint32_t* weights) {
  _tile_loadd(6, weights, PANEL * 4);
  _tile_loadd(7, weights + VL, PANEL * 4);
  _tile_loadd(4, first, stride * 2);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (BOTH) {
    _tile_loadd(5, second, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Weights of 16 pairs in bf16, `count` of them widened from bytes and zeros after those.
static inline void unpack(const uint8_t* from, int64_t count, uint32_t* to) {
  const __m512i above = _mm512_set1_epi8(0x43);
  for (int64_t k = 0; k < count; k++) {
    const __m512i bytes = _mm512_loadu_si512(from + k * PANEL * 2);
    _mm512_store_si512(to + k * PANEL, _mm512_unpacklo_epi8(bytes, above));
    _mm512_store_si512(to + k * PANEL + VL, _mm512_unpackhi_epi8(bytes, above));
  }
  std::fill(to + count * PANEL, to + 16 * PANEL, 0);
}

// Two parts of `rows` tokens, or one, times a panel, to y [tokens][width].
template <bool BOTH> void multiply_parts(Arranged<uint16_t> inputs, int64_t rows, int64_t begin, int64_t next, const Linear& w, int64_t panel, float* y, int64_t width) {
  const int64_t pairs = w.pairs(), stride = pairs * 2, deep = pairs / 16 * 16, rest = pairs - deep;
  const int64_t size = w.kind == BYTE ? PANEL * 2 : PANEL * 4;  // of a pair of a panel
  const uint8_t* weights = (const uint8_t*)w.weight + panel * pairs * size;
  const uint16_t *first = inputs.x + begin * stride, *second = inputs.x + next * stride;
  alignas(64) uint32_t wide[2][16 * PANEL];
  asm volatile("" : : : "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < deep; k += 16) {
    const uint8_t* at = weights + k * size;
    if (!begin)  // the panel stays in the cache
      for (int64_t i = 0; i < 16 * size; i += 64) __builtin_prefetch(at + TILES_AHEAD * size / PANEL + i, 0, 2);
    const uint32_t* from = (const uint32_t*)at;
    if (w.kind == BYTE) {
      unpack(at, 16, wide[k / 16 % 2]);
      asm volatile("" : : "r"(wide) : "memory");
      from = wide[k / 16 % 2];
    }
    add_tiles<BOTH>(first + 2 * k, second + 2 * k, stride, from);
  }
  if (rest) {  // with zeros after them
    alignas(64) uint16_t last[2][16][32] = {};
    uint32_t* to = wide[deep / 16 % 2];  // not what the tiles of the last step were loaded from
    for (int64_t m = 0; m < rows; m++) {
      std::memcpy(last[0][m], first + m * stride + 2 * deep, rest * 4);
      std::memcpy(last[1][m], second + m * stride + 2 * deep, rest * 4);
    }
    if (w.kind == BYTE) {
      unpack(weights + deep * size, rest, to);
    } else {
      std::memcpy(to, weights + deep * size, rest * size);
      std::fill(to + rest * PANEL, to + 16 * PANEL, 0);
    }
    asm volatile("" : : "r"(last), "r"(wide) : "memory");
    add_tiles<BOTH>(last[0][0], last[1][0], 32, to);
  }
  alignas(64) float sums[4][16][VL];
  _tile_stored(0, sums[0], VL * 4);
  _tile_stored(1, sums[1], VL * 4);
  _tile_stored(2, sums[2], VL * 4);
  _tile_stored(3, sums[3], VL * 4);
  asm volatile("" : : "r"(sums) : "memory");
  for (int part = 0; part < (BOTH ? 2 : 1); part++)
    for (int64_t m = 0; m < rows; m++)
      for (int half = 0; half < 2; half++) {
        const int64_t token = (part ? next : begin) + m, output = panel * PANEL + half * VL;
        vf sum = load(sums[2 * part + half][m]);
        if (w.kind == BYTE) sum = of_bytes(sum, inputs.totals[token], w, output);
        put_outputs(sum, w, output, y + token * width + half * VL);
      }
}

// Parts are of the same size, so that tiles need not be changed: the last ones share tokens where it does not divide.
void multiply_tiles(Arranged<uint16_t> inputs, int64_t tokens, const Linear& w, int64_t panel, float* y, int64_t width) {
  if (!tokens) return;
  const int64_t parts = (tokens + 15) / 16, rows = (tokens + parts - 1) / parts;
  auto begin = [&](int64_t part) { return std::min(part * rows, tokens - rows); };
  configure_tiles(rows);
  int64_t part = 0;
  for (; part + 1 < parts; part += 2) multiply_parts<true>(inputs, rows, begin(part), begin(part + 1), w, panel, y, width);
  if (part < parts) multiply_parts<false>(inputs, rows, begin(part), begin(part), w, panel, y, width);
  _tile_release();
}

#endif

template <class X> void multiply(Arranged<X> arranged, int64_t tokens, const Linear& w, int64_t panel, float* y, int64_t width) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(X) == 2) return multiply_tiles(arranged, tokens, w, panel, y, width);
#endif
  for (int64_t i = 0; i * TILE < tokens; i++) {  // the panel stays in the cache
    Range part = part_of(tokens, i);
    tile_of<TILE>(arranged, part.end - part.begin, part.begin, w, panel, y + part.begin * width, width);
  }
}

template Arranged<float> arrange(const float*, int64_t, int64_t, int64_t);
template Arranged<uint16_t> arrange(const uint16_t*, int64_t, int64_t, int64_t);
template void multiply(Arranged<float>, int64_t, const Linear&, int64_t, float*, int64_t);
template void multiply(Arranged<uint16_t>, int64_t, const Linear&, int64_t, float*, int64_t);

EXPORT int64_t panel_outputs() { return PANEL; }

// Team::times
EXPORT void team_times(int64_t* to) { Team::get().times(to); }

// Bytes of a packed layer of out x in weights.
EXPORT int64_t packed_bytes(int64_t out, int64_t in, int64_t kind) {
  int64_t rows = (out + PANEL - 1) / PANEL * PANEL;
  return kind == FP32 ? rows * in * 4 : kind == BF16 ? rows * even(in) * 2 : rows * byte_inputs(in);
}

// Asks for huge pages: a fresh region that begins and ends with them.
EXPORT void advise_huge(void* region, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(region, size_t(bytes), MADV_HUGEPAGE);
#endif
}

// Packs row-major weights [out][in] of the same kind.
EXPORT void pack(const void* from, int64_t out, int64_t in, int64_t kind, void* to, int64_t threads) {
  int64_t panels = (out + PANEL - 1) / PANEL, pairs = (in + 1) / 2;
  auto work = [&](int t) {
    Range mine = share(panels, t, threads);
    for (int64_t panel = mine.begin; panel < mine.end; panel++)
      for (int64_t lane = 0; lane < PANEL; lane++) {
        int64_t row = panel * PANEL + lane;
        if (kind == BF16) {
          const uint16_t* w = (const uint16_t*)from + row * in;
          uint16_t* packed = (uint16_t*)to + (panel * pairs * PANEL + lane) * 2;
          for (int64_t k = 0; k < pairs; k++)
            for (int half = 0; half < 2; half++)
              packed[k * PANEL * 2 + half] = row < out && 2 * k + half < in ? w[2 * k + half] : 0;
        } else if (kind == BYTE) {
          const uint8_t* w = (const uint8_t*)from + row * in;
          uint8_t* packed = (uint8_t*)to + panel * byte_inputs(in) * PANEL;
          for (int64_t k = 0; k < byte_inputs(in); k++) packed[byte_place(k, lane)] = row < out && k < in ? w[k] : ZERO;
        } else {
          const float* w = (const float*)from + row * in;
          float* packed = (float*)to + panel * in * PANEL + lane;
          for (int64_t k = 0; k < in; k++) packed[k * PANEL] = row < out ? w[k] : 0.f;
        }
      }
  };
  Team::get().run(int(threads), work);
}

// y [tokens][out] = x [tokens][in] times a packed layer, with its bias.
EXPORT void linear(const Linear* layer, const float* x, int64_t tokens, float* y, int64_t round_inputs, int64_t threads) {
  multiply_all(*layer, x, tokens, y, round_inputs, int(threads), [](int) {});
}
