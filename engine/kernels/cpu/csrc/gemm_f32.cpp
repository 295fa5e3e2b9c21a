// float matrix products whose results do not depend on the batch: every output element is one chain of fused
// multiply-adds over the depth, in order, whatever the number of rows and threads.
//
// Weights are packed as [panel of 32 columns][depth][32]. A block of rows times one panel lives in registers for the
// whole depth; weights are read from L2 once per block. With few rows several panels are computed at once, or the
// latency of the chains would be the bottleneck.
#include <cstring>

#include "linear.h"
#include "parallel.h"
#include "vectors.h"

using namespace tandem;

namespace {

#if defined(__AVX512F__)
constexpr int kRegisterRows = 12;  // 24 accumulators of 32 registers
#else
constexpr int kRegisterRows = 3;  // each accumulator takes two of sixteen registers
#endif
constexpr int64_t kFewRows = kRegisterRows;
constexpr int64_t kAhead = 48;             // prefetch distance in rows of a panel
constexpr int64_t kThreadWork = 64 * 1024;  // multiply-adds below which a second thread costs more than it saves

// x * sigmoid(x). e^-x = 2^n e^r with |r| <= ln 2 / 2; both steps keep full float precision.
Floats silu(Floats x) {
  Floats y = -x;
  const Ints closed = y > 88.0f;     // e^-x overflows soon, and the result is below the least normal number
  y = closed ? splat(88.0f) : y;     // a NaN compares false and stays
  y = y < -87.0f ? splat(-87.0f) : y;
  const Floats shifted = y * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits are the nearest integer
  const Floats n = shifted - 12582912.0f;
  const Floats r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Floats power = (Floats)(((Ints)shifted << 23) + 0x3f800000);
  return closed ? x * 0.0f : x / (1.0f + p * power);
}

struct Task {
  const Linear& w;
  const Call& call;
  int64_t row, panel;
};

void write(const Task& task, int64_t r, int64_t p, Floats v0, Floats v1) {
  const Linear& w = task.w;
  const int64_t panel = task.panel + p, width = w.epilogue == kGated ? kPanel / 2 : kPanel;
  if (w.bias) {
    v0 += load(w.bias + panel * kPanel);
    v1 += load(w.bias + panel * kPanel + 16);
  }
  float* out = static_cast<float*>(task.call.out) + (task.row + r) * task.call.out_stride + panel * width;
  const int64_t left = w.columns - panel * width;
  if (w.epilogue == kGated) {
    store_some(out, silu(v0) * v1, left);
    return;
  }
  if (w.epilogue == kAdd) {
    v0 = load_some(out, left) + v0;
    if (left > 16) v1 = load_some(out + 16, left - 16) + v1;
  }
  store_some(out, v0, left);
  if (left > 16) store_some(out + 16, v1, left - 16);
}

// `Rows` rows times `Panels` panels, all depth.
template <int Rows, int Panels, bool ahead>
void block(const Task& task) {
  const int64_t depth = task.w.depth, stride = task.call.x_stride;
  const float* x = static_cast<const float*>(task.call.x) + task.row * stride;
  const float* weights = reinterpret_cast<const float*>(task.w.weights) + task.panel * depth * kPanel;
  Floats sums[Rows][2 * Panels] = {};
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      const float* line = weights + (p * depth + k) * kPanel;
      if (ahead) {
        __builtin_prefetch(line + kAhead * kPanel);
        __builtin_prefetch(line + kAhead * kPanel + 16);
      }
      const Floats w0 = load(line), w1 = load(line + 16);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const Floats value = splat(x[r * stride + k]);
        sums[r][2 * p] = fused(value, w0, sums[r][2 * p]);
        sums[r][2 * p + 1] = fused(value, w1, sums[r][2 * p + 1]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int p = 0; p < Panels; ++p) write(task, r, p, sums[r][2 * p], sums[r][2 * p + 1]);
  }
}

using Block = void (*)(const Task&);

template <int Rows, int Panels>
Block choose(bool ahead) {
  return ahead ? block<Rows, Panels, true> : block<Rows, Panels, false>;
}

// The block for so many rows, and how many panels it takes.
Block block_for(int64_t rows, int64_t panels, bool ahead, int64_t* taken) {
#if defined(__AVX512F__)
  if (rows <= 3 && panels >= 4) {
    *taken = 4;
    return rows == 1 ? choose<1, 4>(ahead) : rows == 2 ? choose<2, 4>(ahead) : choose<3, 4>(ahead);
  }
  if (rows <= 6 && panels >= 2) {
    *taken = 2;
    switch (rows) {
      case 1: return choose<1, 2>(ahead);
      case 2: return choose<2, 2>(ahead);
      case 3: return choose<3, 2>(ahead);
      case 4: return choose<4, 2>(ahead);
      case 5: return choose<5, 2>(ahead);
      default: return choose<6, 2>(ahead);
    }
  }
#endif
  *taken = 1;
  switch (rows) {
    case 1: return choose<1, 1>(ahead);
    case 2: return choose<2, 1>(ahead);
#if defined(__AVX512F__)
    case 3: return choose<3, 1>(ahead);
    case 4: return choose<4, 1>(ahead);
    case 5: return choose<5, 1>(ahead);
    case 6: return choose<6, 1>(ahead);
    case 7: return choose<7, 1>(ahead);
    case 8: return choose<8, 1>(ahead);
    case 9: return choose<9, 1>(ahead);
    case 10: return choose<10, 1>(ahead);
    case 11: return choose<11, 1>(ahead);
#endif
    default: return choose<kRegisterRows, 1>(ahead);
  }
}

void run(const Linear& w, const Call& call, Range panels) {
  const int64_t blocks = ceil_div(call.rows, kRegisterRows);
  for (int64_t panel = panels.begin; panel < panels.end;) {
    int64_t taken = 1;
    for (int64_t b = 0; b < blocks; ++b) {
      const Range rows = split(call.rows, b, blocks);
      const int64_t left = blocks == 1 ? panels.end - panel : 1;
      block_for(rows.end - rows.begin, left, blocks == 1, &taken)({w, call, rows.begin, panel});
    }
    panel += taken;
  }
}

}  // namespace

TANDEM_EXPORT int64_t tandem_f32_packed_bytes(int64_t panels, int64_t depth) { return panels * depth * kPanel * 4; }

// Packs weight [columns (twice that when gated: gates, then values), depth] into panels.
TANDEM_EXPORT void tandem_f32_pack(const float* weight, int64_t stride, int64_t columns, int64_t depth, int64_t gated,
                                   float* packed, int64_t threads) {
  const int64_t panels = ceil_div(columns, gated ? kPanel / 2 : kPanel);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(panels, thread, team);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      float* target = packed + panel * depth * kPanel;
      for (int64_t column = 0; column < kPanel; ++column) {
        const int64_t row = source_row(columns, gated != 0, panel, column);
        for (int64_t k = 0; k < depth; ++k) target[k * kPanel + column] = row < 0 ? 0.0f : weight[row * stride + k];
      }
    }
  });
}

// Rows `ids` of an ungated packed matrix, [count, depth]. Returns 0, and writes nothing, when an id is out of range.
TANDEM_EXPORT int64_t tandem_f32_embed(const float* packed, int64_t columns, int64_t depth, const int64_t* ids,
                                    int64_t count, float* out, int64_t out_stride, int64_t threads) {
  if (!all_below(ids, count, columns)) return 0;
  parallel(threads, [&](int thread, int team) {
    const Range range = split(count, thread, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const float* column = packed + ids[i] / kPanel * depth * kPanel + ids[i] % kPanel;
      for (int64_t k = 0; k < depth; ++k) out[i * out_stride + k] = column[k * kPanel];
    }
  });
  return 1;
}

TANDEM_EXPORT void tandem_f32_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                                     int64_t out_stride, int64_t threads) {
  const Linear& w = *linear;
  const Call call{x, x_stride, rows, out, out_stride};
  if (rows == 0) return;
  const int64_t panels = panels_of(w);
  const int64_t worth = rows * panels * kPanel * w.depth / kThreadWork;
  parallel(std::min(threads, std::max<int64_t>(1, worth)), [&](int thread, int team) {
    run(w, call, split(panels, thread, team));
  });
}
