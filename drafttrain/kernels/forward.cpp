// A decoder's forward on the CPU: linear layers at the speed of memory, and whole blocks of Llama-, Mistral-,
// Qwen2- and Qwen3-style models over the nodes of trees; drafting steps and changes of trees around them.
//
// Every sum runs in an order that depends on the token's own position alone, never on what else is in the
// forward. So a token has the same bits alone, in a chain, in a tree, in a batch, and with any number of threads.
//
// Weights are packed into panels of 2 vectors of outputs: [out / PANEL][in / 2][PANEL][2] in bf16 (a 32-bit
// lane holds two neighbouring inputs, as vdpbf16ps reads them), [out / PANEL][in][PANEL] in fp32. Drafters' may be bytes
// of 7 bits with a scale for each output. A panel is one stream through memory. Sums are fp32; inputs of a product are
// rounded to bf16 where the machine multiplies bf16 (vdpbf16ps, or AMX, whose tiles of weights these panels are, too),
// each token's by itself, and stay fp32 elsewhere. Keys and values are kept in fp32 or, as their cache is, in bf16. Attention computes
// in fp32; where the machine multiplies bf16, scores with bf16 keys are such products, of queries written as sums of two bf16 numbers.
//
// Plain C++ without headers of torch or Python: `build.py` compiles it once per instruction set, `ctypes`
// calls it and releases the GIL.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <numeric>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __linux__
#include <sys/mman.h>
#endif
#include <sched.h>
#include <unistd.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VL = 16, TILE = 12;
#elif defined(__AVX2__)
constexpr int VL = 8, TILE = 5;
#else
constexpr int VL = 4, TILE = 4;
#endif
constexpr int64_t PANEL = 2 * VL;  // outputs of a panel
constexpr int64_t CHUNK = 192;    // tokens that go through the blocks together
constexpr int64_t AHEAD = 128 * PANEL;  // pairs of weights between a product and what is fetched for later ones
constexpr int64_t TILES_AHEAD = 64 * PANEL;  // the same for AMX
constexpr int64_t FETCH = 64;     // keys, or values, between those that are read and what is fetched for later
constexpr int64_t NODES = 32;     // that attend together
constexpr int64_t UNDIVIDED = 4;  // nodes whose head of keys stays with one thread
constexpr int64_t KEYS = 16;      // that they go through at a time
constexpr int64_t PHASES = 6;     // of a block, each with a queue of its own
#if defined(__AVX512BF16__)
constexpr bool BF16_PRODUCTS = true;
#else
constexpr bool BF16_PRODUCTS = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool TILES = true;
#else
constexpr bool TILES = false;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
#define KEEP_APART(a, b) asm volatile("" : "+x"(a), "+x"(b))  // else both halves are in registers at once
#else
#define KEEP_APART(a, b)
#endif
#define UNROLL _Pragma("GCC unroll 16")  // accumulators have to be registers

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));

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

// ---- threads: one team at work at a time, asleep soon after it (torch's threads want the cores too)

// Nanoseconds of the clock, and those in which this thread had a core.
struct Moment {
  int64_t clock, core;
  static Moment now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    const int64_t clock = std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    timespec had;
    const bool told = !clock_gettime(CLOCK_THREAD_CPUTIME_ID, &had);
    return {clock, told ? int64_t(had.tv_sec) * 1'000'000'000 + had.tv_nsec : clock};
  }
};

static inline void relax() {
#if defined(__AVX2__)
  _mm_pause();
#endif
}

class Team {
 public:
  static Team& get() {
    static Team* team = nullptr;
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    if (!team || team->owner != getpid()) team = new Team;  // a fork has none of its parent's threads
    return *team;
  }

  template <class Work> void run(int threads, Work&& work) {
    if (threads <= 1) return work(0);
    std::lock_guard<std::mutex> guard(busy);
    while (int(started) < threads - 1) {
      int number = ++started;
      std::thread([this, number] { serve(number); }).detach();
    }
    call = [](void* w, int t) { (*static_cast<std::remove_reference_t<Work>*>(w))(t); };
    argument = &work;
    const Moment began = Moment::now();
    left.store(threads - 1, std::memory_order_relaxed);
    ticket.store(((ticket.load(std::memory_order_relaxed) >> 8) + 1) << 8 | threads, std::memory_order_seq_cst);
    ticket.notify_all();
    work(0);
    wait([&] { return left.load(std::memory_order_acquire) == 0; });
    count(began);
  }

  // Nanoseconds that threads worked in calls by several so far, and those in which they had a core.
  void times(int64_t* to) const { to[0] = worked.load(std::memory_order_relaxed), to[1] = had.load(std::memory_order_relaxed); }

  template <class Ready> static void wait(Ready ready) {
    for (int spins = 0; !ready(); spins++) {
      relax();
      if (spins > 1000) sched_yield();  // another process has our core
    }
  }

 private:
  void serve(int number) {
    uint32_t seen = 0;
    for (;;) {
      auto asleep = std::chrono::steady_clock::now() + std::chrono::microseconds(2000);  // the next call is near
      while (ticket.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < asleep)
        for (int i = 0; i < 16; i++) relax();
      ticket.wait(seen, std::memory_order_acquire);
      seen = ticket.load(std::memory_order_acquire);
      if (number >= int(seen & 255)) continue;
      const Moment began = Moment::now();
      call(argument, number);
      count(began);
      left.fetch_sub(1, std::memory_order_release);
    }
  }

  void count(Moment began) {
    const Moment now = Moment::now();
    worked.fetch_add(now.clock - began.clock, std::memory_order_relaxed);
    had.fetch_add(now.core - began.core, std::memory_order_relaxed);
  }

  const pid_t owner = getpid();
  std::mutex busy;
  int started = 0;
  std::atomic<uint32_t> ticket{0};  // number of the work << 8 | threads that it takes
  std::atomic<int> left{0};
  std::atomic<int64_t> worked{0}, had{0};
  void (*call)(void*, int) = nullptr;
  void* argument = nullptr;
};

struct Barrier {
  explicit Barrier(int n) : n(n) {}
  void wait() {
    if (n == 1) return;
    int phase = turn.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == n - 1) {
      arrived.store(0, std::memory_order_relaxed);
      turn.store(phase + 1, std::memory_order_release);
    } else {
      Team::wait([&] { return turn.load(std::memory_order_acquire) != phase; });
    }
  }
  const int n;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> turn{0};
};

struct Range {
  int64_t begin, end;
  bool operator==(const Range&) const = default;
};
static Range share(int64_t n, int t, int threads) { return {n * t / threads, n * (t + 1) / threads}; }

// Work of n parts, 0 ... n - 1, in equal shares. A thread goes through its own from the beginning, in ever smaller ranges:
// a share is one stream of weights. Who is ready takes from the ends of others': cores differ, and other processes have them too.
struct Queue {
  std::atomic<uint64_t>* taken;  // of each share: parts that its thread took | parts that others did << 32
  int threads;

  template <class Use> void take(int64_t n, int t, Use&& use) const {
    if (threads == 1) return n ? use(Range{0, n}) : void();
    for (int i = 0; i < threads; i++) {
      const Range all = share(n, (t + i) % threads, threads);
      std::atomic<uint64_t>& state = taken[(t + i) % threads];
      for (uint64_t now = state.load(std::memory_order_relaxed);;) {
        const int64_t begin = all.begin + int64_t(now & 0xffffffff), end = all.end - int64_t(now >> 32);
        if (begin >= end) break;
        const int64_t size = std::max<int64_t>(1, (end - begin) / 2);
        if (!state.compare_exchange_weak(now, now + (uint64_t(size) << (i ? 32 : 0)), std::memory_order_relaxed)) continue;
        use(i ? Range{end - size, end} : Range{begin, begin + size});
        now = state.load(std::memory_order_relaxed);
      }
    }
  }
};

struct Queues {
  Queues(int64_t count, int threads) : taken(count * threads), threads(threads) {}
  Queue operator[](int64_t i) { return {taken.data() + i * threads, threads}; }
  std::vector<std::atomic<uint64_t>> taken;
  const int threads;
};

// ---- linear layers

enum Kind : int64_t { BF16 = 0, FP32 = 1, BYTE = 2 };
constexpr int ZERO = 64;      // the byte of a weight of 0; all are 0 ... 127
constexpr int RAISED = 128;   // with 0x43 above it a byte is the bf16 of RAISED + byte

struct Linear {
  const void* weight;  // packed; null: no such layer
  const float* bias;   // or null
  int64_t in, out, kind;
  const float* scales;  // of the outputs, [panels * PANEL]; for bytes, which take inputs in bf16
  int64_t panels() const { return (out + PANEL - 1) / PANEL; }
  int64_t pairs() const { return (in + 1) / 2; }
};

// Inputs of products, [tokens][2 * pairs]: fp32, or bf16 for vdpbf16ps.
template <class X> static inline void put(X* to, float x) {
  if constexpr (sizeof(X) == 2) *to = narrow(x); else *to = x;
}

// Where a byte of a pair of weights is, among those of a panel: unpacking takes the lower, then the upper halves of 16
// bytes each.
static int64_t byte_place(int64_t lane, int64_t half) { return lane % VL / 4 * 16 + lane / VL * 8 + lane % 4 * 2 + half; }

// A token's products with bytes as they were read, from `first` on, made those with the weights that they stand for.
static inline vf of_bytes(vf sums, float total, const Linear& w, int64_t first) {
  return (sums - total * float(RAISED + ZERO)) * load(w.scales + first);
}

// Writes a token's outputs from `first` on, with their bias.
static inline void put_outputs(vf sums, const Linear& w, int64_t first, float* to) {
  if (first + VL <= w.out) return store(to, w.bias ? sums + load(w.bias + first) : sums);
  float values[VL];
  store(values, sums);
  for (int64_t i = 0; first + i < w.out && i < VL; i++) to[i] = values[i] + (w.bias ? w.bias[first + i] : 0.f);
}

// M tokens times a panel, to y [M][width], which begins with the panel's outputs; sums over inputs from the first
// to the last. x is [pairs][M][2]; totals are its sums, for bytes.
template <int M, class X> static inline void tile(const X* x, const float* totals, const Linear& w, int64_t panel, float* y, int64_t width) {
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
#if defined(__AVX512BF16__)
      if constexpr (sizeof(X) == 2) {
        if constexpr (M >= 6) {  // products take as long as memory: only far ahead do both go on at once
          __builtin_prefetch(at + AHEAD, 0, 2);
          __builtin_prefetch(at + AHEAD + VL, 0, 2);
        }
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
#if defined(__AVX512BF16__)
  } else if constexpr (sizeof(X) == 2) {  // bytes
    const uint8_t* base = (const uint8_t*)w.weight + panel * pairs * PANEL * 2;
    const __m512i above = _mm512_set1_epi8(0x43);
    for (int64_t k = 0; k < pairs; k++) {
      const uint8_t* at = base + k * PANEL * 2;
      if constexpr (M >= 6) __builtin_prefetch(at + AHEAD * 2, 0, 2);
      const __m512i bytes = _mm512_loadu_si512(at);
      const __m512bh a = (__m512bh)_mm512_unpacklo_epi8(bytes, above), b = (__m512bh)_mm512_unpackhi_epi8(bytes, above);
      UNROLL for (int m = 0; m < M; m++) {
        int32_t two;
        std::memcpy(&two, x + (k * M + m) * 2, 4);
        __m512bh both = (__m512bh)_mm512_set1_epi32(two);
        acc[0][m] = (vf)_mm512_dpbf16_ps((__m512)acc[0][m], a, both);
        acc[1][m] = (vf)_mm512_dpbf16_ps((__m512)acc[1][m], b, both);
      }
    }
    UNROLL for (int m = 0; m < M; m++)
      UNROLL for (int half = 0; half < 2; half++)
        acc[half][m] = of_bytes(acc[half][m], totals[m], w, panel * PANEL + half * VL);
#endif
  } else if constexpr (sizeof(X) == 4) {
    for (int64_t k = 0; k < w.in; k++) {
      const float* at = (const float*)w.weight + (panel * w.in + k) * PANEL;
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

template <int M, class X> static void tile_of(int64_t m, const X* x, const float* totals, const Linear& w, int64_t panel, float* y, int64_t width) {
  if (m == M) tile<M>(x, totals, w, panel, y, width);
  else if constexpr (M > 1) tile_of<M - 1>(m, x, totals, w, panel, y, width);
}

static Range part_of(int64_t tokens, int64_t i) {
  int64_t tiles = (tokens + TILE - 1) / TILE;
  return share(tokens, int(i), int(tiles));
}

// Tokens in the order in which tiles read them, each tile's side by side (AMX: as they were), and their sums; valid
// until this thread arranges others.
template <class X> struct Arranged {
  const X* x;
  const float* totals;
};

static float total(const uint16_t* x, int64_t size) {  // of bf16
  vf sums = {};
  int64_t i = 0;
  for (; i + VL <= size; i += VL) {
    vh some;
    std::memcpy(&some, x + i, sizeof some);
    sums += (vf)(__builtin_convertvector(some, vi) << 16);
  }
  float all = sum(sums);
  for (; i < size; i++) all += std::bit_cast<float>(uint32_t(x[i]) << 16);
  return all;
}

// x [tokens][2 * pairs], for layers of this kind.
template <class X> static Arranged<X> arrange(const X* x, int64_t tokens, int64_t pairs, int64_t kind) {
  static thread_local std::vector<X> arranged;
  static thread_local std::vector<float> totals;
  if constexpr (sizeof(X) == 2)
    if (kind == BYTE) {
      totals.resize(std::max(totals.size(), size_t(tokens)));
      for (int64_t m = 0; m < tokens; m++) totals[m] = total(x + m * pairs * 2, pairs * 2);
    }
  if (tokens == 1 || (TILES && sizeof(X) == 2)) return {x, totals.data()};
  arranged.resize(std::max(arranged.size(), size_t(tokens * pairs * 2)));
  for (int64_t i = 0; i * TILE < tokens; i++) {
    Range part = part_of(tokens, i);
    const int64_t m = part.end - part.begin;
    X* to = arranged.data() + part.begin * pairs * 2;
    for (int64_t j = 0; j < m; j++)
      for (int64_t k = 0; k < pairs; k++) std::memcpy(to + (k * m + j) * 2, x + ((part.begin + j) * pairs + k) * 2, 2 * sizeof(X));
  }
  return {arranged.data(), totals.data()};
}

#if defined(__AMX_BF16__)

// Tiles 0 to 3 are the sums of two parts of up to 16 tokens with the panel's halves, 4 and 5 the parts' inputs, 6 and 7
// weights. Each is 16 pairs deep, and a token's sums are the same with any others.
static void configure_tiles(int64_t rows) {
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
template <bool BOTH> static void multiply_parts(Arranged<uint16_t> inputs, int64_t rows, int64_t begin, int64_t next, const Linear& w, int64_t panel, float* y, int64_t width) {
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
static void multiply_tiles(Arranged<uint16_t> inputs, int64_t tokens, const Linear& w, int64_t panel, float* y, int64_t width) {
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

// Arranged inputs times a panel, to y [tokens][width], which begins with the panel's outputs.
template <class X> static void multiply(Arranged<X> arranged, int64_t tokens, const Linear& w, int64_t panel, float* y, int64_t width) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(X) == 2) return multiply_tiles(arranged, tokens, w, panel, y, width);
#endif
  for (int64_t i = 0; i * TILE < tokens; i++) {  // the panel stays in the cache
    Range part = part_of(tokens, i);
    tile_of<TILE>(part.end - part.begin, arranged.x + part.begin * w.pairs() * 2, arranged.totals + part.begin, w, panel, y + part.begin * width, width);
  }
}

// ---- blocks

struct Block {
  const float* input_norm;  // null: none
  Linear q, k, v;
  const float *q_norm, *k_norm;  // over each head; null: none
  Linear o;
  const float* post_norm;
  Linear gate, up, down;
  int64_t window;  // positions that a token sees, itself included; 0: all
};

struct Model {
  int64_t blocks;
  const Block* block;
  int64_t heads, kv_heads, head_dim, hidden, intermediate;
  float eps, scale;         // scale of attention scores
  const float* final_norm;  // null: none
  const float *cos, *sin;   // [positions][head_dim / 2]
};

struct Row {  // the nodes of one sequence
  int64_t begin, n;         // its first one, and how many
  int64_t length;           // verified slots, which all of them see
  int64_t width;
  const uint8_t* ancestors;  // [n][width]: which slots after those a node sees
  void* kv;                  // keys of block 0; a plane on are its values, then keys and values of block 1, ...
  int64_t plane, max_len;    // of [kv_heads][max_len][head_dim]
};

struct Nodes {
  int64_t rows, n;                   // sequences, and nodes of all
  const Row* row;
  const int64_t *positions, *slots;  // [n]
  int64_t kind;                      // of keys and values: FP32, or BF16

  std::vector<int32_t> rows_of_nodes() const {
    std::vector<int32_t> found;
    for (int64_t b = 0; b < rows; b++) found.insert(found.end(), row[b].n, int32_t(b));
    return found;
  }
};

template <class X> static void norm(const float* x, const float* weight, int64_t size, float eps, X* to, int64_t padded) {
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

static void rotate(float* x, const float* cos, const float* sin, int64_t dim) {
  int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

static void head_norm(float* x, const float* weight, int64_t dim, float eps) {
  if (weight) norm(x, weight, dim, eps, x, dim);
}

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
static inline float one(const float* at) { return *at; }
static inline float one(const uint16_t* at) { return std::bit_cast<float>(uint32_t(*at) << 16); }

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

// One head of one node: what it sees, and where its result goes.
template <class X> struct Query {
  const float* q;
  Range run;            // slots
  const int64_t* path;  // slots after those
  int64_t path_length;
  float *scores, *sums;  // [keys], [head_dim]: at first q in the order of keys, then sums of values
  X* to;

  int64_t before() const { return run.end - run.begin; }
  int64_t count() const { return before() + path_length; }
  Range of_run(int64_t part) const { return {std::max(part, run.begin), std::max({part, run.begin, std::min(part + KEYS, run.end)})}; }
};

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

template <class X, class K> static void attend(std::span<const Query<X>> queries, const K* keys, const K* values, float scale, int64_t dim) {
  if (dim == 64) attend<64>(queries, keys, values, scale, dim);  // keys at distances that the compiler knows
  else if (dim == 128) attend<128>(queries, keys, values, scale, dim);
  else attend<0>(queries, keys, values, scale, dim);
}

// What each node sees: a run of slots, which holds the verified ones and those right after them (all, in a chain),
// then others, in order. Where nothing is verified the run begins with the first slot seen, as in packed documents.
struct Paths {
  std::vector<Range> run;
  std::vector<int64_t> slots, begin;
  int64_t longest = 0;
  explicit Paths(const Nodes& nodes) : begin(1, 0) {
    for (const Row& row : std::span(nodes.row, nodes.rows))
      for (int64_t i = 0; i < row.n; i++) {
        const uint8_t* seen = row.ancestors + i * row.width;
        int64_t j = 0;
        while (!row.length && j < row.width && !seen[j]) j++;
        const int64_t first = j;
        while (j < row.width && seen[j]) j++;
        run.push_back({first, row.length + j});
        for (; j < row.width; j++) if (seen[j]) slots.push_back(row.length + j);
        begin.push_back(slots.size());
        longest = std::max(longest, run.back().end - first + begin.back() - begin[begin.size() - 2]);
      }
  }
};

static int64_t even(int64_t n) { return n + n % 2; }

// Panels of queries, keys and values, counted through, of tokens whose normed states are arranged.
template <class X> static void project(const Block& block, Arranged<X> arranged, int64_t tokens, Range panels, float* q, float* k, float* v) {
  const Linear* layers[3] = {&block.q, &block.k, &block.v};
  float* to[3] = {q, k, v};
  int64_t first = 0;
  for (int i = 0; i < 3; i++) {
    if (!layers[i]->weight) continue;
    Range part = {std::max(panels.begin - first, int64_t(0)), std::min(panels.end - first, layers[i]->panels())};
    for (int64_t panel = part.begin; panel < part.end; panel++)
      multiply(arranged, tokens, *layers[i], panel, to[i] + panel * PANEL, layers[i]->out);
    first += layers[i]->panels();
  }
}

// Norms and rotates some heads; keys and values go into their slots. Counted are queries' heads (unless the block
// has no queries), then keys', then values'.
template <class K> static void finish(const Model& model, const Block& block, int64_t layer, const Nodes& nodes, const int32_t* row_of, Range tokens, Range heads, float* q, float* k, float* v) {
  const int64_t dim = model.head_dim, nq = block.q.weight ? model.heads : 0, nkv = model.kv_heads;
  for (int64_t head = heads.begin; head < heads.end; head++)
    for (int64_t i = 0; i < tokens.end - tokens.begin; i++) {
      const int64_t node = tokens.begin + i;
      const float* cos = model.cos + nodes.positions[node] * (dim / 2);
      const float* sin = model.sin + nodes.positions[node] * (dim / 2);
      if (head < nq) {
        float* x = q + i * nq * dim + head * dim;
        head_norm(x, block.q_norm, dim, model.eps);
        rotate(x, cos, sin, dim);
        continue;
      }
      bool is_key = head < nq + nkv;
      int64_t g = head - nq - (is_key ? 0 : nkv);
      float* x = (is_key ? k : v) + i * nkv * dim + g * dim;
      if (is_key) {
        head_norm(x, block.k_norm, dim, model.eps);
        rotate(x, cos, sin, dim);
      }
      const Row& row = nodes.row[row_of[node]];
      K* to = (K*)row.kv + (layer * 2 + !is_key) * row.plane + (g * row.max_len + nodes.slots[node]) * dim;
      for (int64_t d = 0; d < dim; d++) put(to + d, x[d]);
    }
}

// Both, for all heads. Where panels end with heads, a thread finishes its heads at once.
template <class K, class X, class Wait> static void project_all(const Model& model, const Block& block, int64_t layer, const Nodes& nodes, const int32_t* row_of, Range tokens, Arranged<X> arranged, Queues& queues, int64_t first_queue, int t, Wait&& wait, float* q, float* k, float* v) {
  const int64_t count = tokens.end - tokens.begin, heads = (block.q.weight ? model.heads : 0) + 2 * model.kv_heads;
  const int64_t panels = (block.q.weight ? block.q.panels() : 0) + block.k.panels() + block.v.panels();
  if (model.head_dim % PANEL == 0) {
    const int64_t per_head = model.head_dim / PANEL;
    queues[first_queue].take(heads, t, [&](Range part) {
      project(block, arranged, count, {part.begin * per_head, part.end * per_head}, q, k, v);
      finish<K>(model, block, layer, nodes, row_of, tokens, part, q, k, v);
    });
  } else {
    queues[first_queue].take(panels, t, [&](Range part) { project(block, arranged, count, part, q, k, v); });
    wait();
    queues[first_queue + 1].take(heads, t, [&](Range part) { finish<K>(model, block, layer, nodes, row_of, tokens, part, q, k, v); });
  }
  wait();
}

template <class X> struct Buffers {  // that threads share
  std::vector<float> q, k, v;
  std::vector<X> attended, activated;
  Buffers(const Model& m, int64_t tokens)
      : q(tokens * m.heads * m.head_dim), k(tokens * m.kv_heads * m.head_dim), v(k.size()),
        attended(tokens * even(m.heads * m.head_dim)), activated(tokens * even(m.intermediate)) {}
};

template <class X, class K> static void run_blocks(const Model& model, const Nodes& nodes, float* x, int64_t first_block, int64_t last_block, const int64_t* taps, int64_t n_taps, float* tapped, float* final, int threads) {
  const int64_t hidden = model.hidden, dim = model.head_dim, nq = model.heads, nkv = model.kv_heads, all = nodes.n;
  const int64_t at_stride = even(nq * dim), act_stride = even(model.intermediate), h_stride = even(hidden);
  const int64_t chunks = (all + CHUNK - 1) / CHUNK;
  const Paths paths(nodes);
  const std::vector<int32_t> row_of = nodes.rows_of_nodes();
  Buffers<X> buffers(model, std::min(CHUNK, all));
  Barrier barrier(threads);
  Queues queues(chunks * (last_block - first_block) * PHASES, threads);
  auto work = [&](int t) {
    std::vector<X> h(std::min(CHUNK, all) * h_stride);
    std::vector<float> gate(std::min(CHUNK, all) * PANEL), up(gate.size());
    const int64_t group = nq / nkv;
    std::vector<Query<X>> queries(std::min(NODES, all) * group);
    std::vector<float> scores(queries.size() * (paths.longest + VL)), sums(queries.size() * dim);
    int64_t queue = 0;  // every thread goes through them in the same order
    auto wait = [&] { barrier.wait(); };
    for (int64_t start = 0; start < all; start += CHUNK) {
      Range tokens = {start, std::min(all, start + CHUNK)};
      int64_t count = tokens.end - tokens.begin;
      float* states = x + start * hidden;
      auto keep = [&](int64_t block) {  // what a tap reads; only one thread writes, and nobody changes it now
        for (int64_t i = 0; i < n_taps; i++)
          if (taps[i] == block && t == int(i % threads))
            for (int64_t m = 0; m < count; m++)
              std::memcpy(tapped + ((start + m) * n_taps + i) * hidden, states + m * hidden, hidden * sizeof(float));
      };
      auto normed = [&](const float* weight, const Linear& layer) {
        for (int64_t m = 0; m < count; m++) norm(states + m * hidden, weight, hidden, model.eps, h.data() + m * h_stride, h_stride);
        return arrange<X>(h.data(), count, h_stride / 2, layer.kind);
      };
      auto add = [&](Queue from_queue, const Linear& layer, const X* from) {  // to the residual stream
        const Arranged<X> arranged = arrange(from, count, layer.pairs(), layer.kind);
        from_queue.take(layer.panels(), t, [&](Range panels) {
          for (int64_t panel = panels.begin; panel < panels.end; panel++) {
            float* out = gate.data();
            multiply(arranged, count, layer, panel, out, PANEL);
            const int64_t first = panel * PANEL, n = std::min(PANEL, hidden - first);
            for (int64_t m = 0; m < count; m++)
              for (int64_t i = 0; i < n; i++) states[m * hidden + first + i] += out[m * PANEL + i];
          }
        });
        wait();
      };
      for (int64_t l = first_block; l < last_block; l++, queue += PHASES) {
        const Block& block = model.block[l];
        float *q = buffers.q.data(), *k = buffers.k.data(), *v = buffers.v.data();
        project_all<K>(model, block, l, nodes, row_of.data(), tokens, normed(block.input_norm, block.q), queues, queue, t, wait, q, k, v);
        // nodes by head of keys; few nodes of a head stay with one thread, as the other would read its keys again
        const int64_t unit = count <= UNDIVIDED && threads <= nkv ? count : 1;
        queues[queue + 2].take(nkv * count / unit, t, [&](Range units) {
          const Range items = {units.begin * unit, units.end * unit};
          for (int64_t item = items.begin; item < items.end;) {
            const int64_t head = item / count, first = item % count;
            const Row& row = nodes.row[row_of[start + first]];
            const int64_t last = std::min({first + NODES, first + items.end - item, count, row.begin + row.n - start});
            for (int64_t i = first; i < last; i++)
              for (int64_t g = head * group; g < (head + 1) * group; g++) {
                const int64_t node = start + i, place = (i - first) * group + g - head * group;
                const int64_t length = paths.begin[node + 1] - paths.begin[node];
                const Range run = paths.run[node];
                int64_t seen_from = run.begin;  // in slots, of which the run's first has position 0
                if (block.window) seen_from += std::max(int64_t(0), nodes.positions[node] - block.window + 1);
                const int64_t unseen = std::clamp(seen_from - run.end, int64_t(0), length);  // of the path
                queries[place] = {
                    q + (i * nq + g) * dim, {std::min(seen_from, run.end), run.end},
                    paths.slots.data() + paths.begin[node] + unseen, length - unseen,
                    scores.data() + place * (paths.longest + VL), sums.data() + place * dim,
                    buffers.attended.data() + i * at_stride + g * dim};
              }
            const K* keys = (const K*)row.kv + 2 * l * row.plane + head * row.max_len * dim;
            attend(std::span<const Query<X>>(queries.data(), (last - first) * group), keys, keys + row.plane, model.scale, dim);
            item += last - first;
          }
        });
        wait();
        add(queues[queue + 3], block.o, buffers.attended.data());
        const Arranged<X> arranged = normed(block.post_norm, block.gate);
        queues[queue + 4].take(block.gate.panels(), t, [&](Range panels) {
          for (int64_t panel = panels.begin; panel < panels.end; panel++) {
            multiply(arranged, count, block.gate, panel, gate.data(), PANEL);
            multiply(arranged, count, block.up, panel, up.data(), PANEL);
            const int64_t first = panel * PANEL, n = std::min(PANEL, model.intermediate - first);
            for (int64_t m = 0; m < count; m++) {
              float* g = gate.data() + m * PANEL;
              for (int64_t i = 0; i < PANEL; i += VL) {
                vf value = load(g + i);
                store(g + i, value / (exp(-value) + 1.f) * load(up.data() + m * PANEL + i));
              }
              for (int64_t i = 0; i < n; i++) put(buffers.activated.data() + m * act_stride + first + i, g[i]);
            }
          }
        });
        wait();
        add(queues[queue + 5], block.down, buffers.activated.data());
        keep(l);
      }
      if (final) {
        Range mine = share(count, t, threads);
        for (int64_t m = mine.begin; m < mine.end; m++) norm(states + m * hidden, model.final_norm, hidden, model.eps, final + (start + m) * hidden, hidden);
      }
      wait();
    }
  };
  Team::get().run(threads, work);
}

// Calls `use` with the types of products' inputs and of keys and values.
template <class Use> static void of_types(int64_t round_inputs, int64_t kind, Use&& use) {
  auto with = [&](auto* inputs) { kind == BF16 ? use(inputs, (uint16_t*)nullptr) : use(inputs, (float*)nullptr); };
  BF16_PRODUCTS && round_inputs ? with((uint16_t*)nullptr) : with((float*)nullptr);
}

// ---- the largest entries of rows

constexpr int64_t PART = 4096;  // entries that are looked at together: what sums add up does not depend on threads

struct Entry {
  float value;
  int64_t place;
  bool above(const Entry& other) const { return value > other.value || (value != value && other.value == other.value); }
};

// Puts an entry after those of `best` [count] that it is not above, and drops what is then beyond k.
static inline void insert(Entry* best, int64_t& count, int64_t k, Entry entry) {
  int64_t i = count < k ? count++ : k - 1;
  for (; i && entry.above(best[i - 1]); i--) best[i] = best[i - 1];
  best[i] = entry;
}

// The k largest entries of a part of a row, k <= its size.
static void best_of(const float* row, Range part, int64_t k, Entry* best) {
  int64_t count = 0, i = part.begin;
  auto look = [&](int64_t end) {
    for (; i < end; i++)
      if (Entry entry = {row[i], i}; count < k || entry.above(best[k - 1])) insert(best, count, k, entry);
  };
  look(part.begin + k);
  for (; i + 4 * VL <= part.end;) {
    const vf least = splat(best[k - 1].value);
    const float* at = row + i;
    vi under = (load(at) <= least) & (load(at + VL) <= least) & (load(at + 2 * VL) <= least) & (load(at + 3 * VL) <= least);
    int32_t lanes[VL], all = -1;  // false for NaN as well
    std::memcpy(lanes, &under, sizeof under);
    for (int j = 0; j < VL; j++) all &= lanes[j];
    if (all) i += 4 * VL; else look(i + 4 * VL);
  }
  look(part.end);
}

// Sum of e^(x - most) over a part of a row; 0 where all of it is -inf.
static float sum_of_exp(const float* x, int64_t size, float most) {
  if (most == -INFINITY) return 0;
  vf total = {};
  int64_t i = 0;
  for (; i + VL <= size; i += VL) total += exp(load(x + i) - most);
  float rest = 0;
  for (; i < size; i++) rest += exp(splat(x[i] - most))[0];
  return sum(total) + rest;
}

// Log of the sum of e^(x · factor) over a row, and the entry at which the sum from the first one on passes a share of
// it, in [0, 1). Where an entry is NaN or the largest is infinite, the first of those is found, and the sum is NaN.
static double draw(const float* x, int64_t width, float factor, double share, int64_t* place) {
  constexpr int64_t SMALL = 1024;  // entries that are added up before one of them is looked for
  vf largest = splat(-INFINITY);
  vi broken = {};
  int64_t i = 0;
  for (; i + VL <= width; i += VL) {
    const vf some = load(x + i);
    largest = some > largest ? some : largest;
    broken |= some != some;
  }
  float most = *std::max_element((const float*)&largest, (const float*)&largest + VL);
  bool is_broken = std::any_of((const int32_t*)&broken, (const int32_t*)&broken + VL, [](int32_t lane) { return lane != 0; });
  for (; i < width; i++) most = std::max(most, x[i]), is_broken |= x[i] != x[i];
  if (is_broken || std::isinf(most)) {
    *place = std::find_if(x, x + width, [&](float one) { return is_broken ? one != one : one == most; }) - x;
    return NAN;
  }
  auto weights = [&](vf some) {
    const vf e = exp((some - most) * factor);
    return e > 1e-37f ? e : vf{};  // `exp` is never 0
  };
  auto weight = [&](int64_t entry) { return weights(splat(x[entry]))[0]; };
  std::vector<double> sums;
  double total = 0;
  for (int64_t begin = 0; begin < width; begin += SMALL) {
    const int64_t end = std::min(width, begin + SMALL);
    vf part = {};
    for (i = begin; i + VL <= end; i += VL) part += weights(load(x + i));
    double small = sum(part);
    for (; i < end; i++) small += weight(i);
    sums.push_back(small);
    total += small;
  }
  double goal = share * total;
  size_t b = 0;
  while (b + 1 < sums.size() && goal >= sums[b]) goal -= sums[b++];
  while (b && sums[b] == 0) b--;  // rounding has passed the last one that can be drawn
  *place = b * SMALL;
  for (i = b * SMALL; i < std::min(width, int64_t(b + 1) * SMALL); i++) {
    const float one = weight(i);
    if (one == 0) continue;
    *place = i;
    if (goal < one) break;
    goal -= one;
  }
  return std::log(total) + double(most) * factor;
}

// What of each row of x [rows][width] is among its k largest.
struct Tops {
  const int64_t rows, width, k, parts, kept;  // kept: entries of each part
  const bool log_probs;
  std::vector<Entry> best;
  std::vector<float> sums;
  Queues queues;
  Tops(int64_t rows, int64_t width, int64_t k, bool log_probs, int64_t threads)
      : rows(rows), width(width), k(k), parts((width + PART - 1) / PART), kept(std::min(k, PART)), log_probs(log_probs),
        best(rows * parts * kept), sums(log_probs ? rows * parts : 0), queues(1, int(threads)) {}

  // Looks at all parts, as thread t of several.
  void look(const float* x, int t) {
    queues[0].take(rows * parts, t, [&](Range items) {
      for (int64_t item = items.begin; item < items.end; item++) {
        int64_t begin = item % parts * PART, end = std::min(width, begin + PART);
        const float* row = x + item / parts * width;
        best_of(row, {begin, end}, std::min(kept, end - begin), best.data() + item * kept);
        if (log_probs) sums[item] = sum_of_exp(row + begin, end - begin, best[item * kept].value);
      }
    });
  }

  void merge(float* values, int64_t* places) const {
    std::vector<Entry> row_best(k);
    for (int64_t row = 0; row < rows; row++) {
      int64_t found = 0;
      for (int64_t part = 0; part < parts; part++) {
        const Entry* from = best.data() + (row * parts + part) * kept;
        int64_t size = std::min(kept, width - part * PART);
        for (int64_t i = 0; i < size && (found < k || from[i].above(row_best[k - 1])); i++) insert(row_best.data(), found, k, from[i]);
      }
      float most = 0, log_total = 0;
      if (log_probs) {
        double total = 0;
        most = row_best[0].value;
        for (int64_t part = 0; part < parts; part++) {
          const int64_t item = row * parts + part;
          if (sums[item] != 0) total += sums[item] * std::exp(double(best[item * kept].value) - most);
        }
        log_total = float(std::log(total));
      }
      for (int64_t i = 0; i < k; i++) {
        values[row * k + i] = row_best[i].value - most - log_total;
        places[row * k + i] = row_best[i].place;
      }
    }
  }
};

// y [tokens][out] = x [tokens][in] times a packed layer; every thread calls then(its number) when nothing is left to take.
template <class Then> static void multiply_all(const Linear& layer, const float* x, int64_t tokens, float* y, bool round_inputs, int threads, Then&& then) {
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

// A number in [0, 1) that a seed and a position of the output determine: `sampling.uniform`.
static double uniform(uint64_t seed, uint64_t position, uint64_t number) {
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u * (position + 1) + 0x8CB92BA72F3D8DD7u * number;
  state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
  state = (state ^ state >> 27) * 0x94D049BB133111EBu;
  return double((state ^ state >> 31) >> 11) / 0x1p53;
}

// ---- growth of trees by expected tokens and measured seconds

struct Curve {  // points
  int64_t n;
  const double *x, *y;
};

// As in `trees/costs.py` and `trees/timed.py`, in the same order of operations.
struct Timing {
  Curve draft, verify, promise;  // seconds by tokens, twice; share of nodes accepted by joint log-probability, or no points
  const double* acceptance;
  int64_t depths, width, frontier, max_depth;

  static double seconds(const Curve& curve, int64_t tokens) {
    const double n = double(tokens);
    if (n <= curve.x[0]) return curve.y[0];
    if (n >= curve.x[curve.n - 1]) return curve.y[curve.n - 1] * n / curve.x[curve.n - 1];
    const int64_t right = std::lower_bound(curve.x, curve.x + curve.n, n) - curve.x, left = right - 1;
    return curve.y[left] + (curve.y[right] - curve.y[left]) * (n - curve.x[left]) / (curve.x[right] - curve.x[left]);
  }

  double share(double joint) const {
    if (joint != joint) return 0;
    if (!promise.n) return std::exp(joint);
    const int64_t right = std::upper_bound(promise.x, promise.x + promise.n, joint) - promise.x, left = right - 1;
    if (!right || right == promise.n || joint == promise.x[left]) return promise.y[std::max<int64_t>(left, 0)];
    return (promise.y[right] - promise.y[left]) / (promise.x[right] - promise.x[left]) * (joint - promise.x[left]) + promise.y[left];
  }

  // Of the best nodes of the deepest layer, whose probabilities are added up over the batch.
  int64_t worth_expanding(const std::vector<double>& confidence, int64_t depth, int64_t batch, double rate) const {
    const double accepted = acceptance[std::min(depth, depths - 1)], following = acceptance[std::min(depth + 1, depths - 1)];
    double expected = std::max(0.0, confidence[0] * accepted * following - rate * seconds(draft, 1)), best_gain = 0;
    const double chain = seconds(verify, batch * (depth + 1));
    int64_t best = 0;
    for (int64_t f = 1; f <= int64_t(confidence.size()); f++) {
      const double more = seconds(verify, batch * (f + depth + 1)) - chain;
      expected += confidence[f - 1] * accepted;
      const double gain = expected - rate * (seconds(draft, batch * f) + more);
      if (gain > best_gain) best = f, best_gain = gain;
    }
    return best;
  }

  int64_t worth_verifying(const std::vector<std::vector<double>>& joint, const std::vector<std::vector<int64_t>>& ranked, int64_t n, double rate) const {
    double expected = 0, best = -INFINITY;
    int64_t size = n;
    for (int64_t k = 0; k < n; k++) {
      double more = 0;
      for (size_t b = 0; b < joint.size(); b++) more += joint[b][ranked[b][k]];
      expected += more;
      const double gain = expected - rate * seconds(verify, int64_t(joint.size()) * (k + 1));
      if (gain > best) best = gain, size = k + 1;
    }
    return size;
  }
};

// Places of values from `first` on, the largest first; of equals the first one.
static std::vector<int64_t> descending(const std::vector<double>& values, int64_t first) {
  std::vector<int64_t> places(values.size() - first);
  std::iota(places.begin(), places.end(), first);
  std::stable_sort(places.begin(), places.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  return places;
}

// ---- what Python calls

extern "C" {

int64_t panel_outputs() { return PANEL; }
int64_t has_bf16_products() { return BF16_PRODUCTS; }

// Team::times
void team_times(int64_t* to) { Team::get().times(to); }

// Bytes of a packed layer of out x in weights.
int64_t packed_bytes(int64_t out, int64_t in, int64_t kind) {
  int64_t rows = (out + PANEL - 1) / PANEL * PANEL;
  return kind == FP32 ? rows * in * 4 : rows * even(in) * (kind == BF16 ? 2 : 1);
}

// Asks for huge pages: a fresh region that begins and ends with them.
void advise_huge(void* region, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(region, size_t(bytes), MADV_HUGEPAGE);
#endif
}

// Packs row-major weights [out][in] of the same kind.
void pack(const void* from, int64_t out, int64_t in, int64_t kind, void* to, int64_t threads) {
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
          uint8_t* packed = (uint8_t*)to + panel * pairs * PANEL * 2;
          for (int64_t k = 0; k < pairs; k++)
            for (int half = 0; half < 2; half++)
              packed[k * PANEL * 2 + byte_place(lane, half)] = row < out && 2 * k + half < in ? w[2 * k + half] : ZERO;
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
void linear(const Linear* layer, const float* x, int64_t tokens, float* y, int64_t round_inputs, int64_t threads) {
  multiply_all(*layer, x, tokens, y, round_inputs, int(threads), [](int) {});
}

// Blocks first ... last - 1 over the nodes of trees, then the final norm where `final` is given.
// x [n][hidden] goes in and comes out changed; tapped [n][taps][hidden] are outputs of blocks.
void blocks(const Model* model, const Nodes* nodes, float* x, int64_t first, int64_t last, const int64_t* taps, int64_t n_taps, float* tapped, float* final, int64_t round_inputs, int64_t threads) {
  of_types(round_inputs, nodes->kind, [&]<class X, class K>(X*, K*) { run_blocks<X, K>(*model, *nodes, x, first, last, taps, n_taps, tapped, final, int(threads)); });
}

// Keys and values alone of every block, of states x [n][hidden] that all blocks read.
void keys_values(const Model* model, const Nodes* nodes, const float* x, int64_t round_inputs, int64_t threads) {
  of_types(round_inputs, nodes->kind, [&]<class X, class K>(X*, K*) {
    const int64_t hidden = model->hidden, stride = even(hidden), all = nodes->n;
    const int64_t kv = model->kv_heads * model->head_dim;
    const int team = int(threads);
    const std::vector<int32_t> row_of = nodes->rows_of_nodes();
    Barrier barrier(team);
    Queues queues((all + CHUNK - 1) / CHUNK * model->blocks * PHASES, team);
    std::vector<float> k(std::min(CHUNK, all) * kv), v(k.size());
    Team::get().run(team, [&](int t) {
      std::vector<X> h(std::min(CHUNK, all) * stride);
      int64_t queue = 0;
      for (int64_t start = 0; start < all; start += CHUNK) {
        Range tokens = {start, std::min(all, start + CHUNK)};
        for (int64_t l = 0; l < model->blocks; l++, queue += PHASES) {
          Block block = model->block[l];
          block.q.weight = nullptr;
          for (int64_t m = tokens.begin; m < tokens.end; m++) norm(x + m * hidden, block.input_norm, hidden, model->eps, h.data() + (m - start) * stride, stride);
          const Arranged<X> arranged = arrange<X>(h.data(), tokens.end - tokens.begin, stride / 2, block.k.kind);
          project_all<K>(*model, block, l, *nodes, row_of.data(), tokens, arranged, queues, queue, t, [&] { barrier.wait(); }, (float*)nullptr, k.data(), v.data());
        }
      }
    });
  });
}

// The place of the largest of each row of x [rows][width], the first of equals; NaN is above all.
void first_maximum(const float* x, int64_t rows, int64_t width, int64_t* places, int64_t threads) {
  Tops tops(rows, width, 1, false, threads);
  std::vector<float> values(rows);
  Team::get().run(int(threads), [&](int t) { tops.look(x, t); });
  tops.merge(values.data(), places);
}

// Of each row of x [rows][width]: `draw` with a factor and a share of its own.
void draws(const float* x, int64_t rows, int64_t width, const float* factors, const double* shares, double* log_sums, int64_t* places) {
  for (int64_t row = 0; row < rows; row++) log_sums[row] = draw(x + row * width, width, factors[row], shares[row], places + row);
}

// The k largest of each row of a layer's products with x [rows][in] in descending order, k <= out, with their places.
// Values are those of the row's log-softmax. Of equals the first ones win, and NaN is above all.
void linear_top(const Linear* layer, const float* x, int64_t rows, int64_t k, float* values, int64_t* places, int64_t round_inputs, int64_t threads) {
  std::vector<float> y(rows * layer->out);
  Tops tops(rows, layer->out, k, true, threads);
  Barrier barrier{int(threads)};
  multiply_all(*layer, x, rows, y.data(), round_inputs, int(threads), [&](int t) {
    barrier.wait();
    tops.look(y.data(), t);
  });
  tops.merge(values, places);
}

// Drafts: linear_top of a drafter's states at the nodes frontier [batch][f] of trees [batch][n]. Their keys and values
// go into slots after the verified ones. Inputs are rows of `embed` [vocabulary][hidden], in bf16 or fp32. Of each tree
// caches [batch][4] has the verified slots, the address of the keys, the numbers between a layer's keys and its values,
// and the slots. Returns 0, or 1 without doing anything if a token is not in the vocabulary.
int64_t draft_top(const Model* model, const Linear* head, const void* embed, int64_t embed_kind, int64_t vocabulary, int64_t batch, int64_t n, int64_t f, const int64_t* tokens, const int64_t* depths, const uint8_t* ancestors, const int64_t* frontier, const int64_t* caches, int64_t kind, int64_t k, float* values, int64_t* places, int64_t round_inputs, int64_t round_head, int64_t threads) {
  const int64_t all = batch * f, hidden = model->hidden;
  std::vector<int64_t> positions(all), slots(all);
  std::vector<uint8_t> seen(all * n);
  std::vector<float> x(all * hidden), states(x.size());
  std::vector<Row> rows;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t *cache = caches + 4 * b, length = cache[0];
    rows.push_back({b * f, f, length, n, seen.data() + b * f * n, (void*)cache[1], cache[2], cache[3]});
    for (int64_t i = b * f; i < (b + 1) * f; i++) {
      const int64_t node = b * n + frontier[i], from = tokens[node] * hidden;
      if (tokens[node] < 0 || tokens[node] >= vocabulary) return 1;
      positions[i] = length + depths[node], slots[i] = length + frontier[i];
      std::memcpy(seen.data() + i * n, ancestors + node * n, n);
      if (embed_kind == FP32) std::memcpy(x.data() + i * hidden, (const float*)embed + from, hidden * sizeof(float));
      else for (int64_t d = 0; d < hidden; d++) x[i * hidden + d] = one((const uint16_t*)embed + from + d);
    }
  }
  const Nodes nodes = {batch, all, rows.data(), positions.data(), slots.data(), kind};
  blocks(model, &nodes, x.data(), 0, model->blocks, nullptr, 0, nullptr, states.data(), round_inputs, threads);
  linear_top(head, states.data(), all, k, values, places, round_head, threads);
  return 0;
}

// ---- trees, as TokenTree has them: fields [batch][n], ancestors [batch][n][n]. Results go to whole [3][batch][w]
// (tokens, parents, depths), numbers [3][batch][w] (log-probabilities, entropies, joint ones) and seen [batch][w][w].

// Appends a layer of f nodes, w = n + f; entropies of the new ones may be null, and are then NaN.
void append_layer(int64_t batch, int64_t n, int64_t f, const int64_t* tokens, const int64_t* parents, const int64_t* depths, const float* log_probs, const float* entropies, const float* joint, const uint8_t* ancestors, const int64_t* above, const int64_t* new_tokens, const float* new_log_probs, const float* new_entropies, int64_t* whole, float* numbers, uint8_t* seen) {
  const int64_t w = n + f, plane = batch * w;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t old = b * n, layer = b * f, at = b * w;
    auto copy = [&](const auto* from, auto* to) { std::copy_n(from + old, n, to + at); };
    copy(tokens, whole), copy(parents, whole + plane), copy(depths, whole + 2 * plane);
    copy(log_probs, numbers), copy(entropies, numbers + plane), copy(joint, numbers + 2 * plane);
    uint8_t* rows = seen + at * w;
    std::fill_n(rows, w * w, 0);
    for (int64_t i = 0; i < n; i++) std::copy_n(ancestors + (old + i) * n, n, rows + i * w);
    for (int64_t i = 0; i < f; i++) {
      const int64_t to = at + n + i, parent = above[layer + i];
      whole[to] = new_tokens[layer + i], whole[plane + to] = parent, whole[2 * plane + to] = depths[old + parent] + 1;
      numbers[to] = new_log_probs[layer + i];
      numbers[plane + to] = new_entropies ? new_entropies[layer + i] : NAN;
      numbers[2 * plane + to] = joint[old + parent] + numbers[to];
      std::copy_n(ancestors + (old + parent) * n, n, rows + (n + i) * w);
      rows[(n + i) * w + n + i] = 1;
    }
  }
}

// Takes w nodes [batch][w] alone, ascending, the root first and none without its parent; returns how many lack it.
int64_t take_nodes(int64_t batch, int64_t n, int64_t w, const int64_t* tokens, const int64_t* parents, const int64_t* depths, const float* log_probs, const float* entropies, const float* joint, const uint8_t* ancestors, const int64_t* nodes, int64_t* whole, float* numbers, uint8_t* seen) {
  const int64_t plane = batch * w;
  int64_t orphans = 0;
  std::vector<int64_t> place(n);
  for (int64_t b = 0; b < batch; b++) {
    std::fill(place.begin(), place.end(), -1);
    for (int64_t i = 0; i < w; i++) {
      const int64_t from = b * n + nodes[b * w + i], to = b * w + i, above = parents[from] < 0 ? -1 : place[parents[from]];
      orphans += i ? above < 0 : parents[from] >= 0;
      place[nodes[to]] = i;
      whole[to] = tokens[from], whole[plane + to] = above, whole[2 * plane + to] = depths[from];
      numbers[to] = log_probs[from], numbers[plane + to] = entropies[from], numbers[2 * plane + to] = joint[from];
      for (int64_t j = 0; j < w; j++) seen[to * w + j] = ancestors[from * n + nodes[b * w + j]];
    }
  }
  return orphans;
}

}  // extern "C"

// What growing trees returns in place of a number of nodes: a token is not in the vocabulary; a node would be verified without
// its parent; trees are too large for it; FULL - n: caches or results have no room for n nodes of a row.
constexpr int64_t OUTSIDE = -1, ORPHANS = -2, LARGE = -3, FULL = -4;
constexpr int64_t LARGEST = 4096;

// A drafter with the sequences that it drafts for, as `draft_top` takes them, and the target's ids of its vocabulary.
struct Drafting {
  const Model* model;
  const Linear* head;
  const void* embed;
  int64_t embed_kind, vocabulary;
  const int64_t *to_target, *caches;
  int64_t kind, round_inputs, round_head, threads;

  // The k most probable tokens after some nodes of trees of n.
  int64_t top(int64_t batch, int64_t n, int64_t f, const int64_t* tokens, const int64_t* depths, const uint8_t* ancestors, const int64_t* frontier, int64_t k, float* values, int64_t* places) const {
    for (int64_t b = 0; b < batch; b++) if (caches[4 * b] + n > caches[4 * b + 3]) return FULL - n;
    return draft_top(model, head, embed, embed_kind, vocabulary, batch, n, f, tokens, depths, ancestors, frontier, caches, kind, k, values, places, round_inputs, round_head, threads) ? OUTSIDE : 0;
  }
};

// Trees that grow layer by layer, of n nodes in each row; fields are as `append_layer` and `take_nodes` have them.
struct Growing {
  const Drafting& drafting;
  const int64_t batch, width;  // children of a node
  int64_t n = 1, layer = 0;    // the first node of the deepest layer
  std::vector<int64_t> fields, new_fields, above, tokens, places;
  std::vector<float> scores, new_scores, values;
  std::vector<uint8_t> ancestors, new_ancestors;

  Growing(const Drafting& drafting, int64_t batch, const int64_t* root, int64_t width)
      : drafting(drafting), batch(batch), width(width), fields(3 * batch), scores(3 * batch), ancestors(batch, 1) {
    for (int64_t b = 0; b < batch; b++) fields[b] = root[b], fields[batch + b] = -1;
  }

  float joint(int64_t b, int64_t node) const { return scores[(2 * batch + b) * n + node]; }

  // Gives children to f nodes of the deepest layer, frontier [batch][f], ascending.
  int64_t expand(const std::vector<int64_t>& frontier, int64_t f) {
    const int64_t w = n + f * width, plane = batch * n;
    if (w > LARGEST) return LARGE;
    above.resize(batch * f * width), tokens.resize(above.size()), places.resize(above.size()), values.resize(above.size());
    if (int64_t failed = drafting.top(batch, n, f, fields.data(), fields.data() + 2 * plane, ancestors.data(), frontier.data(), width, values.data(), places.data())) return failed;
    for (size_t i = 0; i < above.size(); i++) above[i] = frontier[i / width], tokens[i] = drafting.to_target[places[i]];
    new_fields.resize(3 * batch * w), new_scores.resize(3 * batch * w), new_ancestors.resize(batch * w * w);
    append_layer(batch, n, f * width, fields.data(), fields.data() + plane, fields.data() + 2 * plane, scores.data(), scores.data() + plane, scores.data() + 2 * plane, ancestors.data(), above.data(), tokens.data(), values.data(), nullptr, new_fields.data(), new_scores.data(), new_ancestors.data());
    fields.swap(new_fields), scores.swap(new_scores), ancestors.swap(new_ancestors);
    layer = n, n = w;
    return 0;
  }

  // Writes the first `size` of the nodes of each row as they are ranked, with room for `room`.
  int64_t take(const std::vector<std::vector<int64_t>>& ranked, int64_t size, int64_t room, int64_t* whole, float* numbers, uint8_t* seen) const {
    if (size > room) return FULL - size;
    const std::vector<int64_t> nodes = first(ranked, size);
    const int64_t plane = batch * n;
    return take_nodes(batch, n, size, fields.data(), fields.data() + plane, fields.data() + 2 * plane, scores.data(), scores.data() + plane, scores.data() + 2 * plane, ancestors.data(), nodes.data(), whole, numbers, seen) ? ORPHANS : size;
  }

  // The first `size` of each row's ranked nodes, [batch][size], ascending.
  static std::vector<int64_t> first(const std::vector<std::vector<int64_t>>& ranked, int64_t size) {
    std::vector<int64_t> nodes(ranked.size() * size);
    for (size_t b = 0; b < ranked.size(); b++) std::partial_sort_copy(ranked[b].begin(), ranked[b].begin() + size, nodes.begin() + b * size, nodes.begin() + (b + 1) * size);
    return nodes;
  }
};

extern "C" {

// Grows trees from root tokens [batch] as `TimedPolicy` does: layer by layer, from the nodes whose children are expected
// to be worth their time, then takes as many of the best nodes as are. `rate`: tokens that a second has to yield.
// Results have room for `room` nodes a row; returns how many they have, or one of the numbers above.
int64_t grow_timed(const Drafting* drafting, int64_t batch, const int64_t* root, const Timing* timing, double rate, int64_t room, int64_t* whole, float* numbers, uint8_t* seen) {
  Growing trees(*drafting, batch, root, timing->width);
  std::vector<std::vector<double>> joint(batch, {1.0});  // expected acceptance of each row's nodes
  std::vector<std::vector<int64_t>> best(batch);
  for (int64_t depth = 0; depth < timing->max_depth; depth++) {
    for (int64_t b = 0; b < batch; b++) best[b] = descending(joint[b], trees.layer);
    std::vector<double> confidence(std::min<int64_t>(timing->frontier, best[0].size()));
    for (size_t i = 0; i < confidence.size(); i++)
      for (int64_t b = 0; b < batch; b++) confidence[i] += joint[b][best[b][i]];
    const int64_t f = timing->worth_expanding(confidence, depth, batch, rate);
    if (!f) break;
    if (int64_t failed = trees.expand(Growing::first(best, f), f)) return failed;
    for (int64_t b = 0; b < batch; b++)
      for (int64_t i = trees.layer; i < trees.n; i++) joint[b].push_back(timing->share(trees.joint(b, i)));
  }
  for (int64_t b = 0; b < batch; b++) best[b] = descending(joint[b], 0);
  return trees.take(best, timing->worth_verifying(joint, best, trees.n, rate), room, whole, numbers, seen);
}

// Grows trees from root tokens [batch]: in each layer the `frontier` most probable nodes get `width` children, if their joint
// probability is at least `least`; takes the root and the `total` most probable other nodes, if theirs is at least `kept`.
// Either of these asks for a batch of one. Results as of `grow_timed`.
int64_t grow_best(const Drafting* drafting, int64_t batch, const int64_t* root, int64_t width, int64_t frontier, int64_t max_depth, int64_t total, double least, double kept, int64_t room, int64_t* whole, float* numbers, uint8_t* seen) {
  Growing trees(*drafting, batch, root, width);
  std::vector<std::vector<int64_t>> best(batch);
  auto rank = [&](int64_t from, int64_t size, double bound) {  // returns how many of each row there are
    for (int64_t b = 0; b < batch; b++) {
      std::vector<double> joint(trees.n);
      for (int64_t i = from; i < trees.n; i++) joint[i] = trees.joint(b, i) == trees.joint(b, i) ? trees.joint(b, i) : -INFINITY;
      best[b] = descending(joint, from);
      size = std::min<int64_t>(size, best[b].size());
      while (size && !(std::exp(trees.joint(b, best[b][size - 1])) >= float(bound)) && bound > 0) size--;
    }
    return size;
  };
  for (int64_t depth = 0; depth < max_depth; depth++) {
    const int64_t f = rank(trees.layer, frontier, least);
    if (!f) break;
    if (int64_t failed = trees.expand(Growing::first(best, f), f)) return failed;
  }
  return trees.take(best, rank(0, total + 1, kept), room, whole, numbers, seen);
}

// Grows trees from root tokens [batch] as `SampledTreePolicy` does without a threshold: each node of layer d has
// branching[d] children, drawn by the numbers [batch] without replacement from its k most probable tokens at a temperature.
// depths [n] and ancestors [n][n] are those of the n nodes. Writes tokens and log-probabilities [batch][n], and of the k
// tokens after nodes with children their probabilities and ids [batch][n][k]. Returns 0 or one of the numbers above.
int64_t grow_drawn(const Drafting* drafting, int64_t batch, const int64_t* root, const int64_t* branching, int64_t layers, int64_t k, double temperature, const uint64_t* numbers, int64_t n, const int64_t* depths, const uint8_t* ancestors, int64_t* tokens, float* log_probs, float* probs, int64_t* ids) {
  std::vector<int64_t> some_tokens, some_depths, frontier, places, order(k);
  std::vector<uint8_t> seen;
  std::vector<float> values;
  std::vector<double> scores(k);
  for (int64_t b = 0; b < batch; b++) tokens[b * n] = root[b], log_probs[b * n] = 0;
  int64_t begin = 0, end = 1;  // of the layer that is expanded
  for (int64_t d = 0; d < layers; d++) {
    const int64_t f = end - begin, count = branching[d];
    some_tokens.clear(), some_depths.clear(), seen.clear(), frontier.clear();
    for (int64_t b = 0; b < batch; b++) {
      some_tokens.insert(some_tokens.end(), tokens + b * n, tokens + b * n + end);
      some_depths.insert(some_depths.end(), depths, depths + end);
      for (int64_t i = 0; i < end; i++) seen.insert(seen.end(), ancestors + i * n, ancestors + i * n + end);
      for (int64_t i = begin; i < end; i++) frontier.push_back(i);
    }
    values.resize(batch * f * k), places.resize(values.size());
    if (int64_t failed = drafting->top(batch, end, f, some_tokens.data(), some_depths.data(), seen.data(), frontier.data(), k, values.data(), places.data())) return failed;
    for (int64_t b = 0; b < batch; b++)
      for (int64_t i = 0; i < f; i++) {
        const int64_t node = b * n + begin + i, at = (b * f + i) * k;
        const double most = values[at] / temperature;
        double total = 0;
        for (int64_t j = 0; j < k; j++) total += std::exp(values[at + j] / temperature - most);
        const double log_total = most + std::log(total);
        for (int64_t j = 0; j < k; j++) {  // Gumbel top-k, as `SampledTreePolicy` says
          const double log_q = values[at + j] / temperature - log_total;
          probs[node * k + j] = float(std::exp(log_q)), ids[node * k + j] = drafting->to_target[places[at + j]];
          scores[j] = log_q - std::log(-std::log1p(-uniform(numbers[b], begin + i, j)));
          if (probs[node * k + j] < FLT_MIN) probs[node * k + j] = 0;  // denormal numbers are too coarse
          if (!(probs[node * k + j] > 0)) scores[j] = -INFINITY;
        }
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t c) { return scores[a] > scores[c] || (scores[a] == scores[c] && a < c); });
        for (int64_t j = 0; j < count; j++) {
          const int64_t child = b * n + end + i * count + j;
          tokens[child] = ids[node * k + order[j]], log_probs[child] = values[at + order[j]];
        }
      }
    begin = end, end += f * count;
  }
  return 0;
}

// Recursive rejection of the drafts of trees, as `RejectionSampling` says, where nothing is cut off the target's logits
// [batch][n][width]. ids and probs [batch][n][k]: what the children of each node were drawn from. Of each row: temperature,
// seed and position of the next token. Writes paths [batch][n], their lengths and the tokens after them.
void reject_drafts(const float* logits, int64_t batch, int64_t n, int64_t width, int64_t k, const int64_t* parents, const int64_t* tokens, const int64_t* sizes, const int64_t* ids, const float* probs, const double* temperatures, const uint64_t* seeds, const int64_t* positions, int64_t* path, int64_t* counts, int64_t* next) {
  std::vector<double> left(k), q(k);
  std::vector<float> others;
  for (int64_t b = 0; b < batch; b++) {
    const int64_t* above = parents + b * n;
    const float factor = 1.f / float(temperatures[b]);
    int64_t node = 0, length = 1;
    std::fill_n(path + b * n, n, 0);
    for (;; path[b * n + length++] = node) {
      const int64_t position = positions[b] + length - 1, at = (b * n + node) * k;
      const float* row = logits + (b * n + node) * width;
      const double share = uniform(seeds[b], position, 0), log_mass = draw(row, width, factor, share, next + b);
      double sum = 0;
      bool finite = true;
      const int64_t first = std::find(above + node + 1, above + sizes[b], node) - above;
      if (first == sizes[b]) break;
      for (int64_t j = 0; j < k; j++) {
        left[j] = std::exp(row[ids[at + j]] * double(factor) - log_mass), q[j] = probs[at + j];
        sum += left[j], finite &= std::isfinite(left[j]) && std::isfinite(q[j]);
      }
      if (!finite) break;
      double elsewhere = std::max(0.0, 1 - sum);
      int64_t accepted = 0;
      for (int64_t child = first, number = 1; child < sizes[b]; child++) {
        if (above[child] != node) continue;
        const int64_t place = std::find(ids + at, ids + at + k, tokens[b * n + child]) - (ids + at);
        if (place == k || q[place] == 0) break;  // nothing was left to draw
        double mass = elsewhere, rest = 0;
        for (int64_t j = 0; j < k; j++) mass += std::max(left[j] - q[j], 0.0);
        // without a rest the target's distribution is q up to rounding, and nothing is ever rejected
        if (uniform(seeds[b], position, number++) * q[place] < left[place] || !(mass > 0)) {
          accepted = child;
          break;
        }
        for (int64_t j = 0; j < k; j++) left[j] = std::max(left[j] - q[j], 0.0) / mass;
        elsewhere /= mass, q[place] = 0;
        for (int64_t j = 0; j < k; j++) rest += q[j];
        for (int64_t j = 0; j < k; j++) q[j] /= std::max(rest, 1e-300);
      }
      if (accepted) {
        node = accepted;
        continue;
      }
      sum = 0;
      for (int64_t j = 0; j < k; j++) sum += left[j];
      double goal = share * (sum + elsewhere);
      bool drawn = false;
      if (goal >= sum && elsewhere > 0) {
        others.assign(row, row + width);
        for (int64_t j = 0; j < k; j++) others[ids[at + j]] = -INFINITY;
        drawn = !std::isnan(draw(others.data(), width, factor, (goal - sum) / elsewhere, next + b));
      }
      if (!drawn) {  // also where there are no others, and rounding alone has left something
        int64_t last = 0, place = 0;
        for (int64_t j = 0; j < k; j++) if (left[j] > 0) last = j;
        for (double before = 0; place < last && goal >= before + left[place]; place++) before += left[place];
        next[b] = ids[at + place];
      }
      break;
    }
    counts[b] = length;
  }
}

// Finds the longest path of each tree whose every token is the target's choice after the node before it: path
// [batch][n], the rest of the nodes after it, its length, and the choice after it. Returns the length of the longest.
int64_t follow_choices(int64_t batch, int64_t n, const int64_t* choices, const int64_t* tokens, const int64_t* parents, const int64_t* depths, int64_t* path, int64_t* counts, int64_t* next) {
  int64_t longest = 0;
  std::vector<uint8_t> right(n);
  for (int64_t b = 0; b < batch; b++) {
    const int64_t at = b * n;
    int64_t leaf = 0;
    right[0] = 1;
    for (int64_t i = 1; i < n; i++) {
      const int64_t parent = parents[at + i];
      right[i] = right[parent] && tokens[at + i] == choices[at + parent];
      if (right[i] && depths[at + i] > depths[at + leaf]) leaf = i;  // padding has depth 0
    }
    int64_t count = 1;
    for (int64_t node = leaf; node; node = parents[at + node]) count++;
    counts[b] = count, next[b] = choices[at + leaf];
    std::fill(right.begin(), right.end(), 0);  // now: on the path
    for (int64_t i = count - 1, node = leaf; i >= 0; i--, node = parents[at + node]) path[at + i] = node, right[node] = 1;
    for (int64_t i = 0, to = at + count; i < n; i++) if (!right[i]) path[to++] = i;
    longest = std::max(longest, count);
  }
  return longest;
}

// Moves the slots path [rows][m] after each row's verified ones to the places right after those, the first counts[b]
// of them, in each of [planes][rows][heads][max_len]; sizes are in bytes.
void commit_slots(uint8_t* kv, int64_t planes, int64_t plane, int64_t rows, int64_t row, int64_t heads, int64_t head, int64_t slot, const int64_t* lengths, const int64_t* path, int64_t m, const int64_t* counts) {
  std::vector<uint8_t> kept(m * slot);
  for (int64_t b = 0; b < rows; b++) {
    const int64_t* nodes = path + b * m;
    int64_t first = 0;
    while (first < counts[b] && nodes[first] == first) first++;
    for (int64_t i = 0; i < planes * heads && first < counts[b]; i++) {
      uint8_t* at = kv + i / heads * plane + b * row + i % heads * head + lengths[b] * slot;
      for (int64_t j = first; j < counts[b]; j++) std::memcpy(kept.data() + j * slot, at + nodes[j] * slot, slot);
      std::memcpy(at + first * slot, kept.data() + first * slot, (counts[b] - first) * slot);
    }
  }
}

}  // extern "C"
