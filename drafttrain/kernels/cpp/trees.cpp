// Changes of trees between forwards, and of the slots of their keys and values.

#include "trees.h"

#include <algorithm>
#include <cmath>
#include <vector>

EXPORT void append_layer(int64_t batch, int64_t n, int64_t f, const int64_t* tokens, const int64_t* parents, const int64_t* depths, const float* log_probs, const float* entropies, const float* joint, const uint8_t* ancestors, const int64_t* above, const int64_t* new_tokens, const float* new_log_probs, const float* new_entropies, int64_t* whole, float* numbers, uint8_t* seen) {
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

EXPORT int64_t take_nodes(int64_t batch, int64_t n, int64_t w, const int64_t* tokens, const int64_t* parents, const int64_t* depths, const float* log_probs, const float* entropies, const float* joint, const uint8_t* ancestors, const int64_t* nodes, int64_t* whole, float* numbers, uint8_t* seen) {
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

// Finds the longest path of each tree whose every token is the target's choice after the node before it: path
// [batch][n], the rest of the nodes after it, its length, and the choice after it. Returns the length of the longest.
EXPORT int64_t follow_choices(int64_t batch, int64_t n, const int64_t* choices, const int64_t* tokens, const int64_t* parents, const int64_t* depths, int64_t* path, int64_t* counts, int64_t* next) {
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
EXPORT void commit_slots(uint8_t* kv, int64_t planes, int64_t plane, int64_t rows, int64_t row, int64_t heads, int64_t head, int64_t slot, const int64_t* lengths, const int64_t* path, int64_t m, const int64_t* counts) {
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
