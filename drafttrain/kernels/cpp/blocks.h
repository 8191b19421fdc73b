// Whole blocks of decoders over the nodes of trees.
//
// Keys and values are kept in fp32 or, as their cache is, in bf16.

#pragma once

#include "linear.h"

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

// Blocks first ... last - 1 over the nodes of trees, then the final norm where `final` is given.
// x [n][hidden] goes in and comes out changed; tapped [n][taps][hidden] are outputs of blocks.
EXPORT void blocks(const Model* model, const Nodes* nodes, float* x, int64_t first, int64_t last, const int64_t* taps, int64_t n_taps, float* tapped, float* final, int64_t round_inputs, int64_t threads);
