// Threads: one team at work at a time, asleep soon after it (torch's threads want the cores too).

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>
#include <sched.h>
#include <unistd.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

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
    for (bool took = true;;) {
      if (took) {  // the next call is near; a thread that is not in the team leaves its core to others
        auto asleep = std::chrono::steady_clock::now() + std::chrono::microseconds(2000);
        while (ticket.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < asleep)
          for (int i = 0; i < 16; i++) relax();
      }
      ticket.wait(seen, std::memory_order_acquire);
      seen = ticket.load(std::memory_order_acquire);
      took = number < int(seen & 255);
      if (!took) continue;
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
static inline Range share(int64_t n, int t, int threads) { return {n * t / threads, n * (t + 1) / threads}; }

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
