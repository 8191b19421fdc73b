// A block: norms, projections, rotary positions, keys and values into slots, attention, activation, residuals.

#include "blocks.h"

#include <span>

#include "attention.h"

constexpr int64_t NODES = 32;     // that attend together
constexpr int64_t UNDIVIDED = 4;  // nodes whose head of keys stays with one thread
constexpr int64_t PHASES = 6;     // of a block, each with a queue of its own

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

EXPORT void blocks(const Model* model, const Nodes* nodes, float* x, int64_t first, int64_t last, const int64_t* taps, int64_t n_taps, float* tapped, float* final, int64_t round_inputs, int64_t threads) {
  of_types(round_inputs, nodes->kind, [&]<class X, class K>(X*, K*) { run_blocks<X, K>(*model, *nodes, x, first, last, taps, n_taps, tapped, final, int(threads)); });
}

// Keys and values alone of every block, of states x [n][hidden] that all blocks read.
EXPORT void keys_values(const Model* model, const Nodes* nodes, const float* x, int64_t round_inputs, int64_t threads) {
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
