// Draws from the target's distribution.

#pragma once

#include <cstdint>

// Log of the sum of e^(x · factor) over a row, and the entry at which the sum from the first one on passes a share of
// it, in [0, 1). Where an entry is NaN or the largest is infinite, the first of those is found, and the sum is NaN.
double draw(const float* x, int64_t width, float factor, double share, int64_t* place);

// A number in [0, 1) that a seed and a position of the output determine: `sampling.uniform`.
static inline double uniform(uint64_t seed, uint64_t position, uint64_t number) {
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u * (position + 1) + 0x8CB92BA72F3D8DD7u * number;
  state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
  state = (state ^ state >> 27) * 0x94D049BB133111EBu;
  return double((state ^ state >> 31) >> 11) / 0x1p53;
}
