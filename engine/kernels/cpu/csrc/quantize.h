// bf16 vectors as integers of at most 127 in units of a scale of their own: the rows of an input, the columns of a
// weight. Every kind of int8 product takes them from here, so that all compute the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "parallel.h"
#include "vectors.h"

namespace tandem {

struct Scale {
  float unit;    // what one is worth
  float factor;  // from values to units
};

// Magnitudes of bf16 are ordered like their bits, NaN above all, so an unusable vector yields an unusable scale and
// shows in the output.
inline float largest_magnitude(const Bfloat16* values, int64_t count) {
  Shorts largest = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    Shorts bits = {};
    if (count - i >= kLanes) {
      std::memcpy(&bits, values + i, sizeof bits);
    } else {
      std::memcpy(&bits, values + i, static_cast<size_t>(count - i) * sizeof *values);
    }
    bits &= 0x7fff;
    largest = bits > largest ? bits : largest;
  }
  uint32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found = std::max<uint32_t>(found, largest[i]);
  found <<= 16;
  float result;
  std::memcpy(&result, &found, sizeof result);
  return result;
}

inline Scale row_scale(const Bfloat16* row, int64_t depth) {
  const float unit = largest_magnitude(row, depth) / 127.0f;
  return {unit, unit < 1e-32f ? 0.0f : 1.0f / unit};
}

inline Scale column_scale(const Bfloat16* column, int64_t depth) {
  const float largest = largest_magnitude(column, depth);
  return {largest / 127.0f, largest > 1e-30f ? 127.0f / largest : 0.0f};
}

// Sixteen values to the nearest integers, ties to even, NaN to the lowest.
TANDEM_INLINE void nearest(Floats x, int16_t* to) {
#if defined(__AVX512F__)
  const __m256i units = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)x));
  std::memcpy(to, &units, sizeof units);
#elif defined(__AVX2__)
  __m256 halves[2];
  std::memcpy(halves, &x, sizeof halves);
  const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(halves[0]), _mm256_cvtps_epi32(halves[1]));
  const __m256i units = _mm256_permute4x64_epi64(mixed, 0xd8);
  std::memcpy(to, &units, sizeof units);
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int16_t>(std::nearbyint(x[i]));
#endif
}

TANDEM_INLINE void nearest(Floats x, int8_t* to) {
#if defined(__AVX512F__)
  const __m128i units = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)x));
  std::memcpy(to, &units, sizeof units);
#else
  int16_t wide[kLanes];
  nearest(x, wide);
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(wide[i]);
#endif
}

// Units of `count` values, and zeros up to the next multiple of sixteen.
template <class Unit>
void quantize(const Bfloat16* values, int64_t count, float factor, Unit* to) {
  for (int64_t i = 0; i < count; i += kLanes) nearest(load_some(values + i, count - i) * factor, to + i);
}

// Quantizes bf16 weight [columns (twice that when gated: gates, then values), depth] and hands it to
// place(panel, column, k, units, count): 64 units from `k` on, of which those from `count` on, and all of a column that is
// padding, are zero. `scales` gets one per packed column.
template <class Place>
void quantize_columns(const Bfloat16* weight, int64_t stride, int64_t columns, int64_t depth, bool gated, float* scales,
                      int64_t threads, Place&& place) {
  constexpr int64_t kTogether = 64;  // elements of a column, so that those of a panel stay in L1
  const int64_t panels = ceil_div(columns, gated ? kPanel / 2 : kPanel);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(panels, thread, team);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      Scale found[kPanel];
      for (int64_t column = 0; column < kPanel; ++column) {
        const int64_t row = source_row(columns, gated, panel, column);
        found[column] = row < 0 ? Scale{0.0f, 0.0f} : column_scale(weight + row * stride, depth);
        scales[panel * kPanel + column] = found[column].unit;
      }
      for (int64_t k = 0; k < depth; k += kTogether) {
        const int64_t count = std::min(kTogether, depth - k);
        for (int64_t column = 0; column < kPanel; ++column) {
          const int64_t row = source_row(columns, gated, panel, column);
          int8_t units[kTogether] = {};
          if (row >= 0) quantize(weight + row * stride + k, count, found[column].factor, units);
          place(panel, column, k, units, count);
        }
      }
    }
  });
}

}  // namespace tandem
