// Peak memory bandwidth and arithmetic rate of this machine, which the kernels are compared with.
#include <atomic>

#include "amx.h"
#include "parallel.h"

using namespace tandem;

// Reads [address, address + bytes) once, each thread its part in order; returns a value that depends on all of it, so
// that no read is optimised away.
TANDEM_EXPORT int64_t tandem_read_bytes(const int64_t* address, int64_t bytes, int64_t threads) {
  std::atomic<int64_t> all{0};
  parallel(threads, [&](int thread, int team) {
    const Range range = split(bytes / 8, thread, team, 64);
    int64_t seen[32] = {};
    for (int64_t i = range.begin; i + 32 <= range.end; i += 32) {
      __builtin_prefetch(address + i + 1024);
      __builtin_prefetch(address + i + 1032);
      __builtin_prefetch(address + i + 1040);
      __builtin_prefetch(address + i + 1048);
      for (int64_t lane = 0; lane < 32; ++lane) seen[lane] |= address[i + lane];
    }
    for (const int64_t value : seen) all |= value;
  });
  return all;
}

// `count` times four independent 16 x 16 x 32 bf16 tile products on every thread, operands in registers; returns the
// floating-point operations done, 0 without AMX.
TANDEM_EXPORT int64_t tandem_tile_products(const void* operands, int64_t count, int64_t threads) {
#if defined(TANDEM_AMX) && defined(__AMX_BF16__)
  std::atomic<int64_t> done{0};
  parallel(threads, [&](int, int) {
    amx::configure(16, 16);
    const char* tiles = static_cast<const char*>(operands);
    _tile_loadd(4, tiles, 64);
    _tile_loadd(5, tiles + 1024, 64);
    _tile_loadd(6, tiles + 2048, 64);
    _tile_loadd(7, tiles + 3072, 64);
    amx::zero<true>();
    for (int64_t i = 0; i < count; ++i) {
      amx::Bf16Dot::upper_left();
      amx::Bf16Dot::upper_right();
      amx::Bf16Dot::lower_left();
      amx::Bf16Dot::lower_right();
    }
    _tile_release();
    done += count * 4 * (2 * 16 * 16 * 32);
  });
  return done;
#else
  (void)operands;
  (void)count;
  (void)threads;
  return 0;
#endif
}
