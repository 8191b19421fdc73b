// Each part of a row is looked at by one thread, and what the parts have is merged.

#include "largest.h"

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

// The place of the largest of each row of x [rows][width], the first of equals; NaN is above all.
EXPORT void first_maximum(const float* x, int64_t rows, int64_t width, int64_t* places, int64_t threads) {
  Tops tops(rows, width, 1, false, threads);
  std::vector<float> values(rows);
  Team::get().run(int(threads), [&](int t) { tops.look(x, t); });
  tops.merge(values.data(), places);
}

// The k largest of each row of a layer's products with x [rows][in] in descending order, k <= out, with their places.
// Values are those of the row's log-softmax. Of equals the first ones win, and NaN is above all.
EXPORT void linear_top(const Linear* layer, const float* x, int64_t rows, int64_t k, float* values, int64_t* places, int64_t round_inputs, int64_t threads) {
  std::vector<float> y(rows * layer->out);
  Tops tops(rows, layer->out, k, true, threads);
  Barrier barrier{int(threads)};
  multiply_all(*layer, x, rows, y.data(), round_inputs, int(threads), [&](int t) {
    barrier.wait();
    tops.look(y.data(), t);
  });
  tops.merge(values, places);
}
