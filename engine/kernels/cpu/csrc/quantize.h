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

// A column of bf16 weights, quantized while it is read.
struct WeightColumn {
  const Bfloat16* values;
  Scale scale;

  float unit() const { return scale.unit; }
  void units(int64_t k, int64_t count, int8_t* to) const { quantize(values + k, count, scale.factor, to); }
};

// One that is stored in eight bits.
struct StoredColumn {
  const int8_t* codes;
  float scale;

  float unit() const { return scale; }
  void units(int64_t k, int64_t count, int8_t* to) const {
    std::memcpy(to, codes + k, static_cast<size_t>(count));
  }
};

// Weights [columns (twice that when gated: gates, then values), depth] in eight bits, handed to
// place(panel, column, k, units, count): 64 units from `k` on, of which those from `count` on, and all of a column that
// is padding, are zero. column_of(row) is a column of the product; `scales` gets one per packed column.
template <class ColumnOf, class Place>
void place_columns(int64_t columns, int64_t depth, bool gated, float* scales, int64_t threads, ColumnOf&& column_of,
                   Place&& place) {
  constexpr int64_t kTogether = 64;  // elements of a column, so that those of a panel stay in L1
  const int64_t panels = ceil_div(columns, gated ? kPanel / 2 : kPanel);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(panels, thread, team);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      decltype(column_of(0)) found[kPanel] = {};
      for (int64_t column = 0; column < kPanel; ++column) {
        const int64_t row = source_row(columns, gated, panel, column);
        if (row >= 0) found[column] = column_of(row);
        scales[panel * kPanel + column] = found[column].unit();
      }
      for (int64_t k = 0; k < depth; k += kTogether) {
        const int64_t count = std::min(kTogether, depth - k);
        for (int64_t column = 0; column < kPanel; ++column) {
          int8_t units[kTogether] = {};
          if (source_row(columns, gated, panel, column) >= 0) found[column].units(k, count, units);
          place(panel, column, k, units, count);
        }
      }
    }
  });
}

// The same of bf16 weights.
template <class Place>
void quantize_columns(const Bfloat16* weight, int64_t stride, int64_t columns, int64_t depth, bool gated, float* scales,
                      int64_t threads, Place&& place) {
  const auto column_of = [=](int64_t row) {
    const Bfloat16* const values = weight + row * stride;
    return WeightColumn{values, column_scale(values, depth)};
  };
  place_columns(columns, depth, gated, scales, threads, column_of, place);
}

// The same of weights that are stored in eight bits, [columns, depth], with a scale for each.
template <class Place>
void place_stored_columns(const int8_t* codes, const float* stored_scales, int64_t columns, int64_t depth, bool gated,
                          float* scales, int64_t threads, Place&& place) {
  const auto column_of = [=](int64_t row) { return StoredColumn{codes + row * depth, stored_scales[row]}; };
  place_columns(columns, depth, gated, scales, threads, column_of, place);
}

// Rows `ids` of an ungated int8 matrix, [count, depth], rounded to bf16; unit(id, k): a stored one. Returns 0, and
// writes nothing, when an id is out of range.
template <class Unit>
int64_t embed_units(const float* scales, int64_t columns, int64_t depth, const int64_t* ids, int64_t count,
                    Bfloat16* out, int64_t out_stride, int64_t threads, Unit&& unit) {
  if (!all_below(ids, count, columns)) return 0;
  parallel(threads, [&](int thread, int team) {
    const Range range = split(count, thread, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      for (int64_t k = 0; k < depth; k += kLanes) {
        float values[kLanes] = {};
        const int64_t some = std::min<int64_t>(kLanes, depth - k);
        for (int64_t j = 0; j < some; ++j) values[j] = static_cast<float>(unit(ids[i], k + j));
        store_some(out + i * out_stride + k, load(values) * scales[ids[i]], some);
      }
    }
  });
  return 1;
}

// Values as integers from -8 to 7, ties to even.
TANDEM_INLINE Floats nearest_of_sixteen(Floats x, float factor) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest integer
  Floats y = x * factor;
  y = y >= -8.0f ? y : splat(-8.0f);  // a NaN too
  y = y > 7.0f ? splat(7.0f) : y;
  return (y + kShift) - kShift;
}

#if defined(__F16C__) && defined(__AVX2__)
// Of at most 32 values the one farthest from zero, the first of equals; a NaN where there is one.
inline float farthest(const Bfloat16* values, int64_t count) {
  __m256i bits[2] = {};
  std::memcpy(bits, values, static_cast<size_t>(count) * sizeof *values);
  const __m256i all = _mm256_set1_epi16(0x7fff);
  const __m256i low = _mm256_and_si256(bits[0], all), high = _mm256_and_si256(bits[1], all);
  const __m256i larger = _mm256_max_epu16(low, high);
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(larger), _mm256_extracti128_si256(larger, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  const auto largest = static_cast<int16_t>(~_mm_extract_epi16(least, 0));
  if (largest == 0) return 0.0f;
  const __m256i wanted = _mm256_set1_epi16(largest);
  const auto first = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi16(low, wanted)));
  const auto last = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi16(high, wanted)));
  const uint64_t found = first | static_cast<uint64_t>(last) << 32;  // two bits for each value
  const uint32_t wide = static_cast<uint32_t>(values[__builtin_ctzll(found) / 2].bits) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

// Quantizes at most a group of bf16 values to four bits, 8 higher than they are; returns what one is worth. Of some
// scales, around that at which the value farthest from zero is -8, the one with the least squared error: without it a
// single large value takes resolution from all others. Spelt out in one order, so that every processor finds the same.
inline Float16 quantize_group(const Bfloat16* values, int64_t count, uint8_t* codes) {
  constexpr int kScales = 13;
  constexpr Floats kDivisors = {-9.0f,  -8.75f, -8.5f, -8.25f, -8.0f, -7.75f, -7.5f, -7.25f,
                                -7.0f,  -6.75f, -6.5f, -6.25f, -6.0f, 1.0f,   1.0f,  1.0f};
  const Floats low = load_some(values, count), high = load_some(values + kLanes, count - kLanes);
  const float extreme = farthest(values, count);
  Float16 scales[kLanes];
  store(scales, splat(extreme) / kDivisors);
  float units[kLanes], inverses[kLanes];
  const Floats worth = load(scales);
  store(units, worth);
  store(inverses, worth != 0.0f ? 1.0f / worth : Floats{});
  Float16 best{};
  float least = INFINITY, factor = 0.0f;
  for (int i = 0; i < kScales; ++i) {
    const Floats low_error = fused(nearest_of_sixteen(low, inverses[i]), splat(-units[i]), low);
    const Floats high_error = fused(nearest_of_sixteen(high, inverses[i]), splat(-units[i]), high);
    const float error = sum(fused(low_error, low_error, high_error * high_error));
    if (error < least) least = error, best = scales[i], factor = inverses[i];
  }
  if (least == INFINITY) best = to_half(extreme * 0.0f - extreme);  // not finite, and shows in the output
  for (int i = 0; i < 2; ++i) {
    int8_t found[kLanes];
    nearest(nearest_of_sixteen(i == 0 ? low : high, factor) + 8.0f, found);
    std::memcpy(codes + i * kLanes, found, sizeof found);
  }
  return best;
}
#endif

}  // namespace tandem
