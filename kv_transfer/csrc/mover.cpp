// Chunks of KV: moved from pool to pool and checksummed in one pass, or checksummed where they lie.
#include "kernels.h"
#include "pass.h"

namespace tandem {

// Runs from here on are stored past the caches: shorter ones are mostly edges.
constexpr int64_t kLongRun = 1024;

template <bool kSum>
uint32_t move_run(Level level, const uint8_t* source, uint8_t* target, int64_t count, uint32_t state) {
  const auto size = static_cast<size_t>(count);
  if (count >= kLongRun) return run<Store::kPast, kSum>(level, source, target, size, state);
  return run<Store::kCached, kSum>(level, source, target, size, state);
}

// A chunk to move, and the progress so far.
struct Move {
  int64_t level;
  const PoolBlocks* source;
  int64_t source_unit;
  const PoolBlocks* target;
  int64_t target_unit;
  Cells cells;
  int64_t burst_bytes;
  Wanted wanted;
  int64_t with_sum;
  int64_t bytes, checksum;
};

template <bool kSum>
int64_t move_on(Move& move) {
  Rest source(Walk(*move.source, move.cells, move.source_unit), move.bytes);
  Rest target(Walk(*move.target, move.cells, move.target_unit), move.bytes);
  const auto level = static_cast<Level>(move.level);
  uint32_t state = ~static_cast<uint32_t>(move.checksum);
  int64_t result = kDone, burst = move.burst_bytes;
  while (source.more()) {
    if (!target.more()) return kUnequal;
    if (!burst) {
      if (move.wanted.any()) {
        result = kPaused;
        break;
      }
      burst = move.burst_bytes;
    }
    int64_t count = source.left() < target.left() ? source.left() : target.left();
    if (count > burst) count = burst;
    state = move_run<kSum>(level, source.at(), target.at(), count, state);
    move.bytes += count;
    source.drop(count);
    target.drop(count);
    burst -= count;
  }
  move.checksum = kSum ? static_cast<uint32_t>(~state) : 0;
  return result == kDone && target.more() ? kUnequal : result;
}

// A chunk to be checksummed where it lies.
struct Sum {
  int64_t level;
  const PoolBlocks* blocks;
  int64_t first_unit;
  Cells cells;
};

}  // namespace tandem

TANDEM_EXPORT int64_t tandem_mover_level() { return tandem::best_level(); }

// Goes on moving a chunk, and with the CRC-32 of what was moved if `with_sum`. kPaused when one of the flags was set
// after a burst: then the same call goes on. On return all stores are visible to other threads and processes.
TANDEM_EXPORT int64_t tandem_move(tandem::Move* move) {
  if (!tandem::contains(*move->source, move->cells, move->source_unit) ||
      !tandem::contains(*move->target, move->cells, move->target_unit))
    return tandem::kOutside;
  const int64_t result = move->with_sum ? tandem::move_on<true>(*move) : tandem::move_on<false>(*move);
  tandem::settle_stores();
  return result;
}

// CRC-32 of cells where they lie; negative when they are not there.
TANDEM_EXPORT int64_t tandem_checksum(const tandem::Sum* sum) {
  if (!tandem::contains(*sum->blocks, sum->cells, sum->first_unit)) return tandem::kOutside;
  tandem::Walk walk(*sum->blocks, sum->cells, sum->first_unit);
  uint32_t state = ~0u;
  uint8_t* begin = nullptr;
  for (int64_t length = 0; walk.next(begin, length);)
    state = tandem::run<tandem::Store::kNone, true>(static_cast<tandem::Level>(sum->level), begin, nullptr,
                                                    static_cast<size_t>(length), state);
  return static_cast<uint32_t>(~state);
}

// (offset, length) of the runs of cells into `out`: how many there are, of which at most `most` are written; negative
// when the cells are not there.
TANDEM_EXPORT int64_t tandem_runs(const tandem::PoolBlocks* blocks, int64_t first_unit, int64_t first_layer,
                                  int64_t num_layers, int64_t num_units, tandem::Run* out, int64_t most) {
  const tandem::Cells cells{first_layer, num_layers, num_units};
  if (!tandem::contains(*blocks, cells, first_unit)) return tandem::kOutside;
  tandem::Walk walk(*blocks, cells, first_unit);
  uint8_t* begin = nullptr;
  int64_t count = 0;
  for (int64_t length = 0; walk.next(begin, length); ++count)
    if (count < most) out[count] = {begin - blocks->region, length};
  return count;
}

// CRC-32 of `count` bytes, going on from `value`.
TANDEM_EXPORT int64_t tandem_crc32(int64_t level, const uint8_t* bytes, int64_t count, int64_t value) {
  return static_cast<uint32_t>(~tandem::run<tandem::Store::kNone, true>(
      static_cast<tandem::Level>(level), bytes, nullptr, static_cast<size_t>(count), ~static_cast<uint32_t>(value)));
}
