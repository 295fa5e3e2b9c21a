// Rows in the layout that matrix products on tiles read: a producer of such rows writes them so directly, which saves
// the packing.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tandem {

constexpr int64_t kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;
constexpr int64_t kL2Steps = 32;  // depth, in tiles, of the rows that a product keeps in L2 at a time
constexpr int64_t kFewRows = 32;  // up to this many rows keep their own layout: the product is memory-bound

// [kL2Steps of depth][16 rows][step][tile]: what is used together is contiguous, so that it spreads over all sets of a
// cache. Rows beyond the last are anything; depth beyond the last is zero.
struct TileRows {
  char* data;
  int64_t rows, steps;

  // Steps of `step`'s part of the depth: so many tiles on are the next sixteen rows.
  int64_t width(int64_t step) const { return std::min(kL2Steps, steps - step / kL2Steps * kL2Steps); }

  // The tile of the sixteen rows that begin with `row`.
  char* tile(int64_t row, int64_t step) const {
    const int64_t groups = (rows + kTileRows - 1) / kTileRows, outer = step / kL2Steps * kL2Steps;
    return data + (outer * groups + row / kTileRows * width(step) + step - outer) * kTileBytes;
  }
};

}  // namespace tandem
