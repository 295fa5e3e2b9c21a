// Scores of up to 64 keys for the query heads of one group, in bfloat16 with sums in float32: on AMX tiles, which
// take keys as they lie in the cache, or by AVX512_BF16 after transposing them.
#pragma once

#include "paged.h"
#include "tiles.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

namespace tandem {

constexpr int kDecodeKeys = 64;
constexpr int kDecodeHeads = 4;  // heads whose sums are in registers at once

// How many of the next 64 keys are prefetched in each part of the work, in sixteenths of a key: in proportion to time.
constexpr int64_t kScoreShare = 24 * 16, kSoftenShare = 8 * 16, kAddShare = 32 * 16;

// Any head size and block size. `score` writes [heads, kDecodeKeys]; columns beyond `count` are unspecified.
// At regular intervals it calls `ahead(n)`, which prefetches the next n sixteenths of a key.
class TransposedScores {
 public:
  static size_t bytes(int64_t group, int64_t head_dim) {
    const int64_t words = round_up(head_dim, 32) / 2;
    return Carver::bytes<uint32_t>(group * words) + Carver::bytes<Words>(words);
  }

  TransposedScores(Carver& carver, const Bfloat16* queries, int64_t group, int64_t head_dim)
      : group_(group), head_dim_(head_dim), words_(round_up(head_dim, 32) / 2) {
    queries_ = carver.take<uint32_t>(group * words_);
    keys_ = carver.take<Words>(words_);
    for (int64_t g = 0; g < group; ++g) {
      for (int64_t w = 0; w < words_; w += kLanes) {
        const __mmask32 dims = mask32(head_dim_ - 2 * w);
        _mm512_storeu_si512(queries_ + g * words_ + w, _mm512_maskz_loadu_epi16(dims, queries + g * head_dim_ + 2 * w));
      }
    }
  }

  template <class Ahead>
  void score(const Bfloat16* const* rows, int64_t count, float* scores, Ahead& ahead) {
    for (int64_t k = 0; k < count; k += kLanes) {
      ahead(kScoreShare / (kDecodeKeys / kLanes));
      load_keys(rows + k, std::min<int64_t>(kLanes, count - k));
      for (int64_t g = 0; g < group_; g += kDecodeHeads) {
        switch (std::min<int64_t>(group_ - g, kDecodeHeads)) {
          case 1: score_heads<1>(g, scores + k); break;
          case 2: score_heads<2>(g, scores + k); break;
          case 3: score_heads<3>(g, scores + k); break;
          default: score_heads<4>(g, scores + k);
        }
      }
    }
  }

 private:
  // Sixteen keys as columns of words, two dimensions each; zeros from `count` on.
  void load_keys(const Bfloat16* const* rows, int64_t count) {
    for (int64_t w = 0; w < words_; w += kLanes) {
      const __mmask32 dims = mask32(head_dim_ - 2 * w);
      Words block[kLanes];
      if (count == kLanes)
        for (int i = 0; i < kLanes; ++i) block[i] = (Words)_mm512_maskz_loadu_epi16(dims, rows[i] + 2 * w);
      else
        for (int i = 0; i < kLanes; ++i)
          block[i] = i < count ? (Words)_mm512_maskz_loadu_epi16(dims, rows[i] + 2 * w) : Words{};
      transpose(block);
      for (int i = 0; i < kLanes; ++i) keys_[w + i] = block[i];
    }
  }

  template <int H>
  void score_heads(int64_t head, float* scores) const {
    constexpr int kChains = 4;  // hides the latency of a sum
    __m512 sums[H][kChains] = {};
    const uint32_t* queries = queries_ + head * words_;
    for (int64_t w = 0; w < words_; w += kChains)
      for (int g = 0; g < H; ++g)
        for (int c = 0; c < kChains; ++c)
          sums[g][c] = _mm512_dpbf16_ps(sums[g][c], (__m512bh)keys_[w + c],
                                        (__m512bh)_mm512_set1_epi32(int32_t(queries[g * words_ + w + c])));
    for (int g = 0; g < H; ++g)
      store(scores + (head + g) * kDecodeKeys, (Floats)(sums[g][0] + sums[g][1] + (sums[g][2] + sums[g][3])));
  }

  int64_t group_, head_dim_, words_;
  uint32_t* queries_;
  Words* keys_;
};

#if TANDEM_AMX

// Head sizes that are multiples of 32 in blocks of multiples of 16: keys are then tiles, sixteen of them by 32
// dimensions. A key is a row of its tile, so slots beyond the sequence only affect rows that are not read.
class TileScores {
 public:
  static bool fits(const AttentionStep& step) { return step.head_dim % 32 == 0 && step.block_size % kTileRows == 0; }

  static size_t bytes(int64_t group, int64_t head_dim) {
    return (round_up(group, kTileRows) / kTileRows * head_dim / 32 + kDecodeKeys / kTileRows) * kTileBytes;
  }

  TileScores(Carver& carver, const Bfloat16* queries, int64_t group, int64_t head_dim)
      : group_(group), head_dim_(head_dim), steps_(head_dim / 32) {
    queries_ = carver.take<char>(round_up(group, kTileRows) / kTileRows * steps_ * kTileBytes);
    products_ = carver.take<float>(kDecodeKeys * kTileRows);
    char* to = queries_;
    for (int64_t g = 0; g < group; g += kTileRows) {
      for (int64_t d = 0; d < head_dim; d += 32, to += kTileBytes) {
        Words block[kTileRows];
        for (int i = 0; i < kTileRows; ++i)
          block[i] = g + i < group ? (Words)_mm512_loadu_si512(queries + (g + i) * head_dim + d) : Words{};
        transpose(block);
        std::memcpy(to, block, kTileBytes);
      }
    }
  }

  template <class Ahead>
  void score(const Bfloat16* const* rows, int64_t count, float* scores, Ahead& ahead) {
    const Ints column = kLaneIndex * kTileRows;
    const int64_t share = kScoreShare / 3 / (group_ * kDecodeKeys / kTileRows);
    for (int64_t g = 0; g < group_; g += kTileRows) {
      multiply(rows, count, queries_ + g / kTileRows * steps_ * kTileBytes, ahead);
      const int64_t heads = std::min<int64_t>(group_ - g, kTileRows);
      for (int64_t i = 0; i < heads; ++i)
        for (int64_t k = 0; k < count; k += kTileRows, ahead(share))
          store(scores + (g + i) * kDecodeKeys + k,
                (Floats)_mm512_i32gather_ps((__m512i)column, products_ + k * kTileRows + i, 4));
    }
  }

 private:
  // [64 keys, 16 heads], of which `count` rounded up to a tile are computed.
  template <class Ahead>
  void multiply(const Bfloat16* const* rows, int64_t count, const char* queries, Ahead& ahead) {
    const int64_t share = kScoreShare * 2 / 3 / (steps_ * kDecodeKeys / kTileRows * ceil_div(group_, kTileRows));
    const int64_t key_bytes = head_dim_ * 2, head_bytes = kTileRows * 4;
    const bool second = count > 16, third = count > 32, fourth = count > 48;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps_; ++step) {
      _tile_loadd(4, queries + step * kTileBytes, 64);
      _tile_loadd(5, rows[0] + step * 32, key_bytes);
      _tile_dpbf16ps(0, 5, 4);
      ahead(share);
      if (second) {
        _tile_loadd(6, rows[16] + step * 32, key_bytes);
        _tile_dpbf16ps(1, 6, 4);
        ahead(share);
      }
      if (third) {
        _tile_loadd(7, rows[32] + step * 32, key_bytes);
        _tile_dpbf16ps(2, 7, 4);
        ahead(share);
      }
      if (fourth) {
        _tile_loadd(5, rows[48] + step * 32, key_bytes);
        _tile_dpbf16ps(3, 5, 4);
        ahead(share);
      }
    }
    _tile_stored(0, products_, head_bytes);
    _tile_stored(1, products_ + 16 * kTileRows, head_bytes);
    _tile_stored(2, products_ + 32 * kTileRows, head_bytes);
    _tile_stored(3, products_ + 48 * kTileRows, head_bytes);
  }

  int64_t group_, head_dim_, steps_;
  char* queries_;
  float* products_;
};

#endif

}  // namespace tandem

#endif
