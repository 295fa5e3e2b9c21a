// Attention of one row per sequence in bfloat16, limited by how fast keys and values come from memory.
//
// Keys are read in place, 64 at a time and once for all query heads of their group, while the next 64 are on their
// way (software prefetch, into L2: paging hides the next block from the hardware, and L1 has too few buffers). Softmax,
// weights and the sum of values are float32. Sums are kept apart for even and odd dimensions, [32 dimensions: 16 even,
// 16 odd]: a word of the cache holds one of each, and becomes two floats by a shift and a mask.
#pragma once

#include "decode_scores.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define TANDEM_DECODE 1

#include <algorithm>
#include <cfloat>

namespace tandem {

// 0, 16, 1, 17, ...: sixteen even and sixteen odd dimensions in their order.
inline __m512i interleave_index() {
  return (__m512i)((kLaneIndex & 0xffff) | ((kLaneIndex + 16) << 16));
}

// One head from sums, even and odd dimensions apart.
TANDEM_INLINE void write_head(const float* sums, float factor, int64_t head_dim, Bfloat16* out) {
  for (int64_t d = 0; d < head_dim; d += 32) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)(load(sums + d + kLanes) * factor),
                                                      (__m512)(load(sums + d) * factor));
    _mm512_mask_storeu_epi16(out + d, mask32(head_dim - d), _mm512_permutexvar_epi16(interleave_index(), both));
  }
}

template <class Scores>
class DecodeUnit {
 public:
  DecodeUnit(const AttentionStep& step, const AttentionLayer<Bfloat16>& layer, int64_t single, int64_t kv_head,
             int64_t segment)
      : view_(step, layer.cache, single, kv_head),
        head_dim_(step.head_dim),
        width_(round_up(step.head_dim, 32)),
        group_(step.num_heads / step.num_kv_heads),
        scale_(step.scale * 1.44269504088896341f),  // powers of 2 in place of e
        carver_(scratch(Scores::bytes(group_, head_dim_) + Carver::bytes<float>(group_ * (width_ + kDecodeKeys + 1)) +
                        Carver::bytes<Floats>(group_) + 192)),
        scores_(carver_, layer.queries + step.first_rows[single] * layer.query_stride + kv_head * group_ * head_dim_,
                group_, head_dim_) {
    out_ = carver_.take<float>(group_ * width_);
    weights_ = carver_.take<float>(group_ * kDecodeKeys);
    sums_ = carver_.take<Floats>(group_);
    maxima_ = carver_.take<float>(group_);
    std::fill_n(out_, group_ * width_, 0.0f);
    std::fill_n(sums_, group_, Floats{});
    std::fill_n(maxima_, group_, -FLT_MAX);  // finite: minus infinity less itself is NaN
    if (kv_head + step.num_threads < step.num_kv_heads)
      following_ = int64_t(step.num_threads) * step.block_size * head_dim_;
    find_range(step.starts[single] + 1, layer.window, segment, step.num_segments);
  }

  void run() {
    const Bfloat16* rows[2][kDecodeKeys];
    int64_t key = begin_, count = locate(key, 0, rows[0]);
    for (int side = 0; count > 0; side ^= 1) {
      const int64_t next = key + count, ahead = locate(next, 0, rows[side ^ 1]);
      next_ = rows[side ^ 1];
      num_next_ = ahead > 0 || following_ == 0 ? ahead : locate(begin_, following_, rows[side ^ 1]);
      attend(rows[side], count, lowest_ - key);
      key = next;
      count = ahead;
    }
  }

  void write(Bfloat16* out) const {
    for (int64_t g = 0; g < group_; ++g)
      write_head(out_ + g * width_, 1.0f / sum(sums_[g]), head_dim_, out + g * head_dim_);
  }

  // Maximum, sum of weights, weighted values of each head, for `merge`.
  void write_partial(float* to) const {
    for (int64_t g = 0; g < group_; ++g, to += 2 + width_) {
      to[0] = maxima_[g];
      to[1] = sum(sums_[g]);
      std::copy_n(out_ + g * width_, width_, to + 2);
    }
  }

 private:
  // Addresses of up to 64 keys from `key`, or of what lies `offset` elements behind; how many there are.
  int64_t locate(int64_t key, int64_t offset, const Bfloat16** rows) const {
    const int64_t count = std::max<int64_t>(std::min<int64_t>(kDecodeKeys, end_ - key), 0);
    if (count > 0) view_.locate(key, count, rows);
    for (int64_t i = 0; offset != 0 && i < count; ++i) rows[i] += offset;
    return count;
  }

  // The keys of a segment: the visible 64s divided evenly, in order. May be none.
  void find_range(int64_t length, int64_t window, int64_t segment, int64_t num_segments) {
    lowest_ = std::max<int64_t>(length - window, 0);
    const int64_t first = lowest_ / kDecodeKeys, spans = (length + kDecodeKeys - 1) / kDecodeKeys - first;
    begin_ = (first + spans * segment / num_segments) * kDecodeKeys;
    end_ = std::min<int64_t>((first + spans * (segment + 1) / num_segments) * kDecodeKeys, length);
  }

  void attend(const Bfloat16** rows, int64_t count, int64_t lowest) {
    prefetch(16);
    scores_.score(rows, count, weights_);
    for (int64_t g = 0; g < group_; ++g) soften(g, count, lowest);
    for (int64_t g = 0; g < group_; g += kDecodeHeads) {
      switch (std::min<int64_t>(group_ - g, kDecodeHeads)) {
        case 1: add_values<1>(g, rows, count); break;
        case 2: add_values<2>(g, rows, count); break;
        case 3: add_values<3>(g, rows, count); break;
        default: add_values<4>(g, rows, count);
      }
    }
  }

  // Asks for the next few of the keys to come. Spread over the work: memory is then never idle, and a burst of
  // requests would hold up the instructions behind it.
  void prefetch(int64_t count) {
    for (; count > 0 && num_next_ > 0; --count, --num_next_, ++next_) {
      for (int64_t d = 0; d < head_dim_; d += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(*next_ + d), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(*next_ + view_.value_offset() + d), _MM_HINT_T1);
      }
    }
  }

  void soften(int64_t head, int64_t count, int64_t lowest) {
    float* scores = weights_ + head * kDecodeKeys;
    Floats some[kDecodeKeys / kLanes], highest = splat(-__builtin_inff());
    for (int i = 0; i < kDecodeKeys / kLanes; ++i) {
      const Ints lanes = kLaneIndex + i * kLanes;
      const Ints seen = (lanes < int32_t(count)) & (lanes >= int32_t(std::max<int64_t>(lowest, 0)));
      some[i] = seen ? load(scores + i * kLanes) * scale_ : splat(-__builtin_inff());
      highest = larger(highest, some[i]);
    }
    const float top = std::max(maxima_[head], maximum(highest));
    if (top > maxima_[head]) {
      const Floats shrink = exp2_of(splat(maxima_[head] - top));
      float* out = out_ + head * width_;
      for (int64_t d = 0; d < width_; d += kLanes) store(out + d, load(out + d) * shrink);
      sums_[head] *= shrink;
      maxima_[head] = top;
    }
    for (int i = 0; i < kDecodeKeys / kLanes; ++i) {
      const Floats weights = exp2_of(some[i] - top);
      sums_[head] += weights;
      store(scores + i * kLanes, weights);
    }
  }

  template <int H>
  void add_values(int64_t head, const Bfloat16** rows, int64_t count) {
    int64_t dim = 0;
    for (; dim + 64 <= head_dim_; dim += 64) add_values<H, 2>(head, dim, ~__mmask32(0), rows, count);
    for (; dim < head_dim_; dim += 32) add_values<H, 1>(head, dim, mask32(head_dim_ - dim), rows, count);
  }

  // Adds the weighted values of 32 N dimensions to the sums of H heads.
  template <int H, int N>
  void add_values(int64_t head, int64_t dim, __mmask32 dims, const Bfloat16** rows, int64_t count) {
    const int64_t offset = view_.value_offset() + dim;
    const float* weights = weights_ + head * kDecodeKeys;
    float* out = out_ + head * width_ + dim;
    Floats total[H][2 * N];
    for (int g = 0; g < H; ++g)
      for (int n = 0; n < 2 * N; ++n) total[g][n] = load(out + g * width_ + n * kLanes);
    for (int64_t i = 0; i < count; ++i) {
      prefetch(1);
      for (int n = 0; n < N; ++n) {
        const Words both = (Words)_mm512_maskz_loadu_epi16(dims, rows[i] + offset + n * 32);
        const Floats even = (Floats)(both << 16), odd = (Floats)(both & 0xffff0000);
        for (int g = 0; g < H; ++g) {
          total[g][2 * n] += even * weights[g * kDecodeKeys + i];
          total[g][2 * n + 1] += odd * weights[g * kDecodeKeys + i];
        }
      }
    }
    for (int g = 0; g < H; ++g)
      for (int n = 0; n < 2 * N; ++n) store(out + g * width_ + n * kLanes, total[g][n]);
  }

  HeadView<Bfloat16> view_;
  int64_t head_dim_, width_, group_;
  float scale_;
  Carver carver_;
  Scores scores_;
  int64_t lowest_, begin_, end_;
  const Bfloat16** next_ = nullptr;  // the keys to come, as far as not yet asked for
  int64_t num_next_ = 0;
  int64_t following_ = 0;  // from a key to that of the head which this thread takes next, as like as not
  float *out_, *weights_, *maxima_;
  Floats* sums_;
};

// One head's output from its segments' partial results, `stride` floats apart.
TANDEM_INLINE void merge(const float* partials, int64_t num_segments, int64_t stride, int64_t head_dim, Bfloat16* out) {
  float top = -FLT_MAX, total = 0.0f;
  for (int64_t s = 0; s < num_segments; ++s) top = std::max(top, partials[s * stride]);
  for (int64_t s = 0; s < num_segments; ++s)
    total += exp2_of(splat(partials[s * stride] - top))[0] * partials[s * stride + 1];
  for (int64_t d = 0; d < head_dim; d += 32) {
    alignas(64) float sums[32] = {};
    for (int64_t s = 0; s < num_segments; ++s) {
      const float* some = partials + s * stride;
      const Floats weight = exp2_of(splat(some[0] - top));
      for (int i = 0; i < 32; i += kLanes) store(sums + i, load(sums + i) + load(some + 2 + d + i) * weight);
    }
    write_head(sums, 1.0f / total, head_dim - d < 32 ? head_dim - d : 32, out + d);
  }
}

}  // namespace tandem

#else
#define TANDEM_DECODE 0
#endif
