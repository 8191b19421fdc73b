// Trees as TokenTree has them: fields [batch][n], ancestors [batch][n][n]. Results go to whole [3][batch][w]
// (tokens, parents, depths), numbers [3][batch][w] (log-probabilities, entropies, joint ones) and seen [batch][w][w].

#pragma once

#include "vectors.h"

// Appends a layer of f nodes, w = n + f; entropies of the new ones may be null, and are then NaN.
EXPORT void append_layer(int64_t batch, int64_t n, int64_t f, const int64_t* tokens, const int64_t* parents, const int64_t* depths, const float* log_probs, const float* entropies, const float* joint, const uint8_t* ancestors, const int64_t* above, const int64_t* new_tokens, const float* new_log_probs, const float* new_entropies, int64_t* whole, float* numbers, uint8_t* seen);

// Takes w nodes [batch][w] alone, ascending, the root first and none without its parent; returns how many lack it.
EXPORT int64_t take_nodes(int64_t batch, int64_t n, int64_t w, const int64_t* tokens, const int64_t* parents, const int64_t* depths, const float* log_probs, const float* entropies, const float* joint, const uint8_t* ancestors, const int64_t* nodes, int64_t* whole, float* numbers, uint8_t* seen);
