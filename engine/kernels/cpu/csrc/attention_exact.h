// Batch-invariant attention: each row is a fixed function of its own query and keys, whatever else is in the batch.
//
// Keys are processed sixteen at a time, in absolute order from position 0 up: scores by sums over even and odd
// dimensions, an online softmax (Milakov and Gimelshein, 2018) in float32, then the values one after the other. Rows
// share loads and never an accumulator, so a row alone and a row inside any chunk give the same bits. Keys that a row
// does not see have weight exactly zero: x + 0 * v is x, and a step that changes no maximum rescales by exactly 1.
// Needs finite values in every slot that the sequence has written; slots beyond its length are never read.
#pragma once

#include <cfloat>

#include "paged.h"
#include "rows.h"

namespace tandem {

constexpr int kExactRows = 4;  // rows, of any head of the group, computed together

template <class T>
class ExactUnit {
 public:
  struct ThreadState {};

  ExactUnit(const AttentionStep& step, const AttentionLayer<T>& layer, const int32_t* unit, int64_t kv_head)
      : layer_(layer),
        view_(step, layer.cache, unit[0], kv_head),
        head_dim_(step.head_dim),
        width_(round_up(step.head_dim, kLanes)),
        group_(step.num_heads / step.num_kv_heads),
        num_rows_(unit[2] * group_),
        first_position_(step.starts[unit[0]] + unit[1]),
        first_row_(step.first_rows[unit[0]] + unit[1]),
        column_(kv_head * group_ * step.head_dim),
        out_stride_(int64_t(step.num_heads) * step.head_dim) {
    const int64_t padded = round_up(num_rows_, kExactRows);
    Carver carver(scratch(Carver::bytes<float>(padded * width_) * 2 + Carver::bytes<Floats>(padded) +
                               Carver::bytes<float>(padded) + Carver::bytes<Words>(2 * width_)));
    queries_ = carver.take<float>(padded * width_);
    out_ = carver.take<float>(padded * width_);
    sums_ = carver.take<Floats>(padded);
    maxima_ = carver.take<float>(padded);
    keys_ = carver.take<Words>(width_);
    values_ = carver.take<float>(kLanes * width_);
    constexpr float kBase2 = 1.44269504088896341f;  // base 2 in place of e
    soft_cap_ = step.soft_cap * kBase2;
    start(padded, step.scale * kBase2);
  }

  void run() {
    const int64_t last = first_position_ + (num_rows_ - 1) / group_;
    const int64_t lowest = first_position_ - layer_.window + 1;
    for (int64_t key = lowest > 0 ? lowest / kLanes * kLanes : 0; key <= last; key += kLanes) {
      load_keys(key, last + 1 - key < kLanes ? last + 1 - key : kLanes);
      for (int64_t row = 0; row < num_rows_; row += kExactRows) attend(row, key);
    }
    finish();
  }

 private:
  void start(int64_t padded, float scale) {
    for (int64_t row = 0; row < padded; ++row) {
      const T* from = layer_.queries + (first_row_ + row / group_) * layer_.query_stride + column_ +
                      row % group_ * head_dim_;
      for (int64_t d = 0; d < width_; d += kLanes) {
        const Floats query = row < num_rows_ ? load_some(from + d, head_dim_ - d) : Floats{};
        store(queries_ + row * width_ + d, query * scale);
        store(out_ + row * width_ + d, Floats{});
      }
      sums_[row] = Floats{};
      maxima_[row] = -FLT_MAX;  // finite: minus infinity less itself is NaN
    }
  }

  // Sixteen keys as columns, their values as rows; zeros from `count` on.
  void load_keys(int64_t position, int64_t count) {
    const T* rows[kLanes];
    view_.locate(position, count, rows);
    for (int64_t d = 0; d < width_; d += kLanes) {
      Words* block = keys_ + d;
      for (int i = 0; i < kLanes; ++i) {
        const bool used = i < count;
        block[i] = used ? (Words)load_some(rows[i] + d, head_dim_ - d) : Words{};
        store(values_ + i * width_ + d,
              used ? load_some(rows[i] + view_.value_offset() + d, head_dim_ - d) : Floats{});
      }
      transpose(block);
    }
  }

  void attend(int64_t row, int64_t key) {
    Floats scores[kExactRows];
    alignas(64) float weights[kExactRows * kLanes];
    score(queries_ + row * width_, scores);
    float* out = out_ + row * width_;
    if (soft_cap_ > 0.0f)
      for (int r = 0; r < kExactRows; ++r) scores[r] = tanh_of(scores[r] / soft_cap_) * soft_cap_;
    for (int r = 0; r < kExactRows; ++r) {
      const int64_t position = first_position_ + (row + r) / group_;
      if (key + kLanes - 1 > position || key <= position - layer_.window) {
        const int32_t high = clamp(position - key), low = clamp(position - layer_.window - key);
        scores[r] = (kLaneIndex <= high) & (kLaneIndex > low) ? scores[r] : splat(-__builtin_inff());
      }
      store(weights + r * kLanes, soften(scores[r], row + r, out + r * width_));
    }
    for (int64_t d = 0; d < width_; d += 4 * kLanes) {
      switch ((width_ - d) / kLanes) {
        case 1: accumulate<1>(weights, values_ + d, out + d); break;
        case 2: accumulate<2>(weights, values_ + d, out + d); break;
        case 3: accumulate<3>(weights, values_ + d, out + d); break;
        default: accumulate<4>(weights, values_ + d, out + d);
      }
    }
  }

  static int32_t clamp(int64_t lane) { return lane < -1 ? -1 : lane > kLanes ? kLanes : int32_t(lane); }

  void score(const float* query, Floats* scores) const {
    Floats even[kExactRows] = {}, odd[kExactRows] = {};
    for (int64_t d = 0; d < width_; d += 2) {
      const Floats a = (Floats)keys_[d], b = (Floats)keys_[d + 1];
      for (int r = 0; r < kExactRows; ++r) {
        even[r] = fused(a, splat(query[r * width_ + d]), even[r]);
        odd[r] = fused(b, splat(query[r * width_ + d + 1]), odd[r]);
      }
    }
    for (int r = 0; r < kExactRows; ++r) scores[r] = even[r] + odd[r];
  }

  // Turns scores into weights; the row's partial sums are rescaled when its maximum rises.
  Floats soften(Floats scores, int64_t row, float* out) {
    const float highest = maximum(scores);
    if (highest > maxima_[row]) {
      const Floats shrink = exp2_of(splat(maxima_[row] - highest));
      for (int64_t d = 0; d < width_; d += kLanes) store(out + d, load(out + d) * shrink);
      sums_[row] *= shrink;
      maxima_[row] = highest;
    }
    const Floats weights = exp2_of(scores - maxima_[row]);
    sums_[row] += weights;
    return weights;
  }

  template <int N>
  void accumulate(const float* weights, const float* values, float* out) const {
    Floats total[kExactRows][N];
    for (int r = 0; r < kExactRows; ++r)
      for (int n = 0; n < N; ++n) total[r][n] = load(out + r * width_ + n * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      for (int r = 0; r < kExactRows; ++r)
        for (int n = 0; n < N; ++n)
          total[r][n] = fused(load(values + i * width_ + n * kLanes), splat(weights[r * kLanes + i]), total[r][n]);
    for (int r = 0; r < kExactRows; ++r)
      for (int n = 0; n < N; ++n) store(out + r * width_ + n * kLanes, total[r][n]);
  }

  void finish() const {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float inverse = 1.0f / sum(sums_[row]);
      T* to = layer_.out + (first_row_ + row / group_) * out_stride_ + column_ + row % group_ * head_dim_;
      for (int64_t d = 0; d < width_; d += kLanes)
        store_some(to + d, load(out_ + row * width_ + d) * inverse, head_dim_ - d);
    }
  }

  const AttentionLayer<T>& layer_;
  HeadView<T> view_;
  int64_t head_dim_, width_, group_, num_rows_, first_position_, first_row_, column_, out_stride_;
  float *queries_, *out_, *maxima_, *values_;
  float soft_cap_;  // of scores in base 2
  Floats* sums_;
  Words* keys_;
};

}  // namespace tandem
