// Parts of rows are looked at by any thread, which keeps the largest that it has met of each row; these are merged.

#include "largest.h"

constexpr int64_t PART = 4096;  // entries that are looked at together: what sums add up does not depend on threads

struct Entry {
  float value;
  int64_t place;
  bool above(const Entry& other) const {
    if (value > other.value) return true;
    if (value != value || other.value != other.value) return value != value && (other.value == other.value || place < other.place);
    return value == other.value && place < other.place;
  }
};

// The k largest entries that were met of a row, in descending order.
struct Best {
  const int64_t k;
  int64_t count = 0;
  Entry* entries;  // [k]

  bool wants(Entry entry) const { return count < k || entry.above(entries[k - 1]); }

  void insert(Entry entry) {
    int64_t i = count < k ? count++ : k - 1;
    for (; i && entry.above(entries[i - 1]); i--) entries[i] = entries[i - 1];
    entries[i] = entry;
  }

  void look(const float* row, Range part) {
    int64_t i = part.begin;
    auto each = [&](int64_t end) {
      for (; i < end; i++)
        if (Entry entry = {row[i], i}; wants(entry)) insert(entry);
    };
    each(std::min(part.end, part.begin + k - count));
    for (; i + 4 * VL <= part.end;) {
      const vf least = splat(entries[k - 1].value);
      const float* at = row + i;
      vi under = (load(at) < least) & (load(at + VL) < least) & (load(at + 2 * VL) < least) & (load(at + 3 * VL) < least);
      int32_t lanes[VL], all = -1;  // false for NaN as well
      std::memcpy(lanes, &under, sizeof under);
      for (int j = 0; j < VL; j++) all &= lanes[j];
      if (all) i += 4 * VL; else each(i + 4 * VL);
    }
    each(part.end);
  }
};

// The largest of a part of a row, NaN apart.
static float maximum(const float* x, int64_t size) {
  vf most = splat(-INFINITY);
  int64_t i = 0;
  for (; i + VL <= size; i += VL) most = load(x + i) > most ? load(x + i) : most;
  float found = max(most);
  for (; i < size; i++) found = x[i] > found ? x[i] : found;
  return found;
}

// Sum of e^(x - most) over a part of a row; 0 where none is above -inf.
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
  const int64_t rows, width, k, parts, threads;
  const bool log_probs;
  std::vector<Entry> entries;     // [threads][rows][k]
  std::vector<int64_t> counts;    // [threads][rows]
  std::vector<float> most, sums;  // [rows][parts]
  Queues queues;
  Tops(int64_t rows, int64_t width, int64_t k, bool log_probs, int64_t threads)
      : rows(rows), width(width), k(k), parts((width + PART - 1) / PART), threads(threads), log_probs(log_probs),
        entries(threads * rows * k), counts(threads * rows), most(log_probs ? rows * parts : 0), sums(most.size()), queues(1, int(threads)) {}

  Best best(int64_t thread, int64_t row) {
    const int64_t list = thread * rows + row;
    return {k, counts[list], entries.data() + list * k};
  }

  // Looks at all parts, as thread t of several.
  void look(const float* x, int t) {
    queues[0].take(rows * parts, t, [&](Range items) {
      for (int64_t item = items.begin; item < items.end; item++) {
        const int64_t row = item / parts, begin = item % parts * PART, end = std::min(width, begin + PART);
        const float* values = x + row * width;
        Best found = best(t, row);
        found.look(values, {begin, end});
        counts[t * rows + row] = found.count;
        if (log_probs) most[item] = maximum(values + begin, end - begin), sums[item] = sum_of_exp(values + begin, end - begin, most[item]);
      }
    });
  }

  void merge(float* values, int64_t* places) {
    std::vector<Entry> row_entries(k);
    for (int64_t row = 0; row < rows; row++) {
      Best all = {k, 0, row_entries.data()};
      for (int64_t thread = 0; thread < threads; thread++) {
        const Best one = best(thread, row);
        for (int64_t i = 0; i < one.count && all.wants(one.entries[i]); i++) all.insert(one.entries[i]);
      }
      float largest = 0, log_total = 0;
      if (log_probs) {
        double total = 0;
        largest = all.entries[0].value;
        for (int64_t item = row * parts; item < (row + 1) * parts; item++)
          if (sums[item] != 0) total += sums[item] * std::exp(double(most[item]) - largest);
        log_total = float(std::log(total));
      }
      for (int64_t i = 0; i < k; i++) {
        values[row * k + i] = all.entries[i].value - largest - log_total;
        places[row * k + i] = all.entries[i].place;
      }
    }
  }
};

// The places of the k largest of each row of x [rows][width] in descending order, k <= width. Of equals the first ones win,
// and NaN is above all.
EXPORT void largest(const float* x, int64_t rows, int64_t width, int64_t k, int64_t* places, int64_t threads) {
  Tops tops(rows, width, k, false, threads);
  std::vector<float> values(rows * k);
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
