// int8 matrix products on AMX tiles (W8A8): weights in units of one scale per output column, each row of the input in
// units of its own scale found on the fly, exact integer sums, bf16 in and out.
#include <cmath>
#include <cstring>

#include "amx.h"

using namespace tandem;

namespace {

constexpr int64_t kStepDepth = 64;  // int8 elements in a tile row

int64_t steps_of(int64_t depth) { return ceil_div(depth, kStepDepth); }

float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace

TANDEM_EXPORT int64_t tandem_int8_packed_bytes(int64_t panels, int64_t depth) {
  return panels * steps_of(depth) * 2048;
}

// Quantizes and packs bf16 weight [columns (twice that when gated: gates, then values), depth]. Row i of a tile holds
// elements 4i to 4i+3 of the step's 64 for each of sixteen columns, as TDPBSSD wants them. `scales` gets one per packed
// column.
TANDEM_EXPORT void tandem_int8_pack(const uint16_t* weight, int64_t stride, int64_t columns, int64_t depth,
                                    int64_t gated, int8_t* packed, float* scales, int64_t threads) {
  const int64_t width = gated ? kPanel / 2 : kPanel;
  const int64_t panels = ceil_div(columns, width), steps = steps_of(depth);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(panels, thread, team);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      int8_t* target = packed + panel * steps * kPanel * kStepDepth;
      std::memset(target, 0, static_cast<size_t>(steps * kPanel * kStepDepth));
      for (int64_t column = 0; column < kPanel; ++column) {
        const int64_t row = source_row(columns, gated != 0, panel, column);
        float& scale = scales[panel * kPanel + column];
        scale = 0.0f;
        if (row < 0) continue;
        const uint16_t* source = weight + row * stride;
        float largest = 0.0f;
        for (int64_t k = 0; k < depth; ++k) largest = std::max(largest, std::fabs(from_bf16(source[k])));
        scale = largest / 127.0f;
        const float units = largest > 1e-30f ? 127.0f / largest : 0.0f;
        int8_t* tile = target + column / 16 * 1024 + column % 16 * 4;
        for (int64_t k = 0; k < depth; ++k) {
          const float value = std::nearbyint(from_bf16(source[k]) * units);
          tile[k / 64 * 2048 + k % 64 / 4 * 64 + k % 4] = static_cast<int8_t>(value);
        }
      }
    }
  });
}

#if defined(TANDEM_AMX) && defined(__AMX_INT8__)

namespace {

// The scale of a row: its largest magnitude over 127. Magnitudes of bf16 are ordered like their bits, NaN above all, so
// an unusable row yields an unusable scale and shows in the output.
float scale_of(const uint16_t* row, int64_t depth) {
  __m512i largest = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  for (int64_t k = 0; k < depth; k += 32) {
    const __mmask32 mask = depth - k >= 32 ? ~__mmask32{0} : (__mmask32{1} << (depth - k)) - 1;
    largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, row + k), magnitude));
  }
  alignas(64) uint16_t lanes[32];
  _mm512_store_si512(lanes, largest);
  return from_bf16(*std::max_element(lanes, lanes + 32)) / 127.0f;
}

__m128i quantize(__m256i bits, __m512 units) {
  return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(bf16_to_float(bits), units)));
}

// Elements [64 step, 64 step + 64) of a row in units of its scale; zero beyond the depth.
__m512i quantize_step(const uint16_t* row, int64_t depth, int64_t step, float scale) {
  const __m512 units = _mm512_set1_ps(scale < 1e-32f ? 0.0f : 1.0f / scale);
  __m512i result = _mm512_setzero_si512();
  const auto part = [&](int64_t index) {
    const int64_t begin = step * kStepDepth + index * 16, left = std::max<int64_t>(0, depth - begin);
    const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
    return quantize(_mm256_maskz_loadu_epi16(mask, row + begin), units);
  };
  result = _mm512_inserti32x4(result, part(0), 0);
  result = _mm512_inserti32x4(result, part(1), 1);
  result = _mm512_inserti32x4(result, part(2), 2);
  return _mm512_inserti32x4(result, part(3), 3);
}

void pack_rows(const Call& call, int64_t depth, Range rows, const amx::Chunk& chunk, float* scales) {
  const uint16_t* x = static_cast<const uint16_t*>(call.x) + chunk.first * call.x_stride;
  scales += chunk.first;
  for (int64_t row = rows.begin; row < rows.end; row += 16) {
    const int64_t end = std::min(row + 16, chunk.count);
    for (int64_t r = row; r < end; ++r) scales[r] = scale_of(x + r * call.x_stride, depth);
    for (int64_t step = 0; step < chunk.steps(); ++step) {
      char* target = chunk.tile(row, step);
      for (int64_t r = row; r < row + 16; ++r) {
        __m512i value = _mm512_setzero_si512();
        if (r < end) value = quantize_step(x + r * call.x_stride, depth, step, scales[r]);
        _mm512_store_si512(target + (r - row) * 64, value);
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
    const uint16_t* x = static_cast<const uint16_t*>(call.x) + row * call.x_stride;
    scales[row] = scale_of(x, w.depth);
    for (int64_t step = 0; step < steps; ++step) {
      _mm512_storeu_si512(rows + row * stride + step * 64, quantize_step(x, w.depth, step, scales[row]));
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
