// Attention of nodes of trees over their own paths.

#pragma once

#include <span>

#include "threads.h"
#include "vectors.h"

constexpr int64_t KEYS = 16;      // that queries go through at a time

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

// Queries that share keys and values, over the slots they see, in order of position. They go through their runs
// together, some slots at a time, which stay in the cache that is next to the core.
template <class X, class K> void attend(std::span<const Query<X>> queries, const K* keys, const K* values, float scale, int64_t dim);
