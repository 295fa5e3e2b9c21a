// AVX-512 pieces shared by the kernels: bf16 conversion, exp, SiLU.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define TANDEM_AVX512 1
#include <immintrin.h>

#include <cstdint>

namespace tandem {

inline __m512 bf16_to_float(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Rounds to nearest even, as torch does; a NaN stays a NaN.
inline __m256i float_to_bf16(__m512 value) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(value);
#else
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i chosen = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
#endif
}

// Thirty-two of them: `low` fills the first half.
inline __m512i floats_to_bf16(__m512 low, __m512 high) {
#ifdef __AVX512BF16__
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(float_to_bf16(low)), float_to_bf16(high), 1);
#endif
}

// x * sigmoid(x) with a relative error below 2e-4, for results that are rounded to bf16. e^-x = 2^n e^r with
// |r| <= ln 2 / 2 and a Taylor polynomial of e^r. It stops at e^-86: less would be denormal, which costs hundreds of
// cycles, and is nothing beside 1. A NaN passes through, since min and max return their second operand for one.
inline __m512 silu512(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 y = _mm512_sub_ps(_mm512_setzero_ps(), x);
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-86.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), y));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), clamped);
  __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(1.0f / 24), _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, one);
  p = _mm512_fmadd_ps(p, r, one);
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(one, _mm512_scalef_ps(p, n))));
}

}  // namespace tandem
#endif
