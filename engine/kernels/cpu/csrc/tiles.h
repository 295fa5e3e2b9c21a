// The AMX tile registers.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define TANDEM_AMX 1

#include <immintrin.h>

#include <cstdint>

namespace tandem {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 1024;

// Tile registers, all 16 rows of 64 bytes, for as long as it lives.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" ::: "memory");
    _tile_loadconfig(&config);
    asm volatile("" ::: "memory");  // gcc does not know that tile instructions depend on it
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace tandem

#else
#define TANDEM_AMX 0
#endif
