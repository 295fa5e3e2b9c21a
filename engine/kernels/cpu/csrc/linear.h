// Parameters that every packed matrix product shares with its Python wrapper (engine/kernels/cpu/gemm.py: _Linear).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"
#include "tile_rows.h"
#include "vectors.h"

namespace tandem {

constexpr int64_t kPanel = 32;  // columns of the product that are packed, and computed, together
// Prefetch distance in output rows. With slightly smaller values a product sometimes took 1.5 times as long, for
// seconds at a time: as long as without prefetching.
constexpr int64_t kOutAhead = 16;

// Epilogue of a product; the numbers are those of gemm.py: Epilogue.
enum Epilogue : int64_t {
  kStore = 0,     // out = product, in the type of the inputs
  kStoreF32 = 1,  // out = product, in float
  kGated = 2,     // a panel is 16 gates and their 16 values: out = silu(gate) * value
  kAdd = 3,       // out += product rounded to the type of out: exactly `out += linear(x)`
};

struct Linear {
  const char* weights;  // packed
  const float* bias;    // [panels * kPanel] in packed order, zero where there is none; or null
  const float* scales;  // int8: the weight's value per unit, [panels * kPanel]; codes of a table: the table
  int64_t columns;      // of the output
  int64_t depth;        // elements of a row of x
  int64_t epilogue;
  int64_t takes_tiles;  // bf16 only: more than kFewRows rows come as TileRows
  int64_t gives_tiles;  // bf16 and gated only: more than kFewRows rows of the output are TileRows
};

struct Call {
  const void* x;
  int64_t x_stride;  // elements between rows
  int64_t rows;
  void* out;
  int64_t out_stride;
};

inline int64_t panels_of(const Linear& w) {
  const int64_t width = w.epilogue == kGated ? kPanel / 2 : kPanel;
  return (w.columns + width - 1) / width;
}

// The source row of packed column `column` of panel `panel`, or -1 where the panel is padding.
inline int64_t source_row(int64_t columns, bool gated, int64_t panel, int64_t column) {
  if (!gated) {
    const int64_t row = panel * kPanel + column;
    return row < columns ? row : -1;
  }
  const int64_t row = panel * (kPanel / 2) + column % (kPanel / 2);
  if (row >= columns) return -1;
  return column < kPanel / 2 ? row : columns + row;
}

inline bool all_below(const int64_t* ids, int64_t count, int64_t bound) {
  return std::all_of(ids, ids + count, [bound](int64_t id) { return id >= 0 && id < bound; });
}

// What the product of a row and sixteen columns is, of which `sums` are the sums; `bias` is added.
struct FloatSums {
  TANDEM_INLINE Floats value(const Linear&, float, const char* sums, int64_t, Floats bias) {
    return load(reinterpret_cast<const float*>(sums)) + bias;
  }
};

// Sums of an int8 product are integers in units of the row's scale times the column's. Spelt out so that every kind of
// processor rounds alike.
struct IntSums {
  TANDEM_INLINE Floats value(const Linear& linear, float row_scale, const char* sums, int64_t column, Floats bias) {
    Ints units;
    std::memcpy(&units, sums, sizeof units);
    return fused(__builtin_convertvector(units, Floats) * row_scale, load(linear.scales + column), bias);
  }
};

#ifdef TANDEM_AVX512

// Gated, as TileRows; not an epilogue of its own for callers.
constexpr int64_t kGatedTiles = -1;

// Turns blocks of sums, [at most 32 rows][32 columns], into output, a few rows at a time: the caller writes one block
// while the tile unit computes the next, so neither waits for the other.
template <int64_t epilogue, class Sums>
class Writer {
 public:
  Writer(const Linear& linear, const Call& call, const float* row_scales)
      : linear_(linear), call_(call), row_scales_(row_scales) {}

  char* block() { return block_; }

  // The block now holds rows [row, row + count) of `panel`.
  void begin(int64_t row, int64_t count, int64_t panel) {
    next_ = 0;
    count_ = count;
    row_ = row;
    const int64_t first = panel * kWidth, left = linear_.columns - first;
    if (epilogue == kGatedTiles) {  // a panel is half of a tile's columns
      const TileRows tiles{static_cast<char*>(call_.out), call_.rows, linear_.columns / (2 * kWidth)};
      out_ = tiles.tile(row, panel / 2) + panel % 2 * kWidth * kOutBytes;
      next_tile_ = tiles.width(panel / 2) * kTileBytes;
    } else {
      out_ = static_cast<char*>(call_.out) + (row * call_.out_stride + first) * kOutBytes;
    }
    low_ = left >= 16 ? 0xffff : (1u << left) - 1;
    high_ = left >= 32 ? 0xffff : left <= 16 ? 0 : (1u << (left - 16)) - 1;
    column_ = panel * kPanel;
    bias_[0] = linear_.bias ? _mm512_loadu_ps(linear_.bias + column_) : _mm512_setzero_ps();
    bias_[1] = linear_.bias ? _mm512_loadu_ps(linear_.bias + column_ + 16) : _mm512_setzero_ps();
  }

  void write(int64_t rows) {
    for (const int64_t end = std::min(count_, next_ + rows); next_ < end; ++next_) write_row();
  }

  void flush() { write(count_); }

 private:
  static constexpr bool kIsGated = epilogue == kGated || epilogue == kGatedTiles;
  static constexpr int64_t kWidth = kIsGated ? kPanel / 2 : kPanel;
  static constexpr int64_t kOutBytes = epilogue == kStoreF32 ? 4 : 2;

  __m512 value(int64_t half) const {
    const char* sums = block_ + next_ * kPanel * 4 + half * 64;
    const float scale = row_scales_ ? row_scales_[row_ + next_] : 0.0f;
    return (__m512)Sums::value(linear_, scale, sums, column_ + half * 16, (Floats)bias_[half]);
  }

  void write_row() {
    const __m512 v0 = value(0), v1 = value(1);
    char* out;
    if (epilogue == kGatedTiles) {
      out = out_ + next_ / kTileRows * next_tile_ + next_ % kTileRows * kTileRowBytes;
      __builtin_prefetch(out + next_tile_, 1);
    } else {
      out = out_ + next_ * call_.out_stride * kOutBytes;
      __builtin_prefetch(out + kOutAhead * call_.out_stride * kOutBytes, 1);
    }
    if (epilogue == kStoreF32) {
      _mm512_mask_storeu_ps(out, low_, v0);
      _mm512_mask_storeu_ps(out + 64, high_, v1);
    } else if (kIsGated) {
      _mm256_mask_storeu_epi16(out, low_, float_to_bf16(_mm512_mul_ps(silu512(v0), v1)));
    } else {
      const __mmask32 mask = _mm512_kunpackw(high_, low_);
      __m512i result = floats_to_bf16(v0, v1);
      if (epilogue == kAdd) {
        const __m512i old = _mm512_maskz_loadu_epi16(mask, out);
        const __m512 sum0 = _mm512_add_ps(low_half(old), low_half(result));
        result = floats_to_bf16(sum0, _mm512_add_ps(high_half(old), high_half(result)));
      }
      _mm512_mask_storeu_epi16(out, mask, result);
    }
  }

  static __m512 low_half(__m512i bits) { return bf16_to_float(_mm512_castsi512_si256(bits)); }
  static __m512 high_half(__m512i bits) { return bf16_to_float(_mm512_extracti64x4_epi64(bits, 1)); }

  alignas(64) char block_[kPanel * kPanel * 4];
  const Linear linear_;
  const Call call_;
  const float* row_scales_;  // int8 only: one for each row of the call
  int64_t next_ = 0, count_ = 0, row_ = 0, column_ = 0, next_tile_ = 0;
  char* out_ = nullptr;
  __mmask16 low_ = 0, high_ = 0;
  __m512 bias_[2];
};

// Calls body(Writer) with the writer of the product's epilogue.
template <class Sums, class Body>
inline void with_writer(const Linear& linear, const Call& call, const float* row_scales, Body&& body) {
  switch (linear.epilogue) {
    case kStoreF32: return body(Writer<kStoreF32, Sums>(linear, call, row_scales));
    case kGated:
      if constexpr (std::is_same_v<Sums, FloatSums>) {
        if (linear.gives_tiles && call.rows > kFewRows)
          return body(Writer<kGatedTiles, Sums>(linear, call, row_scales));
      }
      return body(Writer<kGated, Sums>(linear, call, row_scales));
    case kAdd: return body(Writer<kAdd, Sums>(linear, call, row_scales));
    default: return body(Writer<kStore, Sums>(linear, call, row_scales));
  }
}

#endif

}  // namespace tandem
