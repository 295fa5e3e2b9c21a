// Keys and values as codes, with their scales beside them; engine/kv_storage/kv_codes.py defines both.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace tandem {

// One layer: blocks of [2, num_kv_heads, block_size] lines, each the codes of one head of one token, and as many
// times the words of a line's scales, each at its own stride.
struct CodedLayer {
  uint8_t* codes;
  uint32_t* scales;
  int64_t code_stride;   // bytes from block to block
  int64_t scale_stride;  // words from block to block
};

constexpr float kSmallestPeak = 1e-30f;

TANDEM_INLINE Words load_words(const uint32_t* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// Sixteen bytes as words. Spelt out because gcc 12 widens eight-bit vectors one by one.
template <bool kSigned>
TANDEM_INLINE Words widen_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Words)(kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), high = _mm_srli_si128(low, 8);
  const __m256i halves[2] = {kSigned ? _mm256_cvtepi8_epi32(low) : _mm256_cvtepu8_epi32(low),
                             kSigned ? _mm256_cvtepi8_epi32(high) : _mm256_cvtepu8_epi32(high)};
  Words x;
  std::memcpy(&x, halves, sizeof x);
  return x;
#else
  Words x;
  for (int i = 0; i < kLanes; ++i) x[i] = kSigned ? uint32_t(int32_t(int8_t(from[i]))) : from[i];
  return x;
#endif
}

// The first `count` of them, zeros beyond.
template <bool kSigned>
TANDEM_INLINE Words widen_bytes(const uint8_t* from, int64_t count) {
  if (count >= kLanes) return widen_bytes<kSigned>(from);
  uint8_t padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
  return widen_bytes<kSigned>(padded);
}

// Nearest integers of sixteen values within the range of codes, ties to even.
TANDEM_INLINE void round_codes(Floats x, int8_t* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x)));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = int8_t(std::nearbyint(x[i]));
#endif
}

// A byte for each value, and a float for the whole line.
struct Int8Codes {
  static constexpr int kPerWord = 4;
  static constexpr int64_t kChunk = kLanes;             // values that are read together, at least
  static constexpr int64_t kGroup = int64_t(1) << 32;  // values that share a word of scales: all
  static constexpr bool kHasMinimum = false;

  static int64_t line_bytes(int64_t size) { return size; }
  static int64_t num_groups(int64_t) { return 1; }
  TANDEM_INLINE Floats scale(Words words) { return (Floats)words; }
  TANDEM_INLINE Floats minimum(Words) { return Floats{}; }

  // A value of what `unpack` and `load_codes` give.
  TANDEM_INLINE Floats restore(Floats x, Words words) { return x * scale(words); }

  // The codes in place `index` of sixteen words.
  TANDEM_INLINE Floats unpack(Words words, int index) {
    return __builtin_convertvector((Ints)(words << (24 - 8 * index)) >> 24, Floats);
  }

  // 16 N codes of a line from `dim` on, zeros beyond `size`.
  template <int N>
  TANDEM_INLINE void load_codes(const uint8_t* line, int64_t dim, int64_t size, Floats* codes) {
    for (int n = 0; n < N; ++n) {
      const uint8_t* from = line + dim + n * kLanes;
      const Words words = N > 1 ? widen_bytes<true>(from) : widen_bytes<true>(from, size - dim);
      codes[n] = __builtin_convertvector((Ints)words, Floats);
    }
  }

  // From the order of `load_codes` to that of the values.
  TANDEM_INLINE void order(Floats*) {}

  // Codes of a line of finite values, and its scale.
  TANDEM_INLINE void store(const float* values, int64_t size, uint8_t* line, uint32_t* scales) {
    Floats peaks = {};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats x = load_some(values + i, size - i);
      peaks = larger(peaks, x < 0.0f ? -x : x);
    }
    const float peak = maximum(peaks), scale = peak / 127.0f;
    const float factor = peak > kSmallestPeak ? 127.0f / peak : 0.0f;
    for (int64_t i = 0; i < size; i += kLanes) {
      int8_t rounded[kLanes];
      round_codes(load_some(values + i, size - i) * factor, rounded);
      std::memcpy(line + i, rounded, size_t(std::min<int64_t>(kLanes, size - i)));
    }
    std::memcpy(scales, &scale, sizeof scale);
  }
};

// Two values in a byte, the first in its lower half; for each 64 values a word: the step between codes in bfloat16, and
// in the upper half the value of code 0.
//
// A code is unpacked to 1 + code / 16 by putting its bits below those of 1.0: one operation for any unit of the
// processor, where masking and converting take two, and looking up competes with shifts. The scale and the minimum that
// attention applies make up for it.
struct Int4Codes {
  static constexpr int kPerWord = 8;
  static constexpr int64_t kChunk = 2 * kLanes;
  static constexpr int64_t kGroup = 64;
  static constexpr bool kHasMinimum = true;
  static constexpr float kLargestCode = 15.0f;
  static constexpr float kLargestMinimum = 0x1.fep127f;  // of bfloat16

  static int64_t line_bytes(int64_t size) { return size / 2; }
  static int64_t num_groups(int64_t size) { return (size + kGroup - 1) / kGroup; }
  TANDEM_INLINE Floats scale(Words words) { return step_of(words) * 16.0f; }
  TANDEM_INLINE Floats minimum(Words words) { return zero_of(words) - scale(words); }

  // Exact but for the sum's rounding.
  TANDEM_INLINE Floats restore(Floats x, Words words) {
    return fused(x * 16.0f - 16.0f, step_of(words), zero_of(words));
  }

  TANDEM_INLINE Floats unpack(Words words, int index) {
    const int left = 19 - 4 * index;
    const Words shifted = left > 0 ? words << left : words >> -left;
#if defined(__AVX512F__)
    const __m512i mask = _mm512_set1_epi32(15 << 19), one = _mm512_set1_epi32(0x3f800000);
    return (Floats)_mm512_ternarylogic_epi32((__m512i)shifted, mask, one, 0xea);  // and, or
#else
    return (Floats)((shifted & (15 << 19)) | 0x3f800000);
#endif
  }

  // Of each 32 values, first those in even places, then those in odd ones.
  template <int N>
  TANDEM_INLINE void load_codes(const uint8_t* line, int64_t dim, int64_t size, Floats* codes) {
    for (int n = 0; n < N; n += 2) {
      const uint8_t* from = line + (dim + n * kLanes) / 2;
      const Words bytes = N > 2 ? widen_bytes<false>(from) : widen_bytes<false>(from, (size - dim) / 2);
      codes[n] = unpack(bytes, 0);
      codes[n + 1] = unpack(bytes, 1);
    }
  }

  TANDEM_INLINE void order(Floats* x) {
    const Floats even = x[0], odd = x[1];
    x[0] = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    x[1] = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }

  TANDEM_INLINE void store(const float* values, int64_t size, uint8_t* line, uint32_t* scales) {
    for (int64_t begin = 0; begin < size; begin += kGroup)
      store_group(values + begin, std::min(kGroup, size - begin), line + begin / 2, scales + begin / kGroup);
  }

 private:
  TANDEM_INLINE void store_group(const float* values, int64_t size, uint8_t* to, uint32_t* word) {
    Floats high = splat(values[0]), low = -high;  // the lowest, negated
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats some = load_some(values + i, size - i);
      const Floats x = kLaneIndex < int32_t(size - i) ? some : splat(values[0]);
      high = larger(high, x);
      low = larger(low, -x);
    }
    const float lowest = std::max(-maximum(low), -kLargestMinimum);
    const float zero = std::fabs(lowest) > kSmallestPeak ? nearest(std::min(lowest, kLargestMinimum)) : 0.0f;
    const float range = maximum(high) / kLargestCode - zero / kLargestCode;
    const float step = range > kSmallestPeak ? nearest(range) : 0.0f;
    const float factor = step > 0.0f ? 1.0f / step : 0.0f;
    int8_t codes[kGroup];
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats x = (load_some(values + i, size - i) - zero) * factor;
      const Floats positive = x > 0.0f ? x : Floats{};
      round_codes(positive < kLargestCode ? positive : splat(kLargestCode), codes + i);
    }
    for (int64_t i = 0; i < size / 2; ++i) to[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    *word = bits(step) >> 16 | bits(zero);
  }

  TANDEM_INLINE Floats step_of(Words words) { return (Floats)(words << 16); }
  TANDEM_INLINE Floats zero_of(Words words) { return (Floats)(words & 0xffff0000u); }

  TANDEM_INLINE uint32_t bits(float x) {
    uint32_t found;
    std::memcpy(&found, &x, sizeof found);
    return found;
  }

  // The nearest bfloat16, ties to even.
  TANDEM_INLINE float nearest(float x) {
    const uint32_t rounded = (bits(x) + 0x7fff + (bits(x) >> 16 & 1)) & 0xffff0000u;
    float found;
    std::memcpy(&found, &rounded, sizeof found);
    return found;
  }
};

}  // namespace tandem
