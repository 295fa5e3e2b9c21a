// Attention of one row per sequence over int8 keys and values, read in place; queries, sums and results are float32.
//
// 64 keys at a time, once for all query heads of their group. A key's scale is applied to its score, a value's to its
// weight: codes are multiplied as they are. For scores, sixteen keys are transposed as words of four codes, which are
// then widened column by column; the next 64 keys are prefetched meanwhile.
#pragma once

#include <algorithm>
#include <cfloat>

#include "codes.h"
#include "paged.h"

namespace tandem {

// One step, shared by all layers; the field order is repeated in engine/kernels/cpu/attention_int8.py.
struct Int8Step {
  const int32_t* tables;   // [num_singles, table_stride] block ids
  const int32_t* lengths;  // [num_singles] tokens, the row's own included
  float* partials;         // [num_singles * num_segments, num_heads, 2 + head_dim rounded up to 16]
  int64_t num_singles, num_segments, table_stride, num_heads, num_kv_heads, head_dim, block_size, num_threads;
  float scale;
};

constexpr int64_t kSpanKeys = 64;
constexpr int kInt8Heads = 4;  // heads whose sums are in registers at once

template <class T>
class Int8Unit {
 public:
  Int8Unit(const Int8Step& step, const Int8Layer& layer, const T* queries, int64_t sequence, int64_t kv_head,
           int64_t segment, int64_t window)
      : layer_(layer),
        table_(step.tables + sequence * step.table_stride),
        head_dim_(step.head_dim),
        block_size_(step.block_size),
        value_lines_(step.num_kv_heads * step.block_size),
        head_line_(kv_head * step.block_size),
        width_(round_up(step.head_dim, kLanes)),
        query_width_(round_up(step.head_dim, 64)),
        group_(step.num_heads / step.num_kv_heads) {
    Carver carver(scratch(Carver::bytes<float>(group_ * query_width_) + Carver::bytes<float>(group_ * width_) +
                          Carver::bytes<float>(group_ * kSpanKeys) + Carver::bytes<Floats>(group_) +
                          Carver::bytes<float>(group_) + Carver::bytes<Words>(query_width_ / 4)));
    queries_ = carver.take<float>(group_ * query_width_);
    out_ = carver.take<float>(group_ * width_);
    weights_ = carver.take<float>(group_ * kSpanKeys);
    sums_ = carver.take<Floats>(group_);
    maxima_ = carver.take<float>(group_);
    columns_ = carver.take<Words>(query_width_ / 4);
    const float scale = step.scale * 1.44269504088896341f;  // base 2 in place of e
    for (int64_t g = 0; g < group_; ++g)
      for (int64_t d = 0; d < query_width_; d += kLanes)
        store(queries_ + g * query_width_ + d, load_some(queries + g * head_dim_ + d, clamp(head_dim_ - d)) * scale);
    std::fill_n(out_, group_ * width_, 0.0f);
    std::fill_n(sums_, group_, Floats{});
    std::fill_n(maxima_, group_, -FLT_MAX);  // finite: minus infinity less itself is NaN
    find_range(step.lengths[sequence], window, segment, step.num_segments);
  }

  void run() {
    Span spans[2];
    int64_t key = begin_;
    locate(key, spans[0]);
    for (int side = 0; spans[side].count > 0; side ^= 1) {
      const int64_t count = spans[side].count;
      locate(key + count, spans[side ^ 1]);
      attend(spans[side], spans[side ^ 1], lowest_ - key);
      key += count;
    }
  }

  void write(T* out) const {
    for (int64_t g = 0; g < group_; ++g) {
      const float inverse = 1.0f / sum(sums_[g]);
      for (int64_t d = 0; d < head_dim_; d += kLanes)
        store_some(out + g * head_dim_ + d, load(out_ + g * width_ + d) * inverse, head_dim_ - d);
    }
  }

  // Maximum, sum of weights, weighted values of each head, for `merge_int8`.
  void write_partial(float* to) const {
    for (int64_t g = 0; g < group_; ++g, to += 2 + width_) {
      to[0] = maxima_[g];
      to[1] = sum(sums_[g]);
      std::copy_n(out_ + g * width_, width_, to + 2);
    }
  }

 private:
  struct Span {
    int64_t count = 0;
    const int8_t* keys[kSpanKeys];
    const int8_t* values[kSpanKeys];
    alignas(64) float key_scales[kSpanKeys];
    alignas(64) float value_scales[kSpanKeys];
  };

  static int64_t clamp(int64_t count) { return count < 0 ? 0 : count; }

  // The visible 64s divided evenly, in order. May be none.
  void find_range(int64_t length, int64_t window, int64_t segment, int64_t num_segments) {
    lowest_ = std::max<int64_t>(length - window, 0);
    const int64_t first = lowest_ / kSpanKeys, spans = ceil_div(length, kSpanKeys) - first;
    begin_ = (first + spans * segment / num_segments) * kSpanKeys;
    end_ = std::min((first + spans * (segment + 1) / num_segments) * kSpanKeys, length);
  }

  // Up to 64 keys from `key`: where they lie, and their scales, zeros beyond the last.
  void locate(int64_t key, Span& span) const {
    span.count = std::min(kSpanKeys, clamp(end_ - key));
    int64_t block = key / block_size_, offset = key % block_size_;
    for (int64_t i = 0; i < span.count; ++block, offset = 0) {
      const int64_t line = head_line_ + offset, some = std::min(span.count - i, block_size_ - offset);
      const int8_t* codes = layer_.codes + table_[block] * layer_.code_stride + line * head_dim_;
      const float* scales = layer_.scales + table_[block] * layer_.scale_stride + line;
      std::copy_n(scales, some, span.key_scales + i);
      std::copy_n(scales + value_lines_, some, span.value_scales + i);
      for (int64_t end = i + some; i < end; ++i, codes += head_dim_) {
        span.keys[i] = codes;
        span.values[i] = codes + value_lines_ * head_dim_;
      }
    }
    std::fill(span.key_scales + span.count, span.key_scales + kSpanKeys, 0.0f);
    std::fill(span.value_scales + span.count, span.value_scales + kSpanKeys, 0.0f);
  }

  void attend(const Span& span, const Span& next, int64_t lowest) {
    for (int64_t k = 0; k < span.count; k += kLanes) {
      prefetch(next.keys, k, next.count);
      transpose_keys(span.keys + k, std::min<int64_t>(kLanes, span.count - k));
      const Floats scales = load(span.key_scales + k);
      for (int64_t g = 0; g < group_; g += kInt8Heads) {
        switch (std::min<int64_t>(group_ - g, kInt8Heads)) {
          case 1: score<1>(g, scales, weights_ + k); break;
          case 2: score<2>(g, scales, weights_ + k); break;
          case 3: score<3>(g, scales, weights_ + k); break;
          default: score<4>(g, scales, weights_ + k);
        }
      }
    }
    for (int64_t g = 0; g < group_; ++g) soften(g, span, lowest);
    for (int64_t k = 0; k < next.count; k += kLanes) prefetch(next.values, k, next.count);
    for (int64_t g = 0; g < group_; g += kInt8Heads) {
      switch (std::min<int64_t>(group_ - g, kInt8Heads)) {
        case 1: add_values<1>(g, span); break;
        case 2: add_values<2>(g, span); break;
        case 3: add_values<3>(g, span); break;
        default: add_values<4>(g, span);
      }
    }
  }

  void prefetch(const int8_t* const* rows, int64_t first, int64_t count) const {
    for (int64_t i = first; i < std::min<int64_t>(first + kLanes, count); ++i)
      for (int64_t d = 0; d < head_dim_; d += 64) __builtin_prefetch(rows[i] + d, 0, 2);
  }

  // Sixteen keys as columns of words, four codes each; zeros from `count` on.
  void transpose_keys(const int8_t* const* rows, int64_t count) {
    for (int64_t d = 0; d < head_dim_; d += 64) {
      Words* block = columns_ + d / 4;
      for (int i = 0; i < kLanes; ++i) block[i] = i < count ? load_words(rows[i] + d, head_dim_ - d) : Words{};
      transpose(block);
    }
  }

  // Up to 64 codes, four to a word; zeros from `count` on.
  static Words load_words(const int8_t* from, int64_t count) {
    Words words = {};
#if defined(__AVX512BW__)
    if (count < 64) return (Words)_mm512_maskz_loadu_epi8((__mmask64(1) << count) - 1, from);
#endif
    if (count >= 64)
      std::memcpy(&words, from, sizeof words);
    else
      std::memcpy(&words, from, size_t(count));
    return words;
  }

  template <int H>
  void score(int64_t head, Floats scales, float* scores) const {
    Floats sums[H][4] = {};
    const float* queries = queries_ + head * query_width_;
    const int64_t num_words = ceil_div(head_dim_, 4);
    for (int64_t w = 0; w < num_words; ++w) {
      const Ints word = (Ints)columns_[w];
      const Floats codes[4] = {
          __builtin_convertvector((word << 24) >> 24, Floats), __builtin_convertvector((word << 16) >> 24, Floats),
          __builtin_convertvector((word << 8) >> 24, Floats), __builtin_convertvector(word >> 24, Floats)};
      for (int h = 0; h < H; ++h)
        for (int c = 0; c < 4; ++c)
          sums[h][c] = fused(codes[c], splat(queries[h * query_width_ + 4 * w + c]), sums[h][c]);
    }
    for (int h = 0; h < H; ++h)
      store(scores + (head + h) * kSpanKeys, (sums[h][0] + sums[h][1] + (sums[h][2] + sums[h][3])) * scales);
  }

  // Turns scores into weights, times the values' scales; the head's partial sums are rescaled when its maximum rises.
  void soften(int64_t head, const Span& span, int64_t lowest) {
    float* scores = weights_ + head * kSpanKeys;
    const int32_t low = int32_t(std::max<int64_t>(lowest, 0)), high = int32_t(span.count);
    Floats some[kSpanKeys / kLanes], highest = splat(-__builtin_inff());
    for (int i = 0; i < kSpanKeys / kLanes; ++i) {
      const Ints lanes = kLaneIndex + i * kLanes;
      some[i] = (lanes < high) & (lanes >= low) ? load(scores + i * kLanes) : splat(-__builtin_inff());
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
    for (int i = 0; i < kSpanKeys / kLanes; ++i) {
      const Floats weights = exp2_of(some[i] - top);
      sums_[head] += weights;
      store(scores + i * kLanes, weights * load(span.value_scales + i * kLanes));
    }
  }

  template <int H>
  void add_values(int64_t head, const Span& span) {
    int64_t dim = 0;
    for (; dim + 4 * kLanes <= head_dim_; dim += 4 * kLanes) add_values<H, 4>(head, dim, span);
    for (; dim < head_dim_; dim += kLanes) add_values<H, 1>(head, dim, span);
  }

  template <int H, int N>
  void add_values(int64_t head, int64_t dim, const Span& span) {
    const float* weights = weights_ + head * kSpanKeys;
    float* out = out_ + head * width_ + dim;
    const int64_t lanes = head_dim_ - dim;
    Floats total[H][N];
    for (int h = 0; h < H; ++h)
      for (int n = 0; n < N; ++n) total[h][n] = load(out + h * width_ + n * kLanes);
    for (int64_t i = 0; i < span.count; ++i) {
      for (int n = 0; n < N; ++n) {
        const int8_t* from = span.values[i] + dim + n * kLanes;
        const Floats codes = N > 1 ? load_codes(from) : load_codes(from, lanes);
        for (int h = 0; h < H; ++h)
          total[h][n] = fused(codes, splat(weights[h * kSpanKeys + i]), total[h][n]);
      }
    }
    for (int h = 0; h < H; ++h)
      for (int n = 0; n < N; ++n) store(out + h * width_ + n * kLanes, total[h][n]);
  }

  const Int8Layer& layer_;
  const int32_t* table_;
  int64_t head_dim_, block_size_;
  int64_t value_lines_;  // from a key to its value, in lines of head_dim codes
  int64_t head_line_;    // the head's first line within a block
  int64_t width_, query_width_, group_;
  int64_t lowest_, begin_, end_;
  float *queries_, *out_, *weights_, *maxima_;
  Floats* sums_;
  Words* columns_;
};

// One head's output from its segments' partial results, `stride` floats apart.
template <class T>
void merge_int8(const float* partials, int64_t num_segments, int64_t stride, int64_t head_dim, T* out) {
  float top = -FLT_MAX, total = 0.0f;
  for (int64_t s = 0; s < num_segments; ++s) top = std::max(top, partials[s * stride]);
  for (int64_t s = 0; s < num_segments; ++s)
    total += exp2_of(splat(partials[s * stride] - top))[0] * partials[s * stride + 1];
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Floats sums = {};
    for (int64_t s = 0; s < num_segments; ++s) {
      const float* some = partials + s * stride;
      sums += load(some + 2 + d) * exp2_of(splat(some[0] - top));
    }
    store_some(out + d, sums * (1.0f / total), head_dim - d);
  }
}

}  // namespace tandem
