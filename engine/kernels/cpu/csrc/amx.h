// Blocked matrix product on AMX tiles, for bf16 and int8: a tile row is 64 bytes in both, only the dot product differs.
//
// Weights are packed once as [panel of 32 columns][step of 64 bytes of depth][2 tiles of 1 KB]; a thread that walks
// panels therefore reads memory in order. Every output element is one chain of tile products over the whole depth,
// in order, whatever the number of rows and threads; splitting the depth only spills the float sums to memory. So a
// row's result is independent of the batch.
#pragma once

#include "linear.h"
#include "parallel.h"
#include "scratch.h"
#include "tile_rows.h"

#if defined(__AMX_TILE__) && defined(TANDEM_AVX512)
#define TANDEM_AMX 1

#include <atomic>
#include <cstring>
#include <type_traits>

namespace tandem {
namespace amx {

constexpr int64_t kStepBytes = 2 * kTileBytes, kRowBytes = kTileRowBytes;
constexpr int64_t kBlockRows = 32;   // two tiles of rows times two tiles of columns: four accumulators
constexpr int64_t kL1Steps = 16;     // 32 KB of weights stay in the 48 KB L1 while rows stream past them
constexpr int64_t kMostChunkRows = 640;  // rows kept in L2, by a team or by one thread
constexpr int64_t kApartRows = 160;      // rows per thread above which work is split by rows, not by columns,
constexpr int64_t kWideApartRows = 400;  // and the same for matrices of at least
constexpr int64_t kWidePanels = 128;     // this many panels: see all_rows
constexpr int64_t kBandPanels = 32;  // most panels that a part of the rows is multiplied by while it is in L2
constexpr int64_t kBandsEach = 2;    // bands per thread of a team: bounds the imbalance at the end
constexpr int64_t kLoosePart = 8;    // one panel in this many is assigned dynamically: see Shares
constexpr int64_t kAhead = 16 * 1024;  // prefetch distance in bytes

inline void barrier() { asm volatile("" ::: "memory"); }

// Tiles 0-3 accumulate, 4 and 5 hold rows, 6 and 7 hold weights.
inline void configure(int64_t upper_rows, int64_t lower_rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const uint8_t upper = static_cast<uint8_t>(upper_rows), lower = static_cast<uint8_t>(lower_rows);
  const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = rows[tile];
    config.bytes[tile] = rows[tile] ? 64 : 0;
  }
  barrier();  // gcc 12 takes the instruction to read eight bytes only
  _tile_loadconfig(&config);
  barrier();
}

struct Bf16Dot {
  static constexpr int64_t kBytes = 2;
#ifdef __AMX_BF16__
  static void upper_left() { _tile_dpbf16ps(0, 4, 6); }
  static void upper_right() { _tile_dpbf16ps(1, 4, 7); }
  static void lower_left() { _tile_dpbf16ps(2, 5, 6); }
  static void lower_right() { _tile_dpbf16ps(3, 5, 7); }
#endif
};

struct Int8Dot {
  static constexpr int64_t kBytes = 1;
#ifdef __AMX_INT8__
  static void upper_left() { _tile_dpbssd(0, 4, 6); }
  static void upper_right() { _tile_dpbssd(1, 4, 7); }
  static void lower_left() { _tile_dpbssd(2, 5, 6); }
  static void lower_right() { _tile_dpbssd(3, 5, 7); }
#endif
};

template <bool two>
inline void zero() {
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Accumulators spilled between parts of the depth: four tiles, contiguous.
template <bool two>
inline void resume(const char* parked) {
  barrier();
  _tile_stream_loadd(0, parked, kRowBytes);
  _tile_stream_loadd(1, parked + kTileBytes, kRowBytes);
  if (two) {
    _tile_stream_loadd(2, parked + 2 * kTileBytes, kRowBytes);
    _tile_stream_loadd(3, parked + 3 * kTileBytes, kRowBytes);
  }
}

template <bool two>
inline void park(char* parked) {
  _tile_stored(0, parked, kRowBytes);
  _tile_stored(1, parked + kTileBytes, kRowBytes);
  if (two) {
    _tile_stored(2, parked + 2 * kTileBytes, kRowBytes);
    _tile_stored(3, parked + 3 * kTileBytes, kRowBytes);
  }
  barrier();
}

// The block as rows of 32 columns.
template <bool two>
inline void unload(char* block) {
  constexpr int64_t stride = kPanel * 4;
  _tile_stored(0, block, stride);
  _tile_stored(1, block + kRowBytes, stride);
  if (two) {
    _tile_stored(2, block + 16 * stride, stride);
    _tile_stored(3, block + 16 * stride + kRowBytes, stride);
  }
  barrier();
}

// Rows in their own layout (at most 32) times one panel. Weights are prefetched `kAhead` bytes ahead: at the panel's
// end the first of this thread's next panel, if there is one.
template <class Dot, bool two, class Writer>
inline void multiply_few(const char* x, int64_t stride, const char* weights, const char* following, int64_t steps,
                         Writer& writer) {
  const int64_t near = std::max<int64_t>(0, steps - kAhead / kStepBytes);
  for (int64_t step = 0; step < steps; ++step) {
    const char* ahead = step < near ? weights + kAhead : following;
    if (ahead != nullptr) {
      for (int line = 0; line < 32; ++line) _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
      if (step >= near) following += kStepBytes;
    }
    _tile_loadd(4, x, stride);
    _tile_loadd(6, weights, kRowBytes);
    Dot::upper_left();
    _tile_loadd(7, weights + kTileBytes, kRowBytes);
    Dot::upper_right();
    if (two) {
      _tile_loadd(5, x + 16 * stride, stride);
      Dot::lower_left();
      Dot::lower_right();
    }
    writer.write(2);
    x += kRowBytes;
    weights += kStepBytes;
  }
  writer.flush();
}

// Prefetches the next weights into L2 while a block is multiplied, a fixed number of cache lines per step.
struct Ahead {
  const char* weights;
  int64_t lines;
};

// Rows in tiles times weights that stay in L1; `lower`: bytes from sixteen rows to the next. Rows are loaded as a
// stream: they come from L2, and with ordinary loads they would push the weights out of L1 (67 % of the tile peak
// instead of 92 %).
template <class Dot, bool two, class Writer>
inline void multiply_many(const char* rows, int64_t lower, const char* weights, int64_t steps, Ahead ahead,
                          Writer& writer) {
  for (int64_t step = 0; step < steps; ++step) {
    _tile_stream_loadd(4, rows, kRowBytes);
    _tile_loadd(6, weights, kRowBytes);
    Dot::upper_left();
    _tile_loadd(7, weights + kTileBytes, kRowBytes);
    Dot::upper_right();
    if (two) {
      _tile_stream_loadd(5, rows + lower, kRowBytes);
      Dot::lower_left();
      Dot::lower_right();
    }
    for (int64_t line = 0; line < ahead.lines; ++line) _mm_prefetch(ahead.weights + line * 64, _MM_HINT_T1);
    ahead.weights += ahead.lines * 64;
    writer.write(2);
    rows += kTileBytes;
    weights += kStepBytes;
  }
  writer.flush();
}

struct Scratches {
  Scratch rows, parked, scales;
};

inline Scratches& scratches() {
  static thread_local Scratches own;
  return own;
}

// Panels of a product divided among a team: most in equal, contiguous shares; the last ones are handed out dynamically,
// since memory bandwidth is not the same for all threads.
class Shares {
 public:
  explicit Shares(int64_t panels) : panels_(panels), loose_(panels - panels / kLoosePart), next_(loose_) {}

  Range own(int thread, int team) const { return split(loose_, thread, team); }

  // Next dynamically assigned panel; -1 when there are no more.
  int64_t claim() {
    const int64_t panel = next_.fetch_add(1, std::memory_order_relaxed);
    return panel < panels_ ? panel : -1;
  }

 private:
  const int64_t panels_, loose_;
  std::atomic<int64_t> next_;
};

// At most 32 rows in their own layout, depth a whole number of steps, times a thread's panels.
template <class Dot, class Writer>
void few_rows(const Linear& w, const char* x, int64_t stride, int64_t rows, Range own, Shares& shares,
              Writer& writer) {
  const int64_t steps = ceil_div(w.depth * Dot::kBytes, kRowBytes);
  const bool two = rows > 16;
  const auto next = [&] { return own.begin < own.end ? own.begin++ : shares.claim(); };
  const auto weights = [&](int64_t panel) { return w.weights + panel * steps * kStepBytes; };
  configure(std::min<int64_t>(rows, 16), two ? rows - 16 : 0);
  for (int64_t panel = next(), following; panel >= 0; panel = following) {
    following = next();
    const char* ahead = following < 0 ? nullptr : weights(following);
    if (two) {
      zero<true>();
      multiply_few<Dot, true>(x, stride, weights(panel), ahead, steps, writer);
      unload<true>(writer.block());
    } else {
      zero<false>();
      multiply_few<Dot, false>(x, stride, weights(panel), ahead, steps, writer);
      unload<false>(writer.block());
    }
    writer.begin(0, rows, panel);
  }
  writer.flush();
  _tile_release();
}

// Rows [first, first + count) of the call, in tiles.
struct Chunk {
  TileRows rows;
  int64_t begin;  // the first of them there
  int64_t first, count;

  int64_t steps() const { return rows.steps; }

  // The tile of sixteen rows, counted from the chunk's first.
  char* tile(int64_t row, int64_t step) const { return rows.tile(begin + row, step); }
};

// One part of the depth, for all rows of a chunk and one panel; `next`: the weights to prefetch meanwhile.
template <class Dot, class Writer>
inline void sweep(const Chunk& chunk, Range cut, const char* weights, const char* next, char* parked, int64_t panel,
                  Writer& writer) {
  const int64_t blocks = ceil_div(chunk.count, kBlockRows), steps = cut.end - cut.begin, lines = ceil_div(32, blocks);
  const int64_t lower = chunk.rows.width(cut.begin) * kTileBytes;
  const bool last = cut.end == chunk.steps();
  for (int64_t b = 0; b < blocks; ++b) {
    const char* from = chunk.tile(b * kBlockRows, cut.begin);
    char* park_at = parked + b * 4 * kTileBytes;
    const int64_t row = chunk.first + b * kBlockRows, left = std::min(kBlockRows, chunk.count - b * kBlockRows);
    const Ahead ahead{next + b * steps * lines * 64, lines};
    const auto run = [&](auto two) {
      constexpr bool kTwo = decltype(two)::value;
      if (cut.begin == 0) {
        zero<kTwo>();
      } else {
        resume<kTwo>(park_at);
      }
      multiply_many<Dot, kTwo>(from, lower, weights, steps, ahead, writer);
      if (!last) {
        park<kTwo>(park_at);
        return;
      }
      unload<kTwo>(writer.block());
      writer.begin(row, left, panel);
    };
    if (left > 16) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  }
}

// A chunk times a band of panels. The depth is split at two levels: `kL2Steps` of the rows stay in L2 for all panels of
// the band, and `kL1Steps` of a panel's weights stay in L1 for all rows.
template <class Dot, class Writer>
void many_rows(const Linear& w, const Chunk& chunk, Range panels, Writer& writer) {
  const bool deep = chunk.steps() > kL2Steps;
  const int64_t parked_bytes = round_up(chunk.count, kBlockRows) * kPanel * 4;
  char* parked = scratches().parked.array<char>(parked_bytes * (deep ? kBandPanels : 1));
  for (int64_t outer = 0; outer < chunk.steps(); outer += kL2Steps) {
    const int64_t outer_end = std::min(chunk.steps(), outer + kL2Steps);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      char* park_at = parked + (deep ? (panel - panels.begin) * parked_bytes : 0);
      for (int64_t inner = outer; inner < outer_end; inner += kL1Steps) {
        const Range cut{inner, std::min(outer_end, inner + kL1Steps)};
        const char* weights = w.weights + (panel * chunk.steps() + inner) * kStepBytes;
        const char* follows = weights + kL1Steps * kStepBytes;
        if (cut.end == outer_end) {  // next comes the next panel, or the first one with the next part of the depth
          const bool wrap = panel + 1 == panels.end && outer_end < chunk.steps();
          const int64_t then = wrap ? panels.begin * chunk.steps() + outer_end : (panel + 1) * chunk.steps() + outer;
          follows = w.weights + then * kStepBytes;
        }
        sweep<Dot>(chunk, cut, weights, follows, park_at, panel, writer);
      }
    }
  }
}

// Rows of a call whose input is in tiles already.
inline TileRows given_tiles(const Call& call, int64_t steps) {
  return {const_cast<char*>(static_cast<const char*>(call.x)), call.rows, steps};
}

// Every thread takes whole chunks: it packs its rows into its own L2, unless they are in tiles already, and walks all
// panels. No thread waits for another, and since all walk the weights at the same pace, memory is read once.
template <class Dot, class Sums, class Pack>
void rows_apart(const Linear& w, const Call& call, const float* row_scales, int64_t threads, const Pack& pack) {
  const int64_t steps = ceil_div(w.depth * Dot::kBytes, kRowBytes), panels = panels_of(w);
  const int64_t share = ceil_div(call.rows, threads);
  const int64_t chunk_rows = round_up(ceil_div(share, ceil_div(share, kMostChunkRows)), kTileRows);
  parallel(threads, [&](int thread, int team) {
    configure(16, 16);
    char* packed = w.takes_tiles ? nullptr : scratches().rows.array<char>(chunk_rows * steps * kRowBytes);
    for (int64_t first = thread * chunk_rows; first < call.rows; first += team * chunk_rows) {
      const int64_t count = std::min(chunk_rows, call.rows - first);
      const Chunk chunk = w.takes_tiles ? Chunk{given_tiles(call, steps), first, first, count}
                                        : Chunk{{packed, count, steps}, 0, first, count};
      if (!w.takes_tiles) pack(Range{0, round_up(count, kTileRows)}, chunk);
      with_writer<Sums>(w, call, row_scales, [&](auto&& writer) {
        for (int64_t panel = 0; panel < panels; panel += kBandPanels) {
          many_rows<Dot>(w, chunk, Range{panel, std::min(panels, panel + kBandPanels)}, writer);
        }
        writer.flush();
      });
    }
    _tile_release();
  });
}

// The team packs one chunk after the other together, unless they are in tiles already; each thread takes bands of
// panels until none is left.
template <class Dot, class Sums, class Pack>
void rows_together(const Linear& w, const Call& call, const float* row_scales, int64_t threads, const Pack& pack) {
  const int64_t steps = ceil_div(w.depth * Dot::kBytes, kRowBytes), panels = panels_of(w);
  const int64_t chunks = ceil_div(call.rows, kMostChunkRows);
  const int64_t chunk_rows = round_up(ceil_div(call.rows, chunks), kBlockRows);
  char* packed = w.takes_tiles ? nullptr : scratches().rows.array<char>(chunk_rows * steps * kRowBytes);
  // Even: the two panels of an output tile write halves of the same cache lines.
  const int64_t width = std::min(kBandPanels, round_up(ceil_div(panels, kBandsEach * std::max<int64_t>(1, threads)), 2));
  const int64_t bands = ceil_div(panels, width);
  std::atomic<int64_t> taken{0};
  parallel(threads, [&](int thread, int team) {
    configure(16, 16);
    for (int64_t index = 0; index < chunks; ++index) {
      const int64_t first = index * chunk_rows, count = std::min(chunk_rows, call.rows - first);
      const Chunk chunk = w.takes_tiles ? Chunk{given_tiles(call, steps), first, first, count}
                                        : Chunk{{packed, count, steps}, 0, first, count};
      if (!w.takes_tiles) {
        pack(split(round_up(count, kTileRows), thread, team, kTileRows), chunk);
        team_barrier(team);
      }
      with_writer<Sums>(w, call, row_scales, [&](auto&& writer) {
        // Every thread overshoots once a chunk: a chunk's tickets start after the bands and overshoots before it.
        for (int64_t band; (band = taken.fetch_add(1) - index * (bands + team)) < bands;) {
          const Range range{band * width, std::min(panels, (band + 1) * width)};
          many_rows<Dot>(w, chunk, range, writer);
        }
        writer.flush();
      });
      team_barrier(team);
    }
    _tile_release();
  });
}

// Walks all rows; `pack(rows of the chunk, chunk)` packs them into tiles. Threads that split the rows never wait for
// each other, but each reads all weights, and a thread can have only a few cache misses in flight: with few rows to
// reuse the weights for, that costs more for a wide matrix than packing rows together does.
template <class Dot, class Sums, class Pack>
void all_rows(const Linear& w, const Call& call, const float* row_scales, int64_t threads, const Pack& pack) {
  const int64_t enough = panels_of(w) < kWidePanels ? kApartRows : kWideApartRows;
  if (threads > 1 && call.rows >= threads * enough) {
    rows_apart<Dot, Sums>(w, call, row_scales, threads, pack);
  } else {
    rows_together<Dot, Sums>(w, call, row_scales, threads, pack);
  }
}

}  // namespace amx
}  // namespace tandem
#endif
