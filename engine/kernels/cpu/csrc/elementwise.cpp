// Operators between the matrix products of a decoder layer, each in one pass over its rows: norms, rotation and write
// into the paged cache, gating, gathering of rows.
//
// Everything is computed in float32 and rounded once, where it is stored; sums run in one fixed order that depends on
// the row's length alone. Small inputs are left to the calling thread: waking others costs about as much.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "codes.h"
#include "rows.h"
#include "tile_rows.h"

namespace tandem {
namespace {

constexpr int64_t kLargestHead = 1024;  // values; engine/kernels/cpu/elementwise.py refuses more

template <class T>
void rms_norm(const T* in, int64_t stride, const T* weight, T* out, int64_t num_rows, int64_t size, float eps,
              int64_t threads) {
  for_rows(num_rows, size, threads, [&](int64_t row) {
    const T* from = in + row * stride;
    const float factor = inverse_rms(from, size, eps);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats x = load_some(from + i, size - i) * factor;
      store_some(out + row * size + i, x * load_some(weight + i, size - i), size - i);
    }
  });
}

template <class T>
void add_rms_norm(T* residual, int64_t stride, const T* delta, const T* weight, T* out, int64_t num_rows, int64_t size,
                  float eps, int64_t threads) {
  for_rows(num_rows, size, threads, [&](int64_t row) {
    T* total = residual + row * stride;
    const T* change = delta + row * size;
    Floats sums[2] = {};
    for (int64_t i = 0, side = 0; i < size; i += kLanes, side ^= 1) {
      store_some(total + i, load_some(total + i, size - i) + load_some(change + i, size - i), size - i);
      const Floats x = load_some(total + i, size - i);  // as rounded: the norm sees what the next layer sees
      sums[side] = fused(x, x, sums[side]);
    }
    const float factor = inverse_rms(sums[0], sums[1], size, eps);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats x = load_some(total + i, size - i) * factor;
      store_some(out + row * size + i, x * load_some(weight + i, size - i), size - i);
    }
  });
}

// The same two for many rows, `delta` null or not, into tiles. Sixteen rows at a time, four steps of them together: a
// row's own tiles are a kilobyte apart, and would map to few cache sets.
void norm_to_tiles(Bfloat16* residual, int64_t stride, const Bfloat16* delta, const Bfloat16* weight,
                   const TileRows& out, float eps, int64_t threads) {
  constexpr int64_t kDepth = kTileRowBytes / int64_t(sizeof(Bfloat16)), kTogether = 4;
  const int64_t size = out.steps * kDepth;
  parallel(std::min(threads, ceil_div(out.rows, kTileRows)), [&](int thread, int team) {
    const Range range = split(out.rows, thread, team, kTileRows);
    for (int64_t row = range.begin; row < range.end; row += kTileRows) {
      const int64_t count = std::min(kTileRows, out.rows - row);
      float factors[kTileRows];
      for (int64_t r = 0; r < count; ++r) {
        Bfloat16* total = residual + (row + r) * stride;
        if (delta != nullptr) {
          const Bfloat16* change = delta + (row + r) * size;
          for (int64_t i = 0; i < size; i += kLanes) store(total + i, load(total + i) + load(change + i));
        }
        factors[r] = inverse_rms(total, size, eps);
      }
      for (int64_t begin = 0; begin < out.steps; begin += kTogether) {
        const int64_t end = std::min(out.steps, begin + kTogether);
        char* tiles = out.tile(row, begin);
        for (int64_t r = 0; r < count; ++r) {
          const Bfloat16* from = residual + (row + r) * stride;
          for (int64_t step = begin; step < end; ++step) {
            const int64_t at = step * kDepth;
            const Floats low = load(from + at) * factors[r], high = load(from + at + kLanes) * factors[r];
            char* to = tiles + (step - begin) * kTileBytes + r * kTileRowBytes;
            store_two(reinterpret_cast<Bfloat16*>(to), low * load(weight + at), high * load(weight + at + kLanes));
          }
        }
      }
    }
  });
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t num_rows, int64_t inner, int64_t threads) {
  for_rows(num_rows, 2 * inner, threads, [&](int64_t row) {
    const T *gate = gate_up + row * 2 * inner, *up = gate + inner;
    for (int64_t i = 0; i < inner; i += kLanes) {
      const Floats x = load_some(gate + i, inner - i);
      const Floats exponent = x * -1.44269504088896341f;
      // Beyond 2^126 the quotient is zero in any case, and the exponential must stay finite.
      const Floats y = x / (exp2_of(exponent > 126.0f ? splat(126.0f) : exponent) + 1.0f);
      store_some(out + row * inner + i, y * load_some(up + i, inner - i), inner - i);
    }
  });
}

// One step's rotation and write, for all layers; the field order is repeated in engine/kernels/cpu/elementwise.py.
struct RopeWrite {
  const float* cos;  // [num_rows, head_dim / 2], rows `angle_stride` elements apart
  const float* sin;
  const int64_t* slots;  // [num_rows] block * block_size + offset
  int64_t num_rows, num_heads, num_kv_heads, head_dim, block_size, angle_stride, threads;
};

// A cached value is also read, with weight zero, by earlier rows of its own sequence, and zero times NaN is NaN: so
// what is not finite is kept as zero, as the torch backend does.
TANDEM_INLINE Floats finite(Floats x) { return x - x == 0.0f ? x : Floats{}; }

// Norms a head, unless `weight` is null, and rotates its pairs (i, i + half); any size.
template <bool kFinite, class T, class Out>
TANDEM_INLINE void rotate_any(const T* head, const T* weight, float eps, const RopeWrite& call, int64_t row, Out* out) {
  const int64_t half = call.head_dim / 2;
  const float *cos = call.cos + row * call.angle_stride, *sin = call.sin + row * call.angle_stride;
  const float factor = weight == nullptr ? 1.0f : inverse_rms(head, call.head_dim, eps);
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t count = half - i;
    Floats a = load_some(head + i, count), b = load_some(head + half + i, count);
    if (weight != nullptr) {
      a = a * factor * load_some(weight + i, count);
      b = b * factor * load_some(weight + half + i, count);
    }
    const Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
    Floats low = fused(a, c, -(b * s)), high = fused(b, c, a * s);
    if (kFinite) low = finite(low), high = finite(high);
    store_some(out + i, low, count);
    store_some(out + half + i, high, count);
  }
}

// The same for a head of 64 `kPairs` values, which stays in registers in between.
template <int kPairs, bool kFinite, class T, class Out>
TANDEM_INLINE void rotate_whole(const T* head, const T* weight, float eps, const RopeWrite& call, int64_t row,
                                Out* out) {
  constexpr int kParts = 2 * kPairs, kHalf = kParts * kLanes;
  const float *cos = call.cos + row * call.angle_stride, *sin = call.sin + row * call.angle_stride;
  Floats x[2 * kParts];
  for (int i = 0; i < 2 * kParts; ++i) x[i] = load(head + i * kLanes);
  if (weight != nullptr) {
    Floats sums[2] = {};
    for (int i = 0; i < 2 * kParts; ++i) sums[i & 1] = fused(x[i], x[i], sums[i & 1]);
    const float factor = inverse_rms(sums[0], sums[1], 2 * kHalf, eps);
    for (int i = 0; i < 2 * kParts; ++i) x[i] = x[i] * factor * load(weight + i * kLanes);
  }
  for (int i = 0; i < kParts; ++i) {
    const Floats a = x[i], b = x[i + kParts], c = load(cos + i * kLanes), s = load(sin + i * kLanes);
    x[i] = fused(a, c, -(b * s));
    x[i + kParts] = fused(b, c, a * s);
    if (kFinite) x[i] = finite(x[i]), x[i + kParts] = finite(x[i + kParts]);
  }
  for (int i = 0; i < 2 * kParts; i += 2) store_two(out + i * kLanes, x[i], x[i + 1]);
}

template <bool kFinite, class T, class Out>
TANDEM_INLINE void rotate(const T* head, const T* weight, float eps, const RopeWrite& call, int64_t row, Out* out) {
  switch (call.head_dim) {
    case 64: return rotate_whole<1, kFinite>(head, weight, eps, call, row, out);
    case 128: return rotate_whole<2, kFinite>(head, weight, eps, call, row, out);
    default: return rotate_any<kFinite>(head, weight, eps, call, row, out);
  }
}

// `weights`: [num_heads + num_kv_heads, head_dim], or null for a model that does not norm its heads; rows of `qkv` are
// `stride` elements apart.
template <class T>
void qk_norm_rope_write(const RopeWrite& call, T* qkv, int64_t stride, T* cache, const T* weights, float eps) {
  const int64_t size = call.head_dim, heads = call.num_heads, kv_heads = call.num_kv_heads;
  const int64_t plane = kv_heads * call.block_size * size, row_size = (heads + 2 * kv_heads) * size;
  for_rows(call.num_rows, row_size, call.threads, [&](int64_t row) {
    const int64_t block = call.slots[row] / call.block_size, offset = call.slots[row] % call.block_size;
    T* key = cache + block * 2 * plane + offset * size;
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      T* head = qkv + row * stride + h * size;
      const T* weight = weights == nullptr ? nullptr : weights + h * size;
      if (h < heads)
        rotate<false>(head, weight, eps, call, row, head);
      else
        rotate<true>(head, weight, eps, call, row, key + (h - heads) * call.block_size * size);
    }
    for (int64_t h = 0; h < kv_heads; ++h) {
      const T* value = qkv + row * stride + (heads + kv_heads + h) * size;
      T* to = key + plane + h * call.block_size * size;
      for (int64_t i = 0; i < size; i += kLanes)
        store_some(to + i, finite(load_some(value + i, size - i)), size - i);
    }
  });
}

// The same into a cache in codes: keys are rotated, and both rounded once.
template <class Codes, class T>
void qk_norm_rope_encode(const RopeWrite& call, T* qkv, int64_t stride, const CodedLayer& cache, const T* weights,
                         float eps) {
  const int64_t size = call.head_dim, heads = call.num_heads, kv_heads = call.num_kv_heads;
  const int64_t row_size = (heads + 2 * kv_heads) * size;
  for_rows(call.num_rows, row_size, call.threads, [&](int64_t row) {
    const int64_t block = call.slots[row] / call.block_size, offset = call.slots[row] % call.block_size;
    uint8_t* codes = cache.codes + block * cache.code_stride;
    uint32_t* scales = cache.scales + block * cache.scale_stride;
    alignas(64) float fresh[kLargestHead];
    for (int64_t h = 0; h < heads + 2 * kv_heads; ++h) {
      T* head = qkv + row * stride + h * size;
      const T* weight = weights == nullptr || h >= heads + kv_heads ? nullptr : weights + h * size;
      if (h < heads) {
        rotate<false>(head, weight, eps, call, row, head);
        continue;
      }
      if (h < heads + kv_heads)
        rotate<true>(head, weight, eps, call, row, fresh);
      else
        for (int64_t i = 0; i < size; i += kLanes)
          store_some(fresh + i, finite(load_some(head + i, size - i)), size - i);
      const int64_t line = (h - heads) * call.block_size + offset;
      Codes::store(fresh, size, codes + line * Codes::line_bytes(size), scales + line * Codes::num_groups(size));
    }
  });
}

}  // namespace
}  // namespace tandem

using tandem::Bfloat16;

#define TANDEM_ELEMENTWISE(T, suffix)                                                                               \
  TANDEM_EXPORT void tandem_rms_norm_##suffix(const T* in, int64_t stride, const T* weight, T* out,                \
                                              int64_t num_rows, int64_t size, float eps, int64_t threads) {        \
    tandem::rms_norm(in, stride, weight, out, num_rows, size, eps, threads);                                       \
  }                                                                                                                 \
  TANDEM_EXPORT void tandem_add_rms_norm_##suffix(T* residual, int64_t stride, const T* delta, const T* weight,    \
                                                  T* out, int64_t num_rows, int64_t size, float eps,               \
                                                  int64_t threads) {                                               \
    tandem::add_rms_norm(residual, stride, delta, weight, out, num_rows, size, eps, threads);                      \
  }                                                                                                                 \
  TANDEM_EXPORT void tandem_silu_mul_##suffix(const T* gate_up, T* out, int64_t num_rows, int64_t inner,           \
                                              int64_t threads) {                                                   \
    tandem::silu_mul(gate_up, out, num_rows, inner, threads);                                                      \
  }                                                                                                                 \
  TANDEM_EXPORT void tandem_qk_norm_rope_write_##suffix(const tandem::RopeWrite* call, T* qkv, int64_t stride,     \
                                                        T* cache, const T* weights, float eps) {                   \
    tandem::qk_norm_rope_write(*call, qkv, stride, cache, weights, eps);                                            \
  }

#define TANDEM_ENCODE(Codes, name, T, suffix)                                                                         \
  TANDEM_EXPORT void tandem_qk_norm_rope_write_##name##_##suffix(const tandem::RopeWrite* call, T* qkv, int64_t stride, \
                                                                 const tandem::CodedLayer* cache, const T* weights,   \
                                                                 float eps) {                                         \
    tandem::qk_norm_rope_encode<tandem::Codes>(*call, qkv, stride, *cache, weights, eps);                             \
  }

TANDEM_ENCODE(Int8Codes, int8, float, f32)
TANDEM_ENCODE(Int8Codes, int8, Bfloat16, bf16)
TANDEM_ENCODE(Int4Codes, int4, float, f32)
TANDEM_ENCODE(Int4Codes, int4, Bfloat16, bf16)

TANDEM_ELEMENTWISE(float, f32)
TANDEM_ELEMENTWISE(Bfloat16, bf16)

// Norms of `size` values, a multiple of 32, as TileRows.
TANDEM_EXPORT void tandem_rms_norm_tiles(Bfloat16* in, int64_t stride, const Bfloat16* weight, char* out,
                                         int64_t num_rows, int64_t size, float eps, int64_t threads) {
  tandem::norm_to_tiles(in, stride, nullptr, weight, {out, num_rows, size / 32}, eps, threads);
}

TANDEM_EXPORT void tandem_add_rms_norm_tiles(Bfloat16* residual, int64_t stride, const Bfloat16* delta,
                                             const Bfloat16* weight, char* out, int64_t num_rows, int64_t size,
                                             float eps, int64_t threads) {
  tandem::norm_to_tiles(residual, stride, delta, weight, {out, num_rows, size / 32}, eps, threads);
}

// Copies rows of `row_bytes` by index to rows `stride` bytes apart; returns how many indices lie outside
// [0, table_rows), whose rows are left alone.
TANDEM_EXPORT int64_t tandem_gather_rows(const char* table, int64_t table_rows, int64_t row_bytes, const int64_t* index,
                                         int64_t num_rows, char* out, int64_t stride, int64_t threads) {
  int64_t refused = 0;
  for (int64_t row = 0; row < num_rows; ++row) refused += index[row] < 0 || index[row] >= table_rows;
  tandem::for_rows(num_rows, row_bytes / 4, threads, [&](int64_t row) {
    if (index[row] >= 0 && index[row] < table_rows)
      std::memcpy(out + row * stride, table + index[row] * row_bytes, row_bytes);
  });
  return refused;
}
