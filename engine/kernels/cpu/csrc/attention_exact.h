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

constexpr int kExactRows = 4;                        // rows, of any head of the group, computed together at most
constexpr int kPass = kRegisterLanes == 16 ? 4 : 2;  // registers of a row's values that are summed together

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
      for (int64_t row = 0; row < num_rows_; row += kExactRows) {
        switch (num_rows_ - row) {
          case 1: attend<1>(row, key); break;
          case 2: attend<2>(row, key); break;
          case 3: attend<3>(row, key); break;
          default: attend<kExactRows>(row, key);
        }
      }
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
    transpose_keys(rows, count);
    for (int i = 0; i < kLanes; ++i) {
      float* to = values_ + i * width_;
      for (int64_t d = 0; d < width_; d += kRegisterLanes)
        store_register(to + d, i < count ? load_register_some(rows[i] + view_.value_offset() + d, head_dim_ - d)
                                         : Register{});
    }
  }

  void transpose_keys(const T* const* rows, int64_t count) {
#if TANDEM_REGISTER_BYTES == 32
    float* keys = reinterpret_cast<float*>(keys_);
    for (int64_t d = 0; d < width_; d += 8) {
      for (int first = 0; first < kLanes; first += 8) {
        Register block[8];
        for (int i = 0; i < 8; ++i)
          block[i] = first + i < count ? load_register_some(rows[first + i] + d, head_dim_ - d) : Register{};
        transpose8(block);
        for (int i = 0; i < 8; ++i) store_register(keys + (d + i) * kLanes + first, block[i]);
      }
    }
#else
    for (int64_t d = 0; d < width_; d += kLanes) {
      Words* block = keys_ + d;
      for (int i = 0; i < kLanes; ++i)
        block[i] = i < count ? (Words)load_some(rows[i] + d, head_dim_ - d) : Words{};
      transpose(block);
    }
#endif
  }

  template <int Rows>
  void attend(int64_t row, int64_t key) {
    alignas(64) float weights[Rows * kLanes];
    score<Rows>(queries_ + row * width_, weights);
    float* out = out_ + row * width_;
    if (soft_cap_ > 0.0f)
      for (int r = 0; r < Rows; ++r) cap(weights + r * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const int64_t position = first_position_ + (row + r) / group_;
      if (key + kLanes - 1 > position || key <= position - layer_.window)
        hide(weights + r * kLanes, clamp(position - layer_.window - key), clamp(position - key));
      soften(weights + r * kLanes, row + r, out + r * width_);
    }
    for (int64_t d = 0; d < width_; d += kPass * kRegisterLanes) {
      switch ((width_ - d) / kRegisterLanes) {
        case 1: accumulate<Rows, 1>(weights, values_ + d, out + d); break;
        case 2: accumulate<Rows, 2>(weights, values_ + d, out + d); break;
        case 3: accumulate<Rows, kPass < 3 ? kPass : 3>(weights, values_ + d, out + d); break;
        default: accumulate<Rows, kPass>(weights, values_ + d, out + d);
      }
    }
  }

  static int32_t clamp(int64_t lane) { return lane < -1 ? -1 : lane > kLanes ? kLanes : int32_t(lane); }

  // Never inlined, as `soften`.
  __attribute__((noinline)) void cap(float* scores) const {
    store(scores, tanh_of(load(scores) / soft_cap_) * soft_cap_);
  }

  // Leaves the scores of lanes above `low` up to `high`.
  static void hide(float* scores, int32_t low, int32_t high) {
    for (int32_t i = 0; i < kLanes; ++i) scores[i] = i > low && i <= high ? scores[i] : -__builtin_inff();
  }

  template <int Rows>
  void score(const float* query, float* scores) const {
    const float* keys = reinterpret_cast<const float*>(keys_);
    for (int part = 0; part < kRegisters; ++part, keys += kRegisterLanes, scores += kRegisterLanes) {
      Register even[Rows] = {}, odd[Rows] = {};
      for (int64_t d = 0; d < width_; d += 2) {
        const Register a = load_register(keys + d * kLanes), b = load_register(keys + (d + 1) * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          even[r] = fused_register(a, splat_register(query[r * width_ + d]), even[r]);
          odd[r] = fused_register(b, splat_register(query[r * width_ + d + 1]), odd[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) store_register(scores + r * kLanes, even[r] + odd[r]);
    }
  }

  // Turns scores into weights; the row's partial sums are rescaled when its maximum rises. Never inlined: every row has
  // the same instructions, however many are computed with it.
  __attribute__((noinline)) void soften(float* scores, int64_t row, float* out) {
    Register some[kRegisters];
    for (int i = 0; i < kRegisters; ++i) some[i] = load_register(scores + i * kRegisterLanes);
    const float highest = maximum(some);
    float* sums = reinterpret_cast<float*>(sums_ + row);
    if (highest > maxima_[row]) {
      const Register shrink = exp2_register(splat_register(maxima_[row] - highest));
      for (int64_t d = 0; d < width_; d += kRegisterLanes) store_register(out + d, load_register(out + d) * shrink);
      for (int i = 0; i < kLanes; i += kRegisterLanes) store_register(sums + i, load_register(sums + i) * shrink);
      maxima_[row] = highest;
    }
    for (int i = 0; i < kRegisters; ++i) {
      const Register weights = exp2_register(some[i] - maxima_[row]);
      store_register(sums + i * kRegisterLanes, load_register(sums + i * kRegisterLanes) + weights);
      store_register(scores + i * kRegisterLanes, weights);
    }
  }

  template <int Rows, int N>
  void accumulate(const float* weights, const float* values, float* out) const {
    Register total[Rows][N];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) total[r][n] = load_register(out + r * width_ + n * kRegisterLanes);
    for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const Register value = load_register(values + i * width_ + n * kRegisterLanes);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
          total[r][n] = fused_register(value, splat_register(weights[r * kLanes + i]), total[r][n]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store_register(out + r * width_ + n * kRegisterLanes, total[r][n]);
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
