// bf16 matrix products on AMX tiles with float accumulation, and lookups in the packed matrix.
#include <cstring>

#include "amx.h"

using namespace tandem;

namespace {

constexpr int64_t kStepDepth = 32;  // bf16 elements in a tile row

int64_t steps_of(int64_t depth) { return ceil_div(depth, kStepDepth); }

}  // namespace

// Bytes of a packed matrix.
TANDEM_EXPORT int64_t tandem_bf16_packed_bytes(int64_t panels, int64_t depth) {
  return panels * steps_of(depth) * 2048;
}

// Packs weight [columns (twice that when gated: gates, then values), depth] row by row into tiles. Within a tile, row i
// holds elements 2i and 2i+1 of the step's 32 for each of sixteen columns, as TDPBF16PS wants them.
TANDEM_EXPORT void tandem_bf16_pack(const uint16_t* weight, int64_t stride, int64_t columns, int64_t depth,
                                    int64_t gated, uint16_t* packed, int64_t threads) {
  const int64_t width = gated ? kPanel / 2 : kPanel;
  const int64_t panels = ceil_div(columns, width), steps = steps_of(depth);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(panels, thread, team);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      uint16_t* target = packed + panel * steps * kPanel * kStepDepth;
      std::memset(target, 0, static_cast<size_t>(steps * kPanel * kStepDepth * 2));
      for (int64_t column = 0; column < kPanel; ++column) {
        const int64_t row = source_row(columns, gated != 0, panel, column);
        if (row < 0) continue;
        const uint16_t* source = weight + row * stride;
        uint16_t* tile = target + column / 16 * 512 + column % 16 * 2;
        for (int64_t k = 0; k < depth; ++k) tile[k / 32 * 1024 + k % 32 / 2 * 32 + k % 2] = source[k];
      }
    }
  });
}

// Rows `ids` of an ungated packed matrix, [count, depth]: a tied embedding needs no second copy of the head.
// Returns 0, and writes nothing, when an id is out of range.
TANDEM_EXPORT int64_t tandem_bf16_embed(const uint16_t* packed, int64_t columns, int64_t depth, const int64_t* ids,
                                    int64_t count, uint16_t* out, int64_t out_stride, int64_t threads) {
  if (!all_below(ids, count, columns)) return 0;
  const int64_t steps = steps_of(depth);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(count, thread, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t id = ids[i];
      const uint16_t* tile = packed + id / kPanel * steps * 1024 + id % kPanel / 16 * 512 + id % 16 * 2;
      uint16_t* row = out + i * out_stride;
      for (int64_t k = 0; k + 1 < depth; k += 2) std::memcpy(row + k, tile + k / 32 * 1024 + k % 32 * 16, 4);
      if (depth % 2) row[depth - 1] = tile[(depth - 1) / 32 * 1024 + (depth - 1) % 32 * 16];
    }
  });
  return 1;
}

#if defined(TANDEM_AMX) && defined(__AMX_BF16__)

namespace {

// Copies rows into the tiles of a chunk, zero beyond the depth and the last row. Four steps at a time: whole rows would
// write cache lines 2 KB apart, which map to the same few sets.
void pack_rows(const uint16_t* x, int64_t stride, int64_t depth, Range rows, const amx::Chunk& chunk) {
  const int64_t whole = depth / kStepDepth;
  const __mmask32 tail = (1u << depth % kStepDepth) - 1;
  for (int64_t row = rows.begin; row < rows.end; row += 16) {
    for (int64_t begin = 0; begin < chunk.steps(); begin += 4) {
      const int64_t end = std::min(chunk.steps(), begin + 4);
      char* target = chunk.tile(row, begin);
      for (int64_t r = 0; r < 16; ++r) {
        const uint16_t* source = x + (row + r) * stride;
        for (int64_t step = begin; step < end; ++step) {
          __m512i value = _mm512_setzero_si512();
          if (row + r < chunk.count) {
            value = step < whole ? _mm512_loadu_si512(source + step * kStepDepth)
                                 : _mm512_maskz_loadu_epi16(tail, source + step * kStepDepth);
          }
          _mm512_store_si512(target + (step - begin) * kTileBytes + r * 64, value);
        }
      }
    }
  }
}

void run_few(const Linear& w, const Call& call, Range own, amx::Shares& shares) {
  const uint16_t* x = static_cast<const uint16_t*>(call.x);
  int64_t stride = call.x_stride;
  if (w.depth % kStepDepth) {  // tiles read whole steps: give them rows that end in zeros
    const int64_t padded = round_up(w.depth, kStepDepth);
    uint16_t* copy = amx::scratches().rows.array<uint16_t>(call.rows * padded);
    std::memset(copy, 0, static_cast<size_t>(call.rows * padded * 2));
    for (int64_t row = 0; row < call.rows; ++row) {
      std::memcpy(copy + row * padded, x + row * stride, static_cast<size_t>(w.depth * 2));
    }
    x = copy;
    stride = padded;
  }
  with_writer<FloatSums>(w, call, nullptr, [&](auto&& writer) {
    amx::few_rows<amx::Bf16Dot>(w, reinterpret_cast<const char*>(x), stride * 2, call.rows, own, shares, writer);
  });
}

}  // namespace

TANDEM_EXPORT void tandem_bf16_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                                      int64_t out_stride, int64_t threads) {
  const Linear& w = *linear;
  const Call call{x, x_stride, rows, out, out_stride};
  if (rows == 0) return;
  if (rows <= kFewRows) {
    amx::Shares shares(panels_of(w));
    parallel(threads, [&](int thread, int team) { run_few(w, call, shares.own(thread, team), shares); });
    return;
  }
  amx::all_rows<amx::Bf16Dot, FloatSums>(w, call, nullptr, threads, [&](Range mine, const amx::Chunk& chunk) {
    const uint16_t* source = static_cast<const uint16_t*>(call.x) + chunk.first * call.x_stride;
    pack_rows(source, call.x_stride, w.depth, mine, chunk);
  });
}

#endif
