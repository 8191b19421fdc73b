// Draws from rows of logits, and recursive rejection of drafts where nothing is cut off the target's distribution.

#include "draw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

double draw(const float* x, int64_t width, float factor, double share, int64_t* place) {
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

// Of each row of x [rows][width]: `draw` with a factor and a share of its own.
EXPORT void draws(const float* x, int64_t rows, int64_t width, const float* factors, const double* shares, double* log_sums, int64_t* places) {
  for (int64_t row = 0; row < rows; row++) log_sums[row] = draw(x + row * width, width, factors[row], shares[row], places + row);
}

// Recursive rejection of the drafts of trees, as `RejectionSampling` says, where nothing is cut off the target's logits
// [batch][n][width]. ids and probs [batch][n][k]: what the children of each node were drawn from. Of each row: temperature,
// seed and position of the next token. Writes paths [batch][n], their lengths and the tokens after them.
EXPORT void reject_drafts(const float* logits, int64_t batch, int64_t n, int64_t width, int64_t k, const int64_t* parents, const int64_t* tokens, const int64_t* sizes, const int64_t* ids, const float* probs, const double* temperatures, const uint64_t* seeds, const int64_t* positions, int64_t* path, int64_t* counts, int64_t* next) {
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
