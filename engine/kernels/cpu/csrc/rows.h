// What operators on rows share: their parallel loop, and the root mean square.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "parallel.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t kSharedElements = 16384;  // some microseconds of work

// Runs body(row) for every row, in parallel if there is enough work.
template <class Body>
void for_rows(int64_t num_rows, int64_t row_elements, int64_t threads, Body&& body) {
  const int64_t worth = std::min(num_rows, num_rows * row_elements / kSharedElements);
  parallel(std::min(threads, std::max<int64_t>(worth, 1)), [&](int thread, int team) {
    const Range rows = split(num_rows, thread, team);
    for (int64_t row = rows.begin; row < rows.end; ++row) body(row);
  });
}

// One over the root of the mean square.
TANDEM_INLINE float inverse_rms(Floats even, Floats odd, int64_t size, float eps) {
  return 1.0f / std::sqrt(sum(even + odd) / float(size) + eps);
}

template <class T>
TANDEM_INLINE float inverse_rms(const T* row, int64_t size, float eps) {
  Floats sums[2] = {};
  for (int64_t i = 0, side = 0; i < size; i += kLanes, side ^= 1) {
    const Floats x = load_some(row + i, size - i);
    sums[side] = fused(x, x, sums[side]);
  }
  return inverse_rms(sums[0], sums[1], size, eps);
}

// The hyperbolic tangent; its error is that of one minus a number of its own size, about 1e-7.
TANDEM_INLINE Floats tanh_of(Floats x) {
  const Floats exponent = x * 2.88539008177792681f;  // of 2, so that the power is exp(2 x)
  return 1.0f - 2.0f / (exp2_of(exponent > 126.0f ? splat(126.0f) : exponent) + 1.0f);
}

}  // namespace tandem
