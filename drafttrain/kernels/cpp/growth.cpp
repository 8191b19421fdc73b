// Drafting steps, and trees that grow by them in one call: by expected tokens and measured seconds, by joint
// probability, and by draws.

#include <cfloat>
#include <numeric>

#include "blocks.h"
#include "draw.h"
#include "largest.h"
#include "trees.h"

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

// What a drafter's layers read at a token: its row of `embed` [vocabulary][hidden], in bf16 or fp32; or `join` of that row,
// normed, plus `follow` of a state, normed: of the token's sequence, or, if the tree's own states count and after the root, of
// the parent.
struct Inputs {
  const void* embed;
  int64_t kind, vocabulary;
  const Linear *join, *follow;                    // null: none, both
  const float *join_norm, *follow_norm, *states;  // [hidden] and [follow->in], or null: not normed; [batch][follow->in]
  int64_t own_states, round_inputs;               // of both layers

  void read(int64_t token, int64_t hidden, float* x) const {
    if (kind == FP32) std::memcpy(x, (const float*)embed + token * hidden, hidden * sizeof(float));
    else for (int64_t d = 0; d < hidden; d++) x[d] = one((const uint16_t*)embed + token * hidden + d);
  }

  // A layer of rows x [rows][in], which are normed first.
  std::vector<float> normed(const Linear& layer, const float* weight, std::vector<float> x, float eps, int64_t threads) const {
    const int64_t in = layer.in, rows = x.size() / in;
    std::vector<float> y(rows * layer.out);
    if (weight) for (int64_t i = 0; i < rows; i++) norm(x.data() + i * in, weight, in, eps, x.data() + i * in, in);
    multiply_all(layer, x.data(), rows, y.data(), round_inputs, int(threads), [](int) {});
    return y;
  }
};

// A drafter with the sequences that it drafts for. Of each sequence caches [batch][4] has the verified slots, the address of
// the keys, the numbers between a layer's keys and its values, and the slots; to_target has the target's ids of its vocabulary.
struct Drafting {
  const Model* model;
  const Linear* head;
  const Inputs* inputs;
  const int64_t *to_target, *caches;
  int64_t kind, round_inputs, round_head, threads;
};

// Drafting steps over trees of batch sequences that grow, whose nodes keep their numbers.
struct Steps {
  const Drafting& drafting;
  const int64_t batch;
  std::vector<float> states, roots, offsets;  // of the last frontier [batch * f][hidden]; what is added to joins, [batch][hidden], and to those of nodes' children [n][batch][hidden]
  std::vector<int64_t> last;

  // Drafts: linear_top of the drafter's states at the nodes frontier [batch][f] of trees [batch][n]. Their keys and values go
  // into slots after the verified ones. Returns 0, or 1 without doing anything if a token is not in the vocabulary.
  int64_t top(int64_t n, int64_t f, const int64_t* tokens, const int64_t* parents, const int64_t* depths, const uint8_t* ancestors, const int64_t* frontier, int64_t k, float* values, int64_t* places) {
    const Inputs& inputs = *drafting.inputs;
    const int64_t all = batch * f, hidden = drafting.model->hidden;
    const float eps = drafting.model->eps;
    std::vector<int64_t> positions(all), slots(all);
    std::vector<uint8_t> seen(all * n);
    std::vector<float> x(all * hidden);
    std::vector<Row> rows;
    for (int64_t b = 0; b < batch; b++) {
      const int64_t *cache = drafting.caches + 4 * b, length = cache[0];
      rows.push_back({b * f, f, length, n, seen.data() + b * f * n, (void*)cache[1], cache[2], cache[3]});
      for (int64_t i = b * f; i < (b + 1) * f; i++) {
        const int64_t node = b * n + frontier[i];
        if (tokens[node] < 0 || tokens[node] >= inputs.vocabulary) return 1;
        positions[i] = length + depths[node], slots[i] = length + frontier[i];
        std::memcpy(seen.data() + i * n, ancestors + node * n, n);
        inputs.read(tokens[node], hidden, x.data() + i * hidden);
      }
    }
    if (inputs.join && roots.empty())
      roots = inputs.normed(*inputs.follow, inputs.follow_norm, {inputs.states, inputs.states + batch * inputs.follow->in}, eps, drafting.threads);
    if (inputs.own_states && !last.empty()) {  // not before it is known that nodes of the last frontier have children
      const std::vector<float> added = inputs.normed(*inputs.follow, inputs.follow_norm, std::move(states), eps, drafting.threads);
      const int64_t parents_of_row = last.size() / batch;
      offsets.resize(n * batch * hidden);
      for (size_t i = 0; i < last.size(); i++) std::memcpy(offsets.data() + (last[i] * batch + i / parents_of_row) * hidden, added.data() + i * hidden, hidden * sizeof(float));
    }
    if (inputs.join) {
      x = inputs.normed(*inputs.join, inputs.join_norm, std::move(x), eps, drafting.threads);
      for (int64_t i = 0; i < all; i++) {
        const int64_t b = i / f, node = b * n + frontier[i];
        const float* offset = inputs.own_states && depths[node] ? offsets.data() + (parents[node] * batch + b) * hidden : roots.data() + b * hidden;
        for (int64_t d = 0; d < hidden; d++) x[i * hidden + d] += offset[d];
      }
    }
    states.resize(all * hidden);
    const Nodes nodes = {batch, all, rows.data(), positions.data(), slots.data(), drafting.kind};
    blocks(drafting.model, &nodes, x.data(), 0, drafting.model->blocks, nullptr, 0, nullptr, states.data(), drafting.round_inputs, drafting.threads);
    linear_top(drafting.head, states.data(), all, k, values, places, drafting.round_head, drafting.threads);
    last.assign(frontier, frontier + all);
    return 0;
  }
};

// One drafting step, of a drafter that reads no states of the tree's own nodes; as `Steps::top`.
EXPORT int64_t draft_top(const Drafting* drafting, int64_t batch, int64_t n, int64_t f, const int64_t* tokens, const int64_t* depths, const uint8_t* ancestors, const int64_t* frontier, int64_t k, float* values, int64_t* places) {
  return Steps{*drafting, batch}.top(n, f, tokens, nullptr, depths, ancestors, frontier, k, values, places);
}

// What growing trees returns in place of a number of nodes: a token is not in the vocabulary; a node would be verified without
// its parent; trees are too large for it; FULL - n: caches or results have no room for n nodes of a row.
constexpr int64_t OUTSIDE = -1, ORPHANS = -2, LARGE = -3, FULL = -4;
constexpr int64_t LARGEST = 4096;

// Steps of growth: as `Steps::top`, but for what it returns.
static int64_t growing_top(Steps& steps, int64_t n, int64_t f, const int64_t* tokens, const int64_t* parents, const int64_t* depths, const uint8_t* ancestors, const int64_t* frontier, int64_t k, float* values, int64_t* places) {
  const int64_t* caches = steps.drafting.caches;
  for (int64_t b = 0; b < steps.batch; b++) if (caches[4 * b] + n > caches[4 * b + 3]) return FULL - n;
  return steps.top(n, f, tokens, parents, depths, ancestors, frontier, k, values, places) ? OUTSIDE : 0;
}

// Trees that grow layer by layer, of n nodes in each row; fields are as `append_layer` and `take_nodes` have them.
struct Growing {
  Steps steps;
  const int64_t batch, width;  // children of a node
  int64_t n = 1, layer = 0;    // the first node of the deepest layer
  std::vector<int64_t> fields, new_fields, above, tokens, places;
  std::vector<float> scores, new_scores, values;
  std::vector<uint8_t> ancestors, new_ancestors;

  Growing(const Drafting& drafting, int64_t batch, const int64_t* root, int64_t width)
      : steps{drafting, batch}, batch(batch), width(width), fields(3 * batch), scores(3 * batch), ancestors(batch, 1) {
    for (int64_t b = 0; b < batch; b++) fields[b] = root[b], fields[batch + b] = -1;
  }

  float joint(int64_t b, int64_t node) const { return scores[(2 * batch + b) * n + node]; }

  // Gives children to f nodes of the deepest layer, frontier [batch][f], ascending.
  int64_t expand(const std::vector<int64_t>& frontier, int64_t f) {
    const int64_t w = n + f * width, plane = batch * n;
    if (w > LARGEST) return LARGE;
    above.resize(batch * f * width), tokens.resize(above.size()), places.resize(above.size()), values.resize(above.size());
    if (int64_t failed = growing_top(steps, n, f, fields.data(), fields.data() + plane, fields.data() + 2 * plane, ancestors.data(), frontier.data(), width, values.data(), places.data())) return failed;
    for (size_t i = 0; i < above.size(); i++) above[i] = frontier[i / width], tokens[i] = steps.drafting.to_target[places[i]];
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

// Grows trees from root tokens [batch] as `TimedPolicy` does: layer by layer, from the nodes whose children are expected
// to be worth their time, then takes as many of the best nodes as are. `rate`: tokens that a second has to yield.
// Results have room for `room` nodes a row; returns how many they have, or one of the numbers above.
EXPORT int64_t grow_timed(const Drafting* drafting, int64_t batch, const int64_t* root, const Timing* timing, double rate, int64_t room, int64_t* whole, float* numbers, uint8_t* seen) {
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
EXPORT int64_t grow_best(const Drafting* drafting, int64_t batch, const int64_t* root, int64_t width, int64_t frontier, int64_t max_depth, int64_t total, double least, double kept, int64_t room, int64_t* whole, float* numbers, uint8_t* seen) {
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

// Grows trees from root tokens [batch] as `SampledTreePolicy` does: each node of layer d has branching[d] children, drawn by
// the numbers [batch] without replacement from its k most probable tokens at a temperature; with a threshold above 0 only
// nodes whose joint probability reaches it. depths [n] and ancestors [n][n] are those of all n nodes. Writes tokens and
// log-probabilities [batch][n], which nodes there are, and of the k tokens after nodes with children their probabilities and
// ids [batch][n][k]; other places stay as they were. Returns 0 or one of the numbers above.
EXPORT int64_t grow_drawn(const Drafting* drafting, int64_t batch, const int64_t* root, const int64_t* branching, int64_t layers, int64_t k, double temperature, double threshold, const uint64_t* numbers, int64_t n, const int64_t* depths, const uint8_t* ancestors, int64_t* tokens, float* log_probs, uint8_t* kept, float* probs, int64_t* ids) {
  Steps steps{*drafting, batch};
  std::vector<int64_t> parents(n, -1), some_tokens, some_parents, some_depths, frontier, places, order(k);
  std::vector<std::vector<int64_t>> expanded(batch);  // of a layer
  std::vector<uint8_t> seen;
  std::vector<float> values, joint(batch * n);
  std::vector<double> scores(k);
  for (int64_t b = 0; b < batch; b++) tokens[b * n] = root[b], log_probs[b * n] = 0, kept[b * n] = 1;
  int64_t begin = 0, end = 1;  // of the layer that is expanded
  for (int64_t d = 0; d < layers; d++) {
    const int64_t count = branching[d];
    int64_t f = 0;
    for (int64_t b = 0; b < batch; b++) {
      expanded[b].clear();
      for (int64_t i = begin; i < end; i++)
        if (kept[b * n + i] && (threshold <= 0 || std::exp(joint[b * n + i]) >= float(threshold))) expanded[b].push_back(i);
      f = std::max<int64_t>(f, expanded[b].size());
    }
    if (!f) break;
    some_tokens.clear(), some_parents.clear(), some_depths.clear(), seen.clear(), frontier.clear();
    for (int64_t b = 0; b < batch; b++) {
      some_tokens.insert(some_tokens.end(), tokens + b * n, tokens + b * n + end);
      some_parents.insert(some_parents.end(), parents.begin(), parents.begin() + end);
      some_depths.insert(some_depths.end(), depths, depths + end);
      for (int64_t i = 0; i < end; i++) seen.insert(seen.end(), ancestors + i * n, ancestors + i * n + end);
      frontier.insert(frontier.end(), expanded[b].begin(), expanded[b].end());
      frontier.resize((b + 1) * f, 0);  // the root, once more
    }
    values.resize(batch * f * k), places.resize(values.size());
    if (int64_t failed = growing_top(steps, end, f, some_tokens.data(), some_parents.data(), some_depths.data(), seen.data(), frontier.data(), k, values.data(), places.data())) return failed;
    for (int64_t b = 0; b < batch; b++)
      for (size_t e = 0; e < expanded[b].size(); e++) {
        const int64_t i = expanded[b][e], node = b * n + i, at = (b * f + e) * k;
        const double most = values[at] / temperature;
        double total = 0;
        for (int64_t j = 0; j < k; j++) total += std::exp(values[at + j] / temperature - most);
        const double log_total = most + std::log(total);
        for (int64_t j = 0; j < k; j++) {  // Gumbel top-k, as `SampledTreePolicy` says
          const double log_q = values[at + j] / temperature - log_total;
          probs[node * k + j] = float(std::exp(log_q)), ids[node * k + j] = drafting->to_target[places[at + j]];
          scores[j] = log_q - std::log(-std::log1p(-uniform(numbers[b], i, j)));
          if (probs[node * k + j] < FLT_MIN) probs[node * k + j] = 0;  // denormal numbers are too coarse
          if (!(probs[node * k + j] > 0)) scores[j] = -INFINITY;
        }
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t c) { return scores[a] > scores[c] || (scores[a] == scores[c] && a < c); });
        for (int64_t j = 0; j < count; j++) {
          const int64_t child = b * n + end + (i - begin) * count + j;
          tokens[child] = ids[node * k + order[j]], log_probs[child] = values[at + order[j]];
          joint[child] = joint[node] + log_probs[child], kept[child] = 1;
        }
      }
    const int64_t children = (end - begin) * count;
    for (int64_t i = 0; i < children; i++) parents[end + i] = begin + i / count;
    begin = end, end += children;
  }
  return 0;
}
