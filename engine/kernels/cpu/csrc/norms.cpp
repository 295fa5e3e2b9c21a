// Operators of the model families that need more than an RMSNorm before a projection and SwiGLU: other norms, norms in
// place, GELU's gate, soft caps. As in elementwise.cpp, everything is computed in float32 and rounded once.
#include "rows.h"
#include "tile_rows.h"

namespace tandem {
namespace {

// The numbers are those of engine/kernels/cpu/norms.py: NormMode.
enum NormMode : int64_t {
  kRms = 0,    // to unit root mean square
  kLayer = 1,  // to zero mean and unit variance
  kNone = 2,   // as it is
};

// One norm of a model; the field order is repeated in engine/kernels/cpu/norms.py.
struct Norm {
  const void* weight;  // [groups, size]; null with kNone
  const void* bias;    // [size], or null
  int64_t mode;
  int64_t size;
  int64_t groups;  // of neighbouring values of a row, each normed by itself
  int64_t threads;
  float eps;
};

struct Scaling {
  float mean, factor;
};

template <class T>
TANDEM_INLINE Scaling scaling_of(const Norm& norm, const T* row) {
  if (norm.mode == kNone) return {0.0f, 1.0f};
  if (norm.mode == kRms) return {0.0f, inverse_rms(row, norm.size, norm.eps)};
  Floats sums[2] = {}, squares[2] = {};
  for (int64_t i = 0, side = 0; i < norm.size; i += kLanes, side ^= 1) sums[side] += load_some(row + i, norm.size - i);
  const float mean = sum(sums[0] + sums[1]) / float(norm.size);
  for (int64_t i = 0, side = 0; i < norm.size; i += kLanes, side ^= 1) {
    const Floats x = load_some(row + i, norm.size - i) - mean;
    const Floats inside = kLaneIndex < int32_t(std::min<int64_t>(norm.size - i, kLanes)) ? x : Floats{};
    squares[side] = fused(inside, inside, squares[side]);
  }
  return {mean, inverse_rms(squares[0], squares[1], norm.size, norm.eps)};
}

// Sixteen values from `at` on of a row, normed; the last ones of a row may be fewer.
template <class T>
TANDEM_INLINE Floats normed(const Norm& norm, const T* row, int64_t at, Scaling scaling, int64_t group = 0) {
  const int64_t count = norm.size - at;
  const Floats x = load_some(row + at, count);
  if (norm.mode == kNone) return x;
  const T *weight = static_cast<const T*>(norm.weight) + group * norm.size, *bias = static_cast<const T*>(norm.bias);
  const Floats scaled = (x - scaling.mean) * scaling.factor * load_some(weight + at, count);
  return bias == nullptr ? scaled : scaled + load_some(bias + at, count);
}

template <class T>
TANDEM_INLINE void add(T* total, const T* change, int64_t size) {
  if (change == nullptr) return;
  for (int64_t i = 0; i < size; i += kLanes)
    store_some(total + i, load_some(total + i, size - i) + load_some(change + i, size - i), size - i);
}

template <class T>
void add_norm(const Norm& norm, T* residual, int64_t stride, const T* delta, T* out, int64_t num_rows) {
  for_rows(num_rows, norm.size, norm.threads, [&](int64_t row) {
    T* total = residual + row * stride;
    add(total, delta == nullptr ? nullptr : delta + row * norm.size, norm.size);
    const Scaling scaling = scaling_of(norm, total);
    for (int64_t i = 0; i < norm.size; i += kLanes)
      store_some(out + row * norm.size + i, normed(norm, total, i, scaling), norm.size - i);
  });
}

// Where two vectors of a row, from element 32 `step` on, belong in tiles.
TANDEM_INLINE Bfloat16* in_tile(const TileRows& out, int64_t row, int64_t step) {
  return reinterpret_cast<Bfloat16*>(out.tile(row / kTileRows * kTileRows, step) + row % kTileRows * kTileRowBytes);
}

void add_norm_to_tiles(const Norm& norm, Bfloat16* residual, int64_t stride, const Bfloat16* delta,
                       const TileRows& out) {
  for_rows(out.rows, norm.size, norm.threads, [&](int64_t row) {
    Bfloat16* total = residual + row * stride;
    add(total, delta == nullptr ? nullptr : delta + row * norm.size, norm.size);
    const Scaling scaling = scaling_of(norm, total);
    for (int64_t step = 0; step < out.steps; ++step) {
      const int64_t at = step * 2 * kLanes;
      store_two(in_tile(out, row, step), normed(norm, total, at, scaling), normed(norm, total, at + kLanes, scaling));
    }
  });
}

template <class T>
void norm_groups(const Norm& norm, T* rows, int64_t stride, int64_t num_rows) {
  for_rows(num_rows, norm.groups * norm.size, norm.threads, [&](int64_t row) {
    for (int64_t group = 0; group < norm.groups; ++group) {
      T* values = rows + row * stride + group * norm.size;
      const Scaling scaling = scaling_of(norm, values);
      for (int64_t i = 0; i < norm.size; i += kLanes)
        store_some(values + i, normed(norm, values, i, scaling, group), norm.size - i);
    }
  });
}

// x times the approximate distribution function of the normal distribution (Hendrycks and Gimpel, 2016), whose
// (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)).
TANDEM_INLINE Floats gelu(Floats x) {
  const Floats u = x * (0.0447149984538555145f * x * x + 1.0f) * 0.797884560802865356f;
  const Floats exponent = u * -2.88539008177792681f;
  return x / (exp2_of(exponent > 126.0f ? splat(126.0f) : exponent) + 1.0f);
}

template <class T>
TANDEM_INLINE Floats gelu_gated(const T* gate, int64_t at, int64_t inner) {
  return gelu(load_some(gate + at, inner - at)) * load_some(gate + inner + at, inner - at);
}

template <class T>
void gelu_mul(const T* gate_up, int64_t stride, T* out, int64_t out_stride, int64_t num_rows, int64_t inner,
              int64_t threads) {
  for_rows(num_rows, 2 * inner, threads, [&](int64_t row) {
    for (int64_t i = 0; i < inner; i += kLanes)
      store_some(out + row * out_stride + i, gelu_gated(gate_up + row * stride, i, inner), inner - i);
  });
}

void gelu_mul_to_tiles(const Bfloat16* gate_up, int64_t stride, const TileRows& out, int64_t threads) {
  const int64_t inner = out.steps * 2 * kLanes;
  for_rows(out.rows, 2 * inner, threads, [&](int64_t row) {
    const Bfloat16* gate = gate_up + row * stride;
    for (int64_t step = 0; step < out.steps; ++step) {
      const int64_t at = step * 2 * kLanes;
      store_two(in_tile(out, row, step), gelu_gated(gate, at, inner), gelu_gated(gate, at + kLanes, inner));
    }
  });
}

}  // namespace
}  // namespace tandem

using tandem::Bfloat16;

#define TANDEM_NORMS(T, suffix)                                                                                      \
  TANDEM_EXPORT void tandem_add_norm_##suffix(const tandem::Norm* norm, T* residual, int64_t stride, const T* delta, \
                                              T* out, int64_t num_rows) {                                           \
    tandem::add_norm(*norm, residual, stride, delta, out, num_rows);                                                 \
  }                                                                                                                  \
  TANDEM_EXPORT void tandem_norm_groups_##suffix(const tandem::Norm* norm, T* rows, int64_t stride,                  \
                                                 int64_t num_rows) {                                                 \
    tandem::norm_groups(*norm, rows, stride, num_rows);                                                              \
  }                                                                                                                  \
  TANDEM_EXPORT void tandem_gelu_mul_##suffix(const T* gate_up, int64_t stride, T* out, int64_t out_stride,          \
                                              int64_t num_rows, int64_t inner, int64_t threads) {                    \
    tandem::gelu_mul(gate_up, stride, out, out_stride, num_rows, inner, threads);                                    \
  }

TANDEM_NORMS(float, f32)
TANDEM_NORMS(Bfloat16, bf16)

// Rows of a multiple of 32 values, as TileRows.
TANDEM_EXPORT void tandem_add_norm_tiles(const tandem::Norm* norm, Bfloat16* residual, int64_t stride,
                                         const Bfloat16* delta, char* out, int64_t num_rows) {
  tandem::add_norm_to_tiles(*norm, residual, stride, delta, {out, num_rows, norm->size / 32});
}

TANDEM_EXPORT void tandem_gelu_mul_tiles(const Bfloat16* gate_up, int64_t stride, char* out, int64_t num_rows,
                                         int64_t inner, int64_t threads) {
  tandem::gelu_mul_to_tiles(gate_up, stride, {out, num_rows, inner / 32}, threads);
}

// Bends values to `cap * tanh(value / cap)`, in place.
TANDEM_EXPORT void tandem_soft_cap(float* values, int64_t count, float cap, int64_t threads) {
  using namespace tandem;
  constexpr int64_t kPart = 1024;
  for_rows((count + kPart - 1) / kPart, kPart, threads, [&](int64_t part) {
    const int64_t end = std::min(count, (part + 1) * kPart);
    for (int64_t i = part * kPart; i < end; i += kLanes)
      store_some(values + i, tanh_of(load_some(values + i, end - i) / cap) * cap, end - i);
  });
}
