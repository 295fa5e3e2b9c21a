// int8 matrix products on AMX tiles (W8A8): weights in units of one scale per output column, each row of the input in
// units of its own scale found on the fly, exact integer sums, bf16 in and out.
#include <cstring>

#include "amx.h"
#include "quantize.h"

using namespace tandem;

namespace {

constexpr int64_t kStepDepth = 64;  // int8 elements in a tile row

int64_t steps_of(int64_t depth) { return ceil_div(depth, kStepDepth); }

// Row i of a tile holds elements 4i to 4i+3 of the step's 64 for each of sixteen columns, as TDPBSSD wants them.
auto unit_placer(int8_t* packed, int64_t depth) {
  const int64_t steps = steps_of(depth);
  return [=](int64_t panel, int64_t column, int64_t k, const int8_t* units, int64_t) {
    int8_t* const step = packed + (panel * steps + k / kStepDepth) * kPanel * kStepDepth;
    int8_t* const tile = step + column / 16 * 1024 + column % 16 * 4;
    for (int64_t i = 0; i < kStepDepth; i += 4) std::memcpy(tile + i * 16, units + i, 4);
  };
}

}  // namespace

TANDEM_EXPORT int64_t tandem_int8_packed_bytes(int64_t panels, int64_t depth) {
  return panels * steps_of(depth) * 2048;
}

// Quantizes and packs bf16 weight [columns (twice that when gated: gates, then values), depth]. `scales` gets one per
// packed column.
TANDEM_EXPORT void tandem_int8_pack(const Bfloat16* weight, int64_t stride, int64_t columns, int64_t depth,
                                    int64_t gated, int8_t* packed, float* scales, int64_t threads) {
  quantize_columns(weight, stride, columns, depth, gated != 0, scales, threads, unit_placer(packed, depth));
}

// The same of weights that are stored in eight bits.
TANDEM_EXPORT void tandem_int8_pack_stored(const int8_t* codes, const float* stored_scales, int64_t columns,
                                           int64_t depth, int64_t gated, int8_t* packed, float* scales,
                                           int64_t threads) {
  place_stored_columns(codes, stored_scales, columns, depth, gated != 0, scales, threads, unit_placer(packed, depth));
}

TANDEM_EXPORT int64_t tandem_int8_embed(const int8_t* packed, const float* scales, int64_t columns, int64_t depth,
                                        const int64_t* ids, int64_t count, Bfloat16* out, int64_t out_stride,
                                        int64_t threads) {
  const int64_t panel_size = steps_of(depth) * kPanel * kStepDepth;
  return embed_units(scales, columns, depth, ids, count, out, out_stride, threads, [=](int64_t id, int64_t k) {
    const int8_t* const step = packed + id / kPanel * panel_size + k / kStepDepth * kPanel * kStepDepth;
    const int8_t* const tile = step + id % kPanel / 16 * 1024;
    return tile[k % kStepDepth / 4 * 64 + id % 16 * 4 + k % 4];
  });
}

#if defined(TANDEM_AMX) && defined(__AMX_INT8__)

namespace {

// Elements [64 step, 64 step + 64) of a row in units of its scale; zero beyond the depth.
void quantize_step(const Bfloat16* row, int64_t depth, int64_t step, float factor, char* to) {
  const int64_t begin = step * kStepDepth, left = depth - begin;
  auto* const units = reinterpret_cast<int8_t*>(to);
  if (left < kStepDepth) std::memset(units, 0, kStepDepth);
  quantize(row + begin, std::min(left, kStepDepth), factor, units);
}

void pack_rows(const Call& call, int64_t depth, Range rows, const amx::Chunk& chunk, float* scales) {
  const Bfloat16* x = static_cast<const Bfloat16*>(call.x) + chunk.first * call.x_stride;
  scales += chunk.first;
  for (int64_t row = rows.begin; row < rows.end; row += 16) {
    const int64_t end = std::min(row + 16, chunk.count);
    float factors[16];
    for (int64_t r = row; r < end; ++r) {
      const Scale scale = row_scale(x + r * call.x_stride, depth);
      scales[r] = scale.unit;
      factors[r - row] = scale.factor;
    }
    for (int64_t step = 0; step < chunk.steps(); ++step) {
      char* target = chunk.tile(row, step);
      for (int64_t r = row; r < row + 16; ++r, target += kStepDepth) {
        if (r < end) {
          quantize_step(x + r * call.x_stride, depth, step, factors[r - row], target);
        } else {
          std::memset(target, 0, kStepDepth);
        }
      }
    }
  }
}

// Every thread quantizes all of the few rows: that is cheaper than a barrier.
void run_few(const Linear& w, const Call& call, Range own, amx::Shares& shares) {
  const int64_t steps = steps_of(w.depth), stride = steps * kStepDepth;
  char* rows = amx::scratches().rows.array<char>(call.rows * stride);
  float* scales = amx::scratches().scales.array<float>(call.rows);
  for (int64_t row = 0; row < call.rows; ++row) {
    const Bfloat16* x = static_cast<const Bfloat16*>(call.x) + row * call.x_stride;
    const Scale scale = row_scale(x, w.depth);
    scales[row] = scale.unit;
    for (int64_t step = 0; step < steps; ++step) {
      quantize_step(x, w.depth, step, scale.factor, rows + row * stride + step * kStepDepth);
    }
  }
  with_writer<IntSums>(w, call, scales, [&](auto&& writer) {
    amx::few_rows<amx::Int8Dot>(w, rows, stride, call.rows, own, shares, writer);
  });
}

}  // namespace

TANDEM_EXPORT void tandem_int8_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                                      int64_t out_stride, int64_t threads) {
  const Linear& w = *linear;
  const Call call{x, x_stride, rows, out, out_stride};
  if (rows == 0) return;
  if (rows <= kFewRows) {
    amx::Shares shares(panels_of(w));
    parallel(threads, [&](int thread, int team) { run_few(w, call, shares.own(thread, team), shares); });
    return;
  }
  float* scales = amx::scratches().scales.array<float>(rows);
  amx::all_rows<amx::Int8Dot, IntSums>(w, call, scales, threads, [&](Range mine, const amx::Chunk& chunk) {
    pack_rows(call, w.depth, mine, chunk, scales);
  });
}

#endif
