// CRC-32 as in zlib: its polynomial, its tables, and the multipliers that carry a remainder over a distance.
//
// Bits are reflected throughout: the first bit of a message, its highest power of x, is the lowest bit of a byte. Eight
// bytes a and eight bytes b, multiplied without carries, are a * b * x in that order of bits, so multipliers are made
// for one power less than the distance. See V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel, 2009, whose method this follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tandem {

constexpr uint32_t kPolynomial = 0x04C11DB7;  // x^32 and, bit by bit, the lower powers

constexpr uint32_t reflected(uint32_t value) {
  uint32_t result = 0;
  for (int bit = 0; bit < 32; ++bit) result |= (value >> bit & 1) << (31 - bit);
  return result;
}

// x^n modulo the polynomial, as the factor of a 64-bit carry-less multiplication.
constexpr uint64_t power_of_x(int n) {
  uint32_t remainder = 1;
  for (int i = 0; i < n; ++i) remainder = remainder << 1 ^ (remainder >> 31 ? kPolynomial : 0);
  return static_cast<uint64_t>(reflected(remainder)) << 32;
}

// What sixteen bytes are multiplied with to count `bits` further on: the first eight, and the last eight.
struct Fold {
  uint64_t first, last;
};

constexpr Fold fold_by(int bits) { return {power_of_x(bits + 63), power_of_x(bits - 1)}; }

constexpr int kSlices = 16;

struct Tables {
  uint32_t of[kSlices][256];
};

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? reflected(kPolynomial) : 0);
    tables.of[0][byte] = value;
  }
  for (int slice = 1; slice < kSlices; ++slice)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables.of[slice - 1][byte];
      tables.of[slice][byte] = before >> 8 ^ tables.of[0][before & 255];
    }
  return tables;
}

inline constexpr Tables kTables = make_tables();

// The state after sixteen further bytes; a state is the complement of a checksum.
inline uint32_t after_16(uint32_t state, const uint8_t* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < kSlices; ++i) {
    const uint32_t byte = i < 4 ? bytes[i] ^ (state >> 8 * i & 255) : bytes[i];
    value ^= kTables.of[kSlices - 1 - i][byte];
  }
  return value;
}

inline uint32_t after_few(uint32_t state, const uint8_t* bytes, size_t count) {
  for (; count >= 16; bytes += 16, count -= 16) state = after_16(state, bytes);
  for (; count; ++bytes, --count) state = state >> 8 ^ kTables.of[0][(state ^ *bytes) & 255];
  return state;
}

}  // namespace tandem
