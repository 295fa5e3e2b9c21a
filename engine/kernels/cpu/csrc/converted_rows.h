// Rows of an input in the form in which they are multiplied.
#pragma once

#include <cstring>

#include "lines.h"
#include "quantize.h"

namespace tandem {

// What a quantized row carries behind its elements, in the last bytes before the next row.
struct RowUnits {
  float scale;
  int32_t start;  // of its sums
};

template <class Element>
struct ElementRows {
  const Element* data;
  int64_t stride, count;

  const Element* row(int64_t index) const { return data + index * stride; }

  // Nothing for rows that are not quantized.
  RowUnits units(int64_t index) const {
    RowUnits found = {};
    if constexpr (std::is_same_v<Element, UnitPair> || std::is_same_v<Element, UnitQuad>) {
      std::memcpy(&found, reinterpret_cast<const char*>(row(index + 1)) - sizeof found, sizeof found);
    }
    return found;
  }
};

// The distance of converted rows of so many elements: apart by an odd number of cache lines, since a block's rows would
// compete for the same sets of L1.
template <class Element>
int64_t stride_of(int64_t elements) {
  if constexpr (std::is_same_v<Element, UnitGroup>) {
    static_assert(sizeof(UnitGroup) == 40);  // 16 n + 8 of which are 5 cache lines, and twice as many n times
    return round_up(elements, 16) + 8;
  }
  return round_up(elements, 2 * kLanes) + kLanes;
}

template <class In>
void convert(const In* x, int64_t stride, Range rows, int64_t depth, float* floats, int64_t floats_stride) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const In* from = x + row * stride;
    float* to = floats + row * floats_stride;
    for (int64_t k = 0; k < depth; k += kLanes) store_some(to + k, load_some(from + k, depth - k), depth - k);
  }
}

// A last element without a neighbour gets a zero.
inline void convert(const Bfloat16* x, int64_t stride, Range rows, int64_t depth, Pair* pairs, int64_t pairs_stride) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    Pair* to = pairs + row * pairs_stride;
    std::memcpy(to, x + row * stride, static_cast<size_t>(depth) * sizeof(Bfloat16));
    if (depth % 2) to[depth / 2].high = Bfloat16{0};
  }
}

// `origin`: what a sum starts from for each unit of its row.
template <class Element>
void quantize_rows(const Bfloat16* x, int64_t stride, Range rows, int64_t depth, Element* to, int64_t to_stride,
                   int32_t origin) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const Bfloat16* const from = x + row * stride;
    auto* const units = to[row * to_stride].units;
    const Scale scale = row_scale(from, depth);
    quantize(from, depth, scale.factor, units);
    int32_t sum = 0;
    for (int64_t k = 0; k < depth; ++k) sum += units[k];
    const RowUnits found{scale.unit, origin * sum};
    std::memcpy(reinterpret_cast<char*>(to + (row + 1) * to_stride) - sizeof found, &found, sizeof found);
  }
}

inline void convert(const Bfloat16* x, int64_t stride, Range rows, int64_t depth, UnitPair* to, int64_t to_stride) {
  quantize_rows(x, stride, rows, depth, to, to_stride, 0);
}

// Weights are stored 128 higher than they are.
inline void convert(const Bfloat16* x, int64_t stride, Range rows, int64_t depth, UnitQuad* to, int64_t to_stride) {
  quantize_rows(x, stride, rows, depth, to, to_stride, -128);
}

inline void convert(const Bfloat16* x, int64_t stride, Range rows, int64_t depth, UnitGroup* to, int64_t to_stride) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const Bfloat16* const from = x + row * stride;
    UnitGroup* group = to + row * to_stride;
    for (int64_t k = 0; k < depth; k += kGroup, ++group) {
      const int64_t count = std::min(kGroup, depth - k);
      const Scale scale = row_scale(from + k, count);
      std::memset(group->units, 0, sizeof group->units);
      quantize(from + k, count, scale.factor, group->units);
      group->scale = scale.unit;
      for (int half = 0; half < 2; ++half) {
        int16_t sum = 0;
        for (int64_t i = 0; i < kGroup / 2; ++i) sum = static_cast<int16_t>(sum + group->units[half * kGroup / 2 + i]);
        group->sums[half] = sum;
      }
    }
  }
}

// The rows as they are, where they are multiplied so.
template <class In, class Element>
const Element* unconverted(const In*, int64_t, int64_t, const Element*) {
  return nullptr;
}
inline const float* unconverted(const float* x, int64_t, int64_t, const float*) { return x; }
inline const Pair* unconverted(const Bfloat16* x, int64_t stride, int64_t depth, const Pair*) {
  return depth % 2 || stride % 2 ? nullptr : reinterpret_cast<const Pair*>(x);
}

}  // namespace tandem
