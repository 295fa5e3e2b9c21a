// Weights as codes of floats, of which 64 neighbours of a column's depth share a scale. They are made floats, each the
// very product of value and scale that the stored form stands for, and multiplied as these: by rows that are not
// rounded.
#pragma once

#include <algorithm>
#include <cstring>

#include "lines.h"
#include "parallel.h"

namespace tandem {

#ifdef TANDEM_GROUP_PRODUCTS

// Floats of eight bits with four of exponent and three of mantissa. A half has the same bits in other places, and its
// exponent counts from 8 lower: what it is taken for is 256 times smaller, subnormal numbers too. No code may be a NaN.
class Float8Codes {
 public:
  static constexpr int64_t kBits = 8;
  static constexpr float kScale = 256.0f;  // times which scales are stored

  explicit Float8Codes(const float*) {}

  // The columns of register `i` of 32 codes.
  TANDEM_INLINE Register columns(const Float8Codes&, const char* codes, int i) {
    const char* const from = codes + i * kRegisterLanes;
#if defined(__AVX512F__)
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)), 7);
    return (Register)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
#else
    const __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x80)), 8);
    const __m128i rest = _mm_slli_epi16(_mm_and_si128(words, _mm_set1_epi16(0x7f)), 7);
    return (Register)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
#endif
  }

  static uint8_t read(const uint8_t* row, int64_t k) { return row[k]; }
  static int64_t row_bytes(int64_t depth) { return depth; }
  static void place(char* codes, int64_t column, uint8_t code) { codes[column] = static_cast<char>(code); }
};

// Places in a table of sixteen values. Columns c and c + 16 share a byte.
class TableCodes {
 public:
  static constexpr int64_t kBits = 4;
  static constexpr float kScale = 1.0f;

  explicit TableCodes(const float* table) {
    for (int i = 0; i < kRegisters; ++i) table_[i] = load_register(table + i * kRegisterLanes);
  }

  TANDEM_INLINE Register columns(const TableCodes& self, const char* codes, int i) {
#if defined(__AVX512F__)
    const __m512i places = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    // Only the lowest four bits of a place count.
    return (Register)_mm512_permutexvar_ps(i == 0 ? places : _mm512_srli_epi32(places, 4), (__m512)self.table_[0]);
#else
    const auto* from = reinterpret_cast<const __m128i*>(codes + i % 2 * kRegisterLanes);
    __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
    if (i >= 2) places = _mm256_srli_epi32(places, 4);
    // Of these only the lowest three; the fourth says in which half of the table.
    const __m256 low = _mm256_permutevar8x32_ps((__m256)self.table_[0], places);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)self.table_[1], places);
    return (Register)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
#endif
  }

  static uint8_t read(const uint8_t* row, int64_t k) { return row[k / 2] >> (k % 2 * 4) & 15; }
  static int64_t row_bytes(int64_t depth) { return ceil_div(depth, 2); }
  static void place(char* codes, int64_t column, uint8_t code) {
    codes[column % 16] = static_cast<char>(codes[column % 16] | code << (column / 16 * 4));
  }

 private:
  Register table_[kRegisters];
};

// A panel is groups of 64 of the depth: the codes of 32 columns for each of them, then the columns' scales.
template <class Codes>
struct ScaledCodes {
  using Expanded = FloatLines;
  using Element = float;
  using Sums = FloatSums;
  static constexpr int64_t kDepth = 1;  // of what it is expanded to
  static constexpr int64_t kGroupDepth = 64, kCodesBytes = kPanel * Codes::kBits / 8;
  static constexpr int64_t kScalesAt = kGroupDepth * kCodesBytes, kGroupBytes = kScalesAt + kPanel * 4;

  static int64_t panel_bytes(int64_t depth) { return ceil_div(depth, kGroupDepth) * kGroupBytes; }

  // Lines [k, k + lines) of a panel as floats, [lines][kPanel]; `k` begins a group.
  static void expand(const Linear& w, int64_t panel, int64_t k, int64_t lines, float* to) {
    const Codes codes(w.scales);
    const char* group = w.weights + panel * panel_bytes(w.depth) + k / kGroupDepth * kGroupBytes;
    for (; lines > 0; lines -= kGroupDepth, group += kGroupBytes) {
      Register scales[kLineRegisters];
      std::memcpy(scales, group + kScalesAt, sizeof scales);
      const int64_t count = std::min(kGroupDepth, lines);
      for (int64_t line = 0; line < count; ++line, to += kPanel) {
        const char* const from = group + line * kCodesBytes;
        __builtin_prefetch(from + 2 * kGroupBytes);
#pragma GCC unroll 4
        for (int i = 0; i < kLineRegisters; ++i) {
          store_register(to + i * kRegisterLanes, Codes::columns(codes, from, i) * scales[i]);
        }
      }
    }
  }

  // Packs codes, [rows][depth], and their scales, [rows][groups of `group_size` of the depth]: a multiple of 64, or all.
  static void pack(const uint8_t* codes, const float* scales, int64_t group_size, int64_t columns, int64_t depth,
                   bool gated, char* packed, int64_t threads) {
    const int64_t panels = ceil_div(columns, gated ? kPanel / 2 : kPanel), groups = ceil_div(depth, group_size);
    parallel(threads, [&](int thread, int team) {
      const Range range = split(panels, thread, team);
      for (int64_t panel = range.begin; panel < range.end; ++panel) {
        char* group = packed + panel * panel_bytes(depth);
        std::memset(group, 0, static_cast<size_t>(panel_bytes(depth)));
        for (int64_t begin = 0; begin < depth; begin += kGroupDepth, group += kGroupBytes) {
          for (int64_t column = 0; column < kPanel; ++column) {
            const int64_t row = source_row(columns, gated, panel, column);
            if (row < 0) continue;
            const uint8_t* const from = codes + row * Codes::row_bytes(depth);
            for (int64_t i = 0; i < std::min(kGroupDepth, depth - begin); ++i) {
              Codes::place(group + i * kCodesBytes, column, Codes::read(from, begin + i));
            }
            const float scale = scales[row * groups + begin / group_size] * Codes::kScale;
            std::memcpy(group + kScalesAt + column * 4, &scale, sizeof scale);
          }
        }
      }
    });
  }
};

#else

template <class Codes>
struct ScaledCodes;

#endif

}  // namespace tandem
