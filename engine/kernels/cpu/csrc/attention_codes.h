// Attention of one row per sequence over coded keys and values, read in place; queries, sums and results are float32.
//
// 64 keys at a time, once for all query heads of their group. A key's scale is applied to its score, a value's to its
// weight: codes are multiplied as they are. Where codes count from a minimum, it meets the sum of the query, or of the
// weights, once per group of values. For scores, sixteen keys are transposed as words of four or eight codes, which are
// then widened column by column; the next 64 keys are prefetched meanwhile.
#pragma once

#include <algorithm>
#include <cfloat>

#include "codes.h"
#include "paged.h"

namespace tandem {

// One step, shared by all layers; the field order is repeated in engine/kernels/cpu/attention_codes.py.
struct CodesStep {
  const int32_t* tables;   // [num_singles, table_stride] block ids
  const int32_t* lengths;  // [num_singles] tokens, the row's own included
  float* partials;         // [num_singles * num_segments, num_heads, 2 + head_dim rounded up to 16]
  int64_t num_singles, num_segments, table_stride, num_heads, num_kv_heads, head_dim, block_size, num_threads;
  float scale;
};

constexpr int64_t kSpanKeys = 64;
constexpr int64_t kPairedBytes = 32;  // lines so short are transposed two in a row
constexpr int kCodesHeads = 4;  // heads whose sums are in registers at once

template <class T, class Codes>
class CodesUnit {
 public:
  CodesUnit(const CodesStep& step, const CodedLayer& layer, const T* queries, int64_t sequence, int64_t kv_head,
            int64_t segment, int64_t window)
      : layer_(layer),
        table_(step.tables + sequence * step.table_stride),
        head_dim_(step.head_dim),
        block_size_(step.block_size),
        value_lines_(step.num_kv_heads * step.block_size),
        head_line_(kv_head * step.block_size),
        line_bytes_(Codes::line_bytes(step.head_dim)),
        num_groups_(Codes::num_groups(step.head_dim)),
        width_(round_up(step.head_dim, Codes::kChunk)),
        query_width_(round_up(step.head_dim, 64)),
        group_(step.num_heads / step.num_kv_heads) {
    carve();
    const float scale = step.scale * 1.44269504088896341f;  // base 2 in place of e
    for (int64_t g = 0; g < group_; ++g)
      for (int64_t d = 0; d < query_width_; d += kLanes)
        store(queries_ + g * query_width_ + d, load_some(queries + g * head_dim_ + d, clamp(head_dim_ - d)) * scale);
    if constexpr (Codes::kHasMinimum) {
      for (int64_t i = 0; i < group_ * num_groups_; ++i) {
        const float* some = queries_ + i / num_groups_ * query_width_ + i % num_groups_ * Codes::kGroup;
        query_sums_[i] = sum(load(some) + load(some + 16) + (load(some + 32) + load(some + 48)));
      }
      std::fill_n(offsets_, group_ * num_groups_, Floats{});
    }
    std::fill_n(out_, group_ * width_, 0.0f);
    std::fill_n(sums_, group_, Floats{});
    std::fill_n(maxima_, group_, -FLT_MAX);  // finite: minus infinity less itself is NaN
    find_range(step.lengths[sequence], window, segment, step.num_segments);
  }

  void run() {
    int64_t key = begin_;
    locate(key, spans_[0]);
    for (int side = 0; spans_[side].count > 0; side ^= 1) {
      const int64_t count = spans_[side].count;
      locate(key + count, spans_[side ^ 1]);
      attend(spans_[side], spans_[side ^ 1], lowest_ - key);
      key += count;
    }
    if constexpr (Codes::kHasMinimum) add_offsets();
  }

  void write(T* out) const {
    for (int64_t g = 0; g < group_; ++g) {
      const float inverse = 1.0f / sum(sums_[g]);
      for (int64_t d = 0; d < head_dim_; d += kLanes)
        store_some(out + g * head_dim_ + d, load(out_ + g * width_ + d) * inverse, head_dim_ - d);
    }
  }

  // Maximum, sum of weights, weighted values of each head, for `merge_parts`.
  void write_partial(float* to) const {
    const int64_t width = round_up(head_dim_, kLanes);
    for (int64_t g = 0; g < group_; ++g, to += 2 + width) {
      to[0] = maxima_[g];
      to[1] = sum(sums_[g]);
      std::copy_n(out_ + g * width_, width, to + 2);
    }
  }

 private:
  struct Span {
    int64_t count = 0;
    const uint8_t* keys[kSpanKeys];
    const uint8_t* values[kSpanKeys];
    uint32_t* key_scales;  // [num_groups, kSpanKeys]
    uint32_t* value_scales;
  };

  // One reservation of this thread's scratch memory, divided.
  void carve() {
    const int64_t heads = group_, parts = heads * num_groups_, scales = num_groups_ * kSpanKeys;
    const int64_t columns = round_up(line_bytes_, 64) / 4;
    Carver carver(scratch(Carver::bytes<float>(heads * query_width_) + Carver::bytes<float>(heads * width_) +
                          Carver::bytes<float>(parts * kSpanKeys) + Carver::bytes<Floats>(heads) +
                          Carver::bytes<float>(heads) + Carver::bytes<Words>(columns) + Carver::bytes<float>(parts) +
                          Carver::bytes<Floats>(parts) + 4 * Carver::bytes<uint32_t>(scales)));
    queries_ = carver.take<float>(heads * query_width_);
    out_ = carver.take<float>(heads * width_);
    weights_ = carver.take<float>(parts * kSpanKeys);
    sums_ = carver.take<Floats>(heads);
    maxima_ = carver.take<float>(heads);
    columns_ = carver.take<Words>(columns);
    query_sums_ = carver.take<float>(parts);
    offsets_ = carver.take<Floats>(parts);
    for (Span& span : spans_) {
      span.key_scales = carver.take<uint32_t>(scales);
      span.value_scales = carver.take<uint32_t>(scales);
    }
  }

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
      const uint8_t* codes = layer_.codes + table_[block] * layer_.code_stride + line * line_bytes_;
      const uint32_t* scales = layer_.scales + table_[block] * layer_.scale_stride + line * num_groups_;
      copy_scales(scales, some, span.key_scales + i);
      copy_scales(scales + value_lines_ * num_groups_, some, span.value_scales + i);
      for (int64_t end = i + some; i < end; ++i, codes += line_bytes_) {
        span.keys[i] = codes;
        span.values[i] = codes + value_lines_ * line_bytes_;
      }
    }
    for (int64_t g = 0; g < num_groups_; ++g) {
      std::fill(span.key_scales + g * kSpanKeys + span.count, span.key_scales + (g + 1) * kSpanKeys, 0);
      std::fill(span.value_scales + g * kSpanKeys + span.count, span.value_scales + (g + 1) * kSpanKeys, 0);
    }
  }

  // From [count, num_groups] to [num_groups, kSpanKeys].
  void copy_scales(const uint32_t* from, int64_t count, uint32_t* to) const {
    if (num_groups_ == 1) {
      std::copy_n(from, count, to);
      return;
    }
    for (int64_t g = 0; g < num_groups_; ++g)
      for (int64_t i = 0; i < count; ++i) to[g * kSpanKeys + i] = from[i * num_groups_ + g];
  }

  void attend(const Span& span, const Span& next, int64_t lowest) {
    const int64_t together = line_bytes_ > kPairedBytes ? 1 : 2;
    for (int64_t k = 0; k < span.count; k += kLanes) {
      prefetch(next.keys, k, next.count);
      const int64_t part = k / kLanes % together;
      if (part == 0) transpose_keys(span.keys + k, span.count - k);
      const Words* columns = columns_ + part * kPairedBytes / 4;
      for (int64_t g = 0; g < group_; g += kCodesHeads) {
        switch (std::min<int64_t>(group_ - g, kCodesHeads)) {
          case 1: score<1>(g, columns, span.key_scales + k, weights_ + k); break;
          case 2: score<2>(g, columns, span.key_scales + k, weights_ + k); break;
          case 3: score<3>(g, columns, span.key_scales + k, weights_ + k); break;
          default: score<4>(g, columns, span.key_scales + k, weights_ + k);
        }
      }
    }
    for (int64_t g = 0; g < group_; ++g) soften(g, span, lowest);
    for (int64_t k = 0; k < next.count; k += kLanes) prefetch(next.values, k, next.count);
    for (int64_t g = 0; g < group_; g += kCodesHeads) {
      switch (std::min<int64_t>(group_ - g, kCodesHeads)) {
        case 1: add_values<1>(g, span); break;
        case 2: add_values<2>(g, span); break;
        case 3: add_values<3>(g, span); break;
        default: add_values<4>(g, span);
      }
    }
  }

  void prefetch(const uint8_t* const* rows, int64_t first, int64_t count) const {
    for (int64_t i = first; i < std::min<int64_t>(first + kLanes, count); ++i)
      for (int64_t b = 0; b < line_bytes_; b += 64) __builtin_prefetch(rows[i] + b, 0, 2);
  }

  // Sixteen keys as columns of words of codes, or twice sixteen where these are short; zeros from `count` on.
  void transpose_keys(const uint8_t* const* rows, int64_t count) {
    if (line_bytes_ <= kPairedBytes) {
      for (int i = 0; i < kLanes; ++i) {
        columns_[i] = Words{};
        char* row = reinterpret_cast<char*>(columns_ + i);
        if (i < count) copy_short(rows[i], row);
        if (i + kLanes < count) copy_short(rows[i + kLanes], row + kPairedBytes);
      }
      transpose(columns_);
      return;
    }
    for (int64_t b = 0; b < line_bytes_; b += 64) {
      Words* block = columns_ + b / 4;
      for (int i = 0; i < kLanes; ++i) block[i] = i < count ? load_bytes(rows[i] + b, line_bytes_ - b) : Words{};
      transpose(block);
    }
  }

  void copy_short(const uint8_t* line, char* to) const {
    if (line_bytes_ == kPairedBytes)
      std::memcpy(to, line, kPairedBytes);
    else
      std::memcpy(to, line, size_t(line_bytes_));
  }

  // Up to 64 bytes, four to a word; zeros from `count` on.
  static Words load_bytes(const uint8_t* from, int64_t count) {
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
  void score(int64_t head, const Words* columns, const uint32_t* scales, float* scores) const {
    const float* queries = queries_ + head * query_width_;
    const int64_t num_words = ceil_div(head_dim_, Codes::kPerWord);
    Floats totals[H] = {};
    for (int64_t g = 0, w = 0; g < num_groups_; ++g) {
      Floats sums[H][4] = {};
      for (const int64_t end = std::min(w + Codes::kGroup / Codes::kPerWord, num_words); w < end; ++w) {
        for (int c = 0; c < Codes::kPerWord; ++c) {
          const Floats codes = Codes::unpack(columns[w], c);
          for (int h = 0; h < H; ++h)
            sums[h][c % 4] = fused(codes, splat(queries[h * query_width_ + Codes::kPerWord * w + c]), sums[h][c % 4]);
        }
      }
      const Words words = load_words(scales + g * kSpanKeys);
      for (int h = 0; h < H; ++h) {
        const Floats total = sums[h][0] + sums[h][1] + (sums[h][2] + sums[h][3]);
        totals[h] = fused(total, Codes::scale(words), totals[h]);
        if constexpr (Codes::kHasMinimum)
          totals[h] = fused(splat(query_sums_[(head + h) * num_groups_ + g]), Codes::minimum(words), totals[h]);
      }
    }
    for (int h = 0; h < H; ++h) store(scores + (head + h) * num_groups_ * kSpanKeys, totals[h]);
  }

  // Turns scores into weights, times the values' scales; the head's partial sums are rescaled when its maximum rises.
  void soften(int64_t head, const Span& span, int64_t lowest) {
    float* scores = weights_ + head * num_groups_ * kSpanKeys;
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
      if constexpr (Codes::kHasMinimum)
        for (int64_t g = 0; g < num_groups_; ++g) offsets_[head * num_groups_ + g] *= shrink;
      maxima_[head] = top;
    }
    for (int i = 0; i < kSpanKeys / kLanes; ++i) {
      const Floats weights = exp2_of(some[i] - top);
      sums_[head] += weights;
      for (int64_t g = 0; g < num_groups_; ++g) {
        const Words words = load_words(span.value_scales + g * kSpanKeys + i * kLanes);
        store(scores + g * kSpanKeys + i * kLanes, weights * Codes::scale(words));
        if constexpr (Codes::kHasMinimum) {
          Floats& offset = offsets_[head * num_groups_ + g];
          offset = fused(weights, Codes::minimum(words), offset);
        }
      }
    }
  }

  template <int H>
  void add_values(int64_t head, const Span& span) {
    int64_t dim = 0;
    for (; dim + 4 * kLanes <= head_dim_; dim += 4 * kLanes) add_values<H, 4>(head, dim, span);
    for (; dim < head_dim_; dim += Codes::kChunk) add_values<H, Codes::kChunk / kLanes>(head, dim, span);
  }

  template <int H, int N>
  void add_values(int64_t head, int64_t dim, const Span& span) {
    const float* weights = weights_ + (head * num_groups_ + dim / Codes::kGroup) * kSpanKeys;
    float* out = out_ + head * width_ + dim;
    Floats total[H][N];
    for (int h = 0; h < H; ++h)
      for (int n = 0; n < N; ++n) total[h][n] = load(out + h * width_ + n * kLanes);
    for (int64_t i = 0; i < span.count; ++i) {
      Floats codes[N];
      Codes::template load_codes<N>(span.values[i], dim, head_dim_, codes);
      for (int h = 0; h < H; ++h) {
        const Floats weight = splat(weights[h * num_groups_ * kSpanKeys + i]);
        for (int n = 0; n < N; ++n) total[h][n] = fused(codes[n], weight, total[h][n]);
      }
    }
    for (int h = 0; h < H; ++h)
      for (int n = 0; n < N; ++n) store(out + h * width_ + n * kLanes, total[h][n]);
  }

  // Brings the sums into the order of the values, and adds what their minima contribute.
  void add_offsets() {
    for (int64_t g = 0; g < group_; ++g)
      for (int64_t d = 0; d < head_dim_; d += Codes::kChunk) {
        float* out = out_ + g * width_ + d;
        Floats some[2] = {load(out), load(out + kLanes)};
        Codes::order(some);
        const float offset = sum(offsets_[g * num_groups_ + d / Codes::kGroup]);
        store(out, some[0] + offset);
        store(out + kLanes, some[1] + offset);
      }
  }

  const CodedLayer& layer_;
  const int32_t* table_;
  int64_t head_dim_, block_size_;
  int64_t value_lines_;  // from a key to its value, in lines
  int64_t head_line_;    // the head's first line within a block
  int64_t line_bytes_, num_groups_;
  int64_t width_, query_width_, group_;
  int64_t lowest_, begin_, end_;
  float *queries_, *out_, *maxima_;
  float* weights_;     // [group, num_groups, kSpanKeys]
  float* query_sums_;  // [group, num_groups] sums of the queries' values
  Floats* offsets_;    // [group, num_groups] sums of weighted minima
  Floats* sums_;
  Words* columns_;
  Span spans_[2];
};

// One head's output from its segments' partial results, `stride` floats apart.
template <class T>
void merge_parts(const float* partials, int64_t num_segments, int64_t stride, int64_t head_dim, T* out) {
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
