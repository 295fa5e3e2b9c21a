// Keys and values as int8 codes with a float scale per token and head; engine/kv_storage/kv_codes.py defines them.
#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace tandem {

// One layer: blocks of [2, num_kv_heads, block_size] codes of a head and as many scales, each at its own stride.
struct Int8Layer {
  int8_t* codes;
  float* scales;
  int64_t code_stride;   // bytes from block to block
  int64_t scale_stride;  // floats from block to block
};

// Sixteen codes as floats. Spelt out because gcc 12 widens eight-bit vectors one by one.
TANDEM_INLINE Floats load_codes(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256 halves[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
                            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
  Floats x;
  std::memcpy(&x, halves, sizeof x);
  return x;
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = float(from[i]);
  return x;
#endif
}

// The first `count` of them, zeros beyond.
TANDEM_INLINE Floats load_codes(const int8_t* from, int64_t count) {
  if (count >= kLanes) return load_codes(from);
  int8_t padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
  return load_codes(padded);
}

// Nearest integers of sixteen values within the range of codes, ties to even.
TANDEM_INLINE void round_codes(Floats x, int8_t* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x)));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = int8_t(std::nearbyint(x[i]));
#endif
}

// Codes of one head's finite vector; the scale that goes with them.
TANDEM_INLINE float store_codes(const float* values, int64_t size, int8_t* codes) {
  Floats peaks = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats x = load_some(values + i, size - i);
    peaks = larger(peaks, x < 0.0f ? -x : x);
  }
  const float peak = maximum(peaks);
  const float factor = peak > 1e-30f ? 127.0f / peak : 0.0f;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats scaled = load_some(values + i, size - i) * factor;
    if (size - i >= kLanes) {
      round_codes(scaled, codes + i);
    } else {
      int8_t rounded[kLanes];
      round_codes(scaled, rounded);
      for (int64_t j = 0; j < size - i; ++j) codes[i + j] = rounded[j];
    }
  }
  return peak / 127.0f;
}

}  // namespace tandem
