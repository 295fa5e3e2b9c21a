// Attention in bfloat16 on AMX tiles: scores and sums in float32, weights rounded to bfloat16 before the values.
//
// Keys are processed in blocks of 512, in absolute order from position 0 up. Once per unit they are repacked for the
// tile unit: keys transposed by pairs of dimensions, values interleaved by pairs of keys. Each 32 query rows (positions
// times heads of the group) then take one tile of scores after the other, an online softmax (Milakov and Gimelshein,
// 2018; tiled as in FlashAttention, Dao et al., 2022) and the weighted sum of values. Tiles that no row sees are
// skipped. A row's tile arithmetic is independent of the other rows, masked keys have weight exactly zero, and block
// boundaries are absolute: so a row alone and a row in any chunk give the same bits.
#pragma once

#include "tiles.h"

#if TANDEM_AMX

#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "paged.h"

namespace tandem {

constexpr int kAmxKeys = 512;                // keys per block
constexpr int kScoreStride = kAmxKeys + 16;  // not a power of two, so that rows of a tile map to different cache sets
constexpr int kWeightStride = kAmxKeys + 32;

// c[16, 16 n] = or += a[16, 32 steps] * b, for n <= 4; b in tiles of 32 x 16, the n of one step `step_bytes` apart.
template <int N, bool kAdd>
TANDEM_INLINE void multiply_tiles(const Bfloat16* a, int64_t a_stride, const char* b, int64_t tile_bytes,
                                  int64_t step_bytes, int64_t steps, float* c, int64_t c_stride) {
  const int64_t row_bytes = c_stride * 4;
  if constexpr (kAdd) {
    _tile_loadd(0, c, row_bytes);
    if constexpr (N > 1) _tile_loadd(1, c + 16, row_bytes);
    if constexpr (N > 2) _tile_loadd(2, c + 32, row_bytes);
    if constexpr (N > 3) _tile_loadd(3, c + 48, row_bytes);
  } else {
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    if constexpr (N > 3) _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i, a += 32, b += step_bytes) {
    _tile_loadd(4, a, a_stride * 2);
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (N > 1) {
      _tile_loadd(6, b + tile_bytes, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (N > 2) {
      _tile_loadd(7, b + 2 * tile_bytes, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(5, b + 3 * tile_bytes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, row_bytes);
  if constexpr (N > 1) _tile_stored(1, c + 16, row_bytes);
  if constexpr (N > 2) _tile_stored(2, c + 32, row_bytes);
  if constexpr (N > 3) _tile_stored(3, c + 48, row_bytes);
}

// As above for 32 rows and n <= 2: a tile of b, which comes from further away than a, is used twice.
template <int N, bool kAdd>
TANDEM_INLINE void multiply_pair(const Bfloat16* a, int64_t a_stride, const char* b, int64_t tile_bytes,
                                 int64_t step_bytes, int64_t steps, float* c, int64_t c_stride) {
  const int64_t row_bytes = c_stride * 4;
  float* lower = c + kTileRows * c_stride;
  if constexpr (kAdd) {
    _tile_loadd(0, c, row_bytes);
    _tile_loadd(2, lower, row_bytes);
    if constexpr (N > 1) _tile_loadd(1, c + 16, row_bytes);
    if constexpr (N > 1) _tile_loadd(3, lower + 16, row_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 1) _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i, a += 32, b += step_bytes) {
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a, a_stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + kTileRows * a_stride, a_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (N > 1) {
      _tile_loadd(7, b + tile_bytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, row_bytes);
  _tile_stored(2, lower, row_bytes);
  if constexpr (N > 1) _tile_stored(1, c + 16, row_bytes);
  if constexpr (N > 1) _tile_stored(3, lower + 16, row_bytes);
}

// Either of them over any number of tiles side by side.
template <bool kAdd>
TANDEM_INLINE void multiply(bool pair, int64_t num_tiles, const Bfloat16* a, int64_t a_stride, const char* b,
                            int64_t tile_bytes, int64_t step_bytes, int64_t steps, float* c, int64_t c_stride) {
  if (pair) {
    for (; num_tiles >= 2; num_tiles -= 2, b += 2 * tile_bytes, c += 32)
      multiply_pair<2, kAdd>(a, a_stride, b, tile_bytes, step_bytes, steps, c, c_stride);
    if (num_tiles == 1) multiply_pair<1, kAdd>(a, a_stride, b, tile_bytes, step_bytes, steps, c, c_stride);
    return;
  }
  for (; num_tiles >= 4; num_tiles -= 4, b += 4 * tile_bytes, c += 64)
    multiply_tiles<4, kAdd>(a, a_stride, b, tile_bytes, step_bytes, steps, c, c_stride);
  if (num_tiles == 3) multiply_tiles<3, kAdd>(a, a_stride, b, tile_bytes, step_bytes, steps, c, c_stride);
  if (num_tiles == 2) multiply_tiles<2, kAdd>(a, a_stride, b, tile_bytes, step_bytes, steps, c, c_stride);
  if (num_tiles == 1) multiply_tiles<1, kAdd>(a, a_stride, b, tile_bytes, step_bytes, steps, c, c_stride);
}

class AmxUnit {
 public:
  using ThreadState = Tiles;

  AmxUnit(const AttentionStep& step, const AttentionLayer<Bfloat16>& layer, const int32_t* unit, int64_t kv_head)
      : layer_(layer),
        view_(step, layer.cache, unit[0], kv_head),
        head_dim_(step.head_dim),
        dim_steps_(round_up(step.head_dim, 32) / 32),
        dim_tiles_(round_up(step.head_dim, 16) / 16),
        group_(step.num_heads / step.num_kv_heads),
        num_rows_(unit[2] * group_),
        first_position_(step.starts[unit[0]] + unit[1]),
        first_row_(step.first_rows[unit[0]] + unit[1]),
        column_(kv_head * group_ * step.head_dim),
        out_stride_(int64_t(step.num_heads) * step.head_dim),
        scale_(step.scale * 1.44269504088896341f) {  // base 2 in place of e
    const int64_t padded = round_up(num_rows_, kTileRows);
    Carver carver(scratch(
        Carver::bytes<Bfloat16>(padded * dim_steps_ * 32) + Carver::bytes<float>(padded * dim_tiles_ * 16) +
        Carver::bytes<Floats>(padded) + Carver::bytes<float>(padded) + kAmxKeys / 16 * dim_steps_ * kTileBytes +
        kAmxKeys / 32 * dim_tiles_ * kTileBytes + Carver::bytes<float>(2 * kTileRows * kScoreStride) +
        Carver::bytes<Bfloat16>(2 * kTileRows * kWeightStride) + Carver::bytes<bool>(padded / kTileRows)));
    queries_ = carver.take<Bfloat16>(padded * dim_steps_ * 32);
    out_ = carver.take<float>(padded * dim_tiles_ * 16);
    sums_ = carver.take<Floats>(padded);
    maxima_ = carver.take<Floats>(padded / kTileRows);
    keys_ = carver.take<char>(kAmxKeys / 16 * dim_steps_ * kTileBytes);
    values_ = carver.take<char>(kAmxKeys / 32 * dim_tiles_ * kTileBytes);
    scores_ = carver.take<float>(2 * kTileRows * kScoreStride);
    weights_ = carver.take<Bfloat16>(2 * kTileRows * kWeightStride);
    begun_ = carver.take<bool>(padded / kTileRows);
    start(padded);
  }

  void run() {
    const int64_t lowest = first_position_ - layer_.window + 1, end = position(num_rows_ - 1) + 1;
    for (int64_t key = lowest > 0 ? lowest / kAmxKeys * kAmxKeys : 0; key < end; key += kAmxKeys) {
      const int64_t begin = lowest > key ? (lowest - key) / 32 * 32 : 0;
      const int64_t count = end - key < kAmxKeys ? end - key : kAmxKeys;
      for (int64_t k = begin; k < count; k += 32) {
        pack(key, k, count - k < 32 ? count - k : 32);
      }
      for (int64_t row = 0; row < num_rows_; row += 2 * kTileRows) attend(row, key);
    }
    finish();
  }

 private:
  int64_t position(int64_t row) const { return first_position_ + row / group_; }

  // Stacks queries in whole steps of depth, padded with rows of zeros to a whole tile.
  void start(int64_t padded) {
    const int64_t width = dim_steps_ * 32;
    const Bfloat16* position = layer_.queries + first_row_ * layer_.query_stride + column_;
    for (int64_t row = 0; row < num_rows_; row += group_, position += layer_.query_stride) {
      Bfloat16* to = queries_ + row * width;
      for (int64_t head = 0; head < group_; ++head, to += width)
        for (int64_t d = 0; d < width; d += 32)
          _mm512_storeu_si512(to + d, _mm512_maskz_loadu_epi16(mask32(head_dim_ - d), position + head * head_dim_ + d));
    }
    std::fill_n(queries_ + num_rows_ * width, (padded - num_rows_) * width, Bfloat16{});
    std::fill_n(begun_, padded / kTileRows, false);
  }

  // Thirty-two keys from `block + first`, of which `count` exist; zeros for the rest.
  void pack(int64_t block, int64_t first, int64_t count) {
    const Bfloat16* rows[32];
    view_.locate(block + first, count, rows);
    for (int64_t half = 0; half < 32; half += 16) {
      char* to = keys_ + (first + half) / 16 * dim_steps_ * kTileBytes;
      for (int64_t step = 0; step < dim_steps_; ++step, to += kTileBytes) {
        const __mmask32 dims = mask32(head_dim_ - step * 32);
        Words words[16];
        for (int i = 0; i < 16; ++i)
          words[i] = half + i < count ? (Words)_mm512_maskz_loadu_epi16(dims, rows[half + i] + step * 32) : Words{};
        transpose(words);
        for (int i = 0; i < 16; ++i) std::memcpy(to + i * 64, &words[i], 64);
      }
    }
    char* to = values_ + first / 32 * dim_tiles_ * kTileBytes;
    for (int64_t i = 0; i < 32; i += 2, to += 64) {
      for (int64_t tile = 0; tile < dim_tiles_; ++tile) {
        const Words even = i < count ? value(rows[i], tile) : Words{};
        const Words odd = i + 1 < count ? value(rows[i + 1], tile) : Words{};
        const Words both = even | (odd << 16);
        std::memcpy(to + tile * kTileBytes, &both, 64);
      }
    }
  }

  Words value(const Bfloat16* key, int64_t tile) const {
    const __mmask16 dims = __mmask16(mask32(head_dim_ - tile * 16));
    return (Words)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(dims, key + view_.value_offset() + tile * 16));
  }

  // Up to 32 rows over the block's keys, as far as any of them sees.
  void attend(int64_t row, int64_t key) {
    const int64_t count = std::min<int64_t>(num_rows_ - row, 2 * kTileRows);
    const bool pair = count > kTileRows;
    const int64_t end = position(row + count - 1) + 1 - key, lowest = position(row) - layer_.window + 1 - key;
    const int64_t begin = lowest > 0 ? lowest / 32 * 32 : 0;
    const int64_t limit = end < kAmxKeys ? round_up(end, 32) : kAmxKeys;
    if (begin >= limit) return;
    const int64_t key_bytes = dim_steps_ * kTileBytes, value_bytes = dim_tiles_ * kTileBytes;
    multiply<false>(pair, (limit - begin) / 16, queries_ + row * dim_steps_ * 32, dim_steps_ * 32,
                    keys_ + begin / 16 * key_bytes, key_bytes, kTileBytes, dim_steps_, scores_ + begin, kScoreStride);
    const bool first = !begun_[row / kTileRows];
    for (int64_t r = 0; r < count; r += kTileRows)
      soften(row + r, r, std::min<int64_t>(count - r, kTileRows), key, begin, limit, first);
    begun_[row / kTileRows] = true;
    const auto add = [&](auto adds) {
      multiply<decltype(adds)::value>(pair, dim_tiles_, weights_ + begin, kWeightStride,
                                      values_ + begin / 32 * value_bytes, kTileBytes, value_bytes, (limit - begin) / 32,
                                      out_ + row * dim_tiles_ * 16, dim_tiles_ * 16);
    };
    first ? add(std::false_type{}) : add(std::true_type{});
  }

  // Turns a tile's scores into weights; the rows' partial sums, unless this is the first tile, are rescaled when a
  // maximum rises. Maxima of all rows are computed first and without branches: a misprediction would stall the
  // exponentials in flight.
  void soften(int64_t row, int64_t tile_row, int64_t count, int64_t key, int64_t begin, int64_t limit,
              bool first) {
    Words highest[kTileRows];
    for (int64_t r = 0; r < kTileRows; ++r)
      highest[r] = (Words)(r < count ? mask(tile_row + r, position(row + r) - key, begin, limit) : splat(-FLT_MAX));
    transpose(highest);
    Floats top = (Floats)highest[0];
    for (int64_t r = 1; r < kTileRows; ++r) top = larger(top, (Floats)highest[r]);
    Floats& maxima = maxima_[row / kTileRows];
    // Finite in any case: minus infinity less itself is NaN.
    top = larger(top * scale_, first ? splat(-FLT_MAX) : maxima);
    if (!first) shrink(row, count, exp2_of(maxima - top));
    maxima = top;
    alignas(64) float above[kTileRows];
    store(above, top);
    for (int64_t r = 0; r < count; ++r)
      sums_[row + r] = weigh(tile_row + r, above[r], begin, limit, first ? Floats{} : sums_[row + r]);
  }

  void shrink(int64_t row, int64_t count, Floats factors) {
    alignas(64) float factor[kTileRows];
    store(factor, factors);
    for (int64_t r = 0; r < count; ++r) {
      if (factor[r] == 1.0f) continue;
      sums_[row + r] *= factor[r];
      float* out = out_ + (row + r) * dim_tiles_ * 16;
      for (int64_t d = 0; d < dim_tiles_ * 16; d += 16) store(out + d, load(out + d) * factor[r]);
    }
  }

  // Masks the keys that a row at position `high` within the block does not see; returns maxima by lane.
  Floats mask(int64_t tile_row, int64_t high, int64_t begin, int64_t limit) {
    float* scores = scores_ + tile_row * kScoreStride;
    const int64_t low = high - layer_.window;  // sees keys in (low, high]
    Floats highest = splat(-__builtin_inff());
    for (int64_t k = begin; k < limit; k += 16) {
      Floats some = load(scores + k);
      if (k + 15 > high || k <= low) {
        const Ints lanes = kLaneIndex + int32_t(k);
        const int32_t last = int32_t(std::min<int64_t>(high, kAmxKeys)), before = int32_t(std::max<int64_t>(low, -1));
        const Ints seen = (lanes <= last) & (lanes > before);
        some = seen ? some : splat(-__builtin_inff());
        store(scores + k, some);
      }
      highest = larger(highest, some);
    }
    return highest;
  }

  Floats weigh(int64_t tile_row, float above, int64_t begin, int64_t limit, Floats total) {
    const float* scores = scores_ + tile_row * kScoreStride;
    Bfloat16* weights = weights_ + tile_row * kWeightStride;
    const Floats scale = splat(scale_), below = splat(-above);
    for (int64_t k = begin; k < limit; k += 32) {
      const Floats a = exp2_of<true>(fused(load(scores + k), scale, below));
      const Floats b = exp2_of<true>(fused(load(scores + k + 16), scale, below));
      total += a;
      total += b;
      const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
      std::memcpy(weights + k, &packed, sizeof packed);
    }
    return total;
  }

  // Sixteen rows at a time: one transposition adds up the sums of all of them.
  void finish() const {
    const int64_t width = dim_tiles_ * 16;
    Bfloat16* position = layer_.out + first_row_ * out_stride_ + column_;
    int64_t head = 0;
    for (int64_t tile = 0; tile < num_rows_; tile += kTileRows) {
      const int64_t count = std::min<int64_t>(num_rows_ - tile, kTileRows);
      Words sums[kTileRows];
      for (int64_t r = 0; r < kTileRows; ++r) sums[r] = (Words)(r < count ? sums_[tile + r] : splat(1.0f));
      transpose(sums);
      Floats total = (Floats)sums[0];
      for (int64_t r = 1; r < kTileRows; ++r) total += (Floats)sums[r];
      alignas(64) float inverse[kTileRows];
      store(inverse, 1.0f / total);
      const float* from = out_ + tile * width;
      for (int64_t r = 0; r < count; ++r, from += width) {
        Bfloat16* to = position + head * head_dim_;
        for (int64_t d = 0; d < head_dim_; d += 32) {
          const Floats low = load(from + d) * inverse[r];
          const Floats high = d + 16 < width ? load(from + d + 16) * inverse[r] : Floats{};
          const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
          _mm512_mask_storeu_epi16(to + d, mask32(head_dim_ - d), (__m512i)packed);
        }
        if (++head == group_) head = 0, position += out_stride_;
      }
    }
  }

  const AttentionLayer<Bfloat16>& layer_;
  HeadView<Bfloat16> view_;
  int64_t head_dim_, dim_steps_, dim_tiles_, group_, num_rows_, first_position_, first_row_, column_, out_stride_;
  float scale_;
  Bfloat16 *queries_, *weights_;
  float *out_, *scores_;
  Floats *sums_, *maxima_;
  char *keys_, *values_;
  bool* begun_;  // at the first tile of each 32 rows: whether any of them has seen keys yet
};

}  // namespace tandem

#endif
