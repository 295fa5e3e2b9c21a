// Attention of one row per sequence in bfloat16, limited by how fast keys and values come from memory.
//
// Keys are read in place, 64 at a time and once for all query heads of their group, while the next 64 are prefetched
// (by software and into L2: the hardware prefetcher cannot follow block tables, and L1 has too few fill buffers).
// Softmax, weights and the sum of values are float32. Even and odd dimensions have separate sums, [32 dimensions: 16
// even, 16 odd]: a 32-bit word of the cache holds one of each, and becomes two floats by a shift and a mask.
#pragma once

#include "decode_scores.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define TANDEM_DECODE 1

#include <algorithm>
#include <cfloat>
#include <optional>

namespace tandem {

constexpr int64_t kDecodeUnitHeads = 4;  // key-value heads of a unit of work: neighbours in memory

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

// Running softmax and sums of one key-value head's queries.
template <class Scores>
class DecodeHead {
 public:
  static size_t bytes(int64_t group, int64_t head_dim) {
    return Scores::bytes(group, head_dim) + Carver::bytes<float>(group * round_up(head_dim, 32)) +
           Carver::bytes<Floats>(group) + Carver::bytes<float>(group);
  }

  DecodeHead(Carver& carver, const Bfloat16* queries, int64_t group, int64_t head_dim, float scale)
      : head_dim_(head_dim),
        width_(round_up(head_dim, 32)),
        group_(group),
        scale_(scale * 1.44269504088896341f),  // base 2 in place of e
        scores_(carver, queries, group, head_dim) {
    out_ = carver.take<float>(group_ * width_);
    sums_ = carver.take<Floats>(group_);
    maxima_ = carver.take<float>(group_);
    std::fill_n(out_, group_ * width_, 0.0f);
    std::fill_n(sums_, group_, Floats{});
    std::fill_n(maxima_, group_, -FLT_MAX);  // finite: minus infinity less itself is NaN
  }

  // Takes `count` keys, of which those from `lowest` on are seen. `weights`: room for [group, kDecodeKeys]; `ahead`:
  // see the scores' classes.
  template <class Ahead>
  void attend(const Bfloat16* const* rows, int64_t value_offset, int64_t count, int64_t lowest, float* weights,
              Ahead& ahead) {
    weights_ = weights;
    value_offset_ = value_offset;
    scores_.score(rows, count, weights, ahead);
    for (int64_t g = 0; g < group_; ++g, ahead(kSoftenShare / group_)) soften(g, count, lowest);
    for (int64_t g = 0; g < group_; g += kDecodeHeads) {
      switch (std::min<int64_t>(group_ - g, kDecodeHeads)) {
        case 1: add_values<1>(g, rows, count, ahead); break;
        case 2: add_values<2>(g, rows, count, ahead); break;
        case 3: add_values<3>(g, rows, count, ahead); break;
        default: add_values<4>(g, rows, count, ahead);
      }
    }
  }

  void write(Bfloat16* out) const {
    for (int64_t g = 0; g < group_; ++g)
      write_head(out_ + g * width_, 1.0f / sum(sums_[g]), head_dim_, out + g * head_dim_);
  }

  // Maximum, sum of weights, weighted values of each query head, for `merge`.
  void write_partial(float* to) const {
    for (int64_t g = 0; g < group_; ++g, to += 2 + width_) {
      to[0] = maxima_[g];
      to[1] = sum(sums_[g]);
      std::copy_n(out_ + g * width_, width_, to + 2);
    }
  }

 private:
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

  template <int H, class Ahead>
  void add_values(int64_t head, const Bfloat16* const* rows, int64_t count, Ahead& ahead) {
    int64_t dim = 0;
    for (; dim + 64 <= head_dim_; dim += 64) add_values<H, 2>(head, dim, ~__mmask32(0), rows, count, ahead);
    for (; dim < head_dim_; dim += 32) add_values<H, 1>(head, dim, mask32(head_dim_ - dim), rows, count, ahead);
  }

  // Adds the weighted values of 32 N dimensions to the sums of H heads.
  template <int H, int N, class Ahead>
  void add_values(int64_t head, int64_t dim, __mmask32 dims, const Bfloat16* const* rows, int64_t count,
                  Ahead& ahead) {
    const int64_t offset = value_offset_ + dim;
    const float* weights = weights_ + head * kDecodeKeys;
    float* out = out_ + head * width_ + dim;
    const int64_t passes = ceil_div(group_, kDecodeHeads) * ceil_div(head_dim_, 32 * N);
    const int64_t share = std::max<int64_t>(kAddShare / (kDecodeKeys * passes), 1);
    Floats total[H][2 * N];
    for (int g = 0; g < H; ++g)
      for (int n = 0; n < 2 * N; ++n) total[g][n] = load(out + g * width_ + n * kLanes);
    for (int64_t i = 0; i < count; ++i) {
      ahead(share);
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

  int64_t head_dim_, width_, group_, value_offset_ = 0;
  float scale_;
  Scores scores_;
  float *out_, *maxima_, *weights_ = nullptr;
  Floats* sums_;
};

// Unit of work of one thread: adjacent key-value heads of one segment of one sequence.
struct DecodePart {
  int64_t single, segment, first_head, num_heads;

  static int64_t count(const AttentionStep& step) {
    return int64_t(step.num_singles) * step.num_segments * ceil_div(step.num_kv_heads, kDecodeUnitHeads);
  }

  static DecodePart at(const AttentionStep& step, int64_t index) {
    const int64_t units = ceil_div(step.num_kv_heads, kDecodeUnitHeads), part = index / units;
    const int64_t first = index % units * kDecodeUnitHeads;
    return {part / step.num_segments, part % step.num_segments, first,
            std::min<int64_t>(kDecodeUnitHeads, step.num_kv_heads - first)};
  }
};

// The keys of a part, 64 at a time: the visible 64s divided evenly among segments, in order. May be none.
class KeySpans {
 public:
  KeySpans(const AttentionStep& step, const AttentionLayer<Bfloat16>& layer, const DecodePart& part)
      : view_(step, layer.cache, part.single, part.first_head) {
    const int64_t length = step.starts[part.single] + 1;
    lowest_ = std::max<int64_t>(length - layer.window, 0);
    const int64_t first = lowest_ / kDecodeKeys, spans = (length + kDecodeKeys - 1) / kDecodeKeys - first;
    key_ = (first + spans * part.segment / step.num_segments) * kDecodeKeys;
    end_ = std::min<int64_t>((first + spans * (part.segment + 1) / step.num_segments) * kDecodeKeys, length);
  }

  // Addresses of the next keys of the first head; how many there are.
  int64_t take(const Bfloat16** rows, int64_t* lowest) {
    const int64_t count = std::max<int64_t>(std::min<int64_t>(kDecodeKeys, end_ - key_), 0);
    if (count > 0) view_.locate(key_, count, rows);
    *lowest = lowest_ - key_;
    key_ += count;
    return count;
  }

  int64_t value_offset() const { return view_.value_offset(); }

 private:
  HeadView<Bfloat16> view_;
  int64_t lowest_, key_, end_;
};

// Prefetches the next keys and values at an even pace, which keeps memory busy: a burst of prefetches would stall on
// fill buffers and then leave memory idle. Follows the order of addresses, not of use, since adjacent heads of a block
// are contiguous: sixteen keys of one head after the other.
class DecodePrefetch {
 public:
  explicit DecodePrefetch(const AttentionStep& step)
      : step_(step),
        head_dim_(step.head_dim),
        head_size_(int64_t(step.block_size) * head_dim_),
        value_offset_(step.num_kv_heads * head_size_) {}

  // Sets the keys, and the number of heads, to prefetch from now on.
  void begin(const Bfloat16* const* rows, int64_t count, int64_t num_heads) {
    rows_ = rows;
    count_ = count;
    num_heads_ = num_heads;
    first_ = head_ = key_ = credit_ = 0;
  }

  // The same for the first keys of another part, if there is one; `rows` is room for their addresses.
  void begin_part(const AttentionLayer<Bfloat16>& layer, int64_t index, const Bfloat16** rows) {
    if (index >= DecodePart::count(step_)) return;
    const DecodePart part = DecodePart::at(step_, index);
    int64_t lowest;
    const int64_t count = KeySpans(step_, layer, part).take(rows, &lowest);
    begin(rows, count, part.num_heads);
  }

  void operator()(int64_t sixteenths) {
    for (credit_ += sixteenths; credit_ >= 16 && first_ < count_; credit_ -= 16) {
      const Bfloat16* row = rows_[first_ + key_] + head_ * head_size_;
      for (int64_t d = 0; d < head_dim_; d += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(row + d), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(row + value_offset_ + d), _MM_HINT_T1);
      }
      if (++key_ < kLanes && first_ + key_ < count_) continue;
      key_ = 0;
      if (++head_ < num_heads_) continue;
      head_ = 0;
      first_ += kLanes;
    }
  }

 private:
  const AttentionStep& step_;
  int64_t head_dim_, head_size_, value_offset_;
  const Bfloat16* const* rows_ = nullptr;
  int64_t count_ = 0, num_heads_ = 0, first_ = 0, head_ = 0, key_ = 0, credit_ = 0;
};

// Results of a part, or its partial ones for `merge`.
template <class Heads>
void write_part(const AttentionStep& step, const AttentionLayer<Bfloat16>& layer, const DecodePart& part,
                const Heads& heads) {
  const int64_t group = step.num_heads / step.num_kv_heads, partial = group * (2 + round_up(step.head_dim, 32));
  for (int64_t h = 0; h < part.num_heads; ++h) {
    const int64_t head = part.first_head + h, row = step.first_rows[part.single];
    if (step.num_segments == 1) {
      heads[h]->write(layer.out + (row * step.num_heads + head * group) * step.head_dim);
      continue;
    }
    const int64_t where = (part.single * step.num_segments + part.segment) * step.num_kv_heads + head;
    heads[h]->write_partial(step.partials + where * partial);
  }
}

// Computes part `index` of the step while prefetching the part that this thread most likely takes next.
template <class Scores>
void attend_part(const AttentionStep& step, const AttentionLayer<Bfloat16>& layer, int64_t index) {
  const DecodePart part = DecodePart::at(step, index);
  const int64_t group = step.num_heads / step.num_kv_heads, head_dim = step.head_dim;
  const int64_t head_size = int64_t(step.block_size) * head_dim;
  Carver carver(scratch(part.num_heads * DecodeHead<Scores>::bytes(group, head_dim) +
                        Carver::bytes<float>(group * kDecodeKeys)));
  float* weights = carver.take<float>(group * kDecodeKeys);
  std::optional<DecodeHead<Scores>> heads[kDecodeUnitHeads];
  const Bfloat16* queries = layer.queries + step.first_rows[part.single] * layer.query_stride;
  for (int64_t h = 0; h < part.num_heads; ++h)
    heads[h].emplace(carver, queries + (part.first_head + h) * group * head_dim, group, head_dim, step.scale);
  KeySpans spans(step, layer, part);
  DecodePrefetch ahead(step);
  const Bfloat16* rows[2][kDecodeKeys];
  int64_t lowest[2], count = spans.take(rows[0], &lowest[0]);
  for (int side = 0; count > 0; side ^= 1) {
    const Bfloat16 **now = rows[side], **then = rows[side ^ 1];
    const int64_t next = spans.take(then, &lowest[side ^ 1]);
    if (next > 0)
      ahead.begin(then, next, part.num_heads);
    else
      ahead.begin_part(layer, index + step.num_threads, then);
    for (int64_t h = 0; h < part.num_heads; ++h) {
      heads[h]->attend(now, spans.value_offset(), count, lowest[side], weights, ahead);
      for (int64_t i = 0; i < count; ++i) now[i] += head_size;
    }
    count = next;
  }
  write_part(step, layer, part, heads);
}

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
