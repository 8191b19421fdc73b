// The largest entries of rows.

#pragma once

#include "linear.h"

// The k largest of each row of a layer's products with x [rows][in] in descending order, k <= out, with their places.
// Values are those of the row's log-softmax. Of equals the first ones win, and NaN is above all.
EXPORT void linear_top(const Linear* layer, const float* x, int64_t rows, int64_t k, float* values, int64_t* places, int64_t round_inputs, int64_t threads);
