// Sixteen lanes of float in GCC's vector extensions: any instruction set, split by the compiler where registers are
// narrower. Loads and stores convert from and to the storage types float and Bfloat16.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace tandem {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));

struct Bfloat16 {
  uint16_t bits;
};

#define TANDEM_INLINE static inline __attribute__((always_inline, unused))

constexpr Ints kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

TANDEM_INLINE Floats splat(float x) { return x - Floats{}; }

// a * b + c, rounded once where the processor can. Spelt out because the compiler would fuse here and not there, even
// between the unrolled copies of one loop, and rows of a tile must get the same arithmetic wherever they stand.
TANDEM_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  __m256 x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  std::memcpy(z, &c, sizeof z);
  for (int i = 0; i < 2; ++i) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof z);
  return c;
#else
  return a * b + c;
#endif
}

TANDEM_INLINE Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

TANDEM_INLINE Floats load(const Bfloat16* from) {
  Shorts bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

TANDEM_INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// Rounds to nearest, ties to even; a NaN stays one. AVX512_BF16 takes what is below 2^-126 for zero.
TANDEM_INLINE void store(Bfloat16* to, Floats x) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = x == x ? rounded : (bits >> 16) | 0x40;
  const Shorts narrow = __builtin_convertvector(rounded, Shorts);
#endif
  std::memcpy(to, &narrow, sizeof narrow);
}

// Thirty-two in a row; `low` comes first.
TANDEM_INLINE void store_two(float* to, Floats low, Floats high) {
  store(to, low);
  store(to + kLanes, high);
}

TANDEM_INLINE void store_two(Bfloat16* to, Floats low, Floats high) {
#if defined(__AVX512BF16__)
  const __m512bh narrow = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  std::memcpy(to, &narrow, sizeof narrow);
#else
  store(to, low);
  store(to + kLanes, high);
#endif
}

// The first `count` lanes, zeros beyond: what lies behind the end is neither read nor written.
template <class T>
TANDEM_INLINE Floats load_some(const T* from, int64_t count) {
  if (count >= kLanes) return load(from);
  T padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
  return load(padded);
}

template <class T>
TANDEM_INLINE void store_some(T* to, Floats x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  T padded[kLanes];
  store(padded, x);
  for (int64_t i = 0; i < count; ++i) to[i] = padded[i];
}

#define TANDEM_FOLD(x, op)                                                                       \
  x = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
  x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
  x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))

TANDEM_INLINE Floats add(Floats a, Floats b) { return a + b; }

// Lanes where either is a NaN take `b`.
TANDEM_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Sum of all lanes, in one fixed order.
TANDEM_INLINE float sum(Floats x) {
  TANDEM_FOLD(x, add);
  return x[0];
}

TANDEM_INLINE float maximum(Floats x) {
  TANDEM_FOLD(x, larger);
  return x[0];
}

// 2^x for x of at most 127, relative error below 2e-7, or 1.1e-4 where the result is rounded to bfloat16 in any case;
// exactly 1 at 0, exactly 0 far below -125, NaN at NaN.
// x is split into an integer and a rest within [-0.5, 0.5]; the polynomial is a minimax fit with constant term 1.
template <bool kCoarse = false>
TANDEM_INLINE Floats exp2_of(Floats x) {
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, 8);
#else
  const Ints vanishes = x < -125.0f;
  x = vanishes ? splat(-125.0f) : x;
  const Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest integer
  const Floats whole = shifted - 12582912.0f;
#endif
  const Floats rest = x - whole;
  Floats y;
  if constexpr (kCoarse) {
    y = fused(rest, splat(0x1.c2a218p-5f), splat(0x1.f00c4ep-3f));
    y = fused(y, rest, splat(0x1.62f5fap-1f));
  } else {
    y = fused(rest, splat(0x1.5bba12p-10f), splat(0x1.3cea88p-7f));
    y = fused(y, rest, splat(0x1.c6b752p-5f));
    y = fused(y, rest, splat(0x1.ebf9bcp-3f));
    y = fused(y, rest, splat(0x1.62e42ap-1f));
  }
  y = fused(y, rest, splat(1.0f));
#if defined(__AVX512F__)
  // Zero for what would be denormal: hundreds of cycles in microcode otherwise, for every vector with a hidden key.
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)whole);
#else
  const Floats power = (Floats)(((Ints)shifted << 23) + 0x3f800000);
  return vanishes ? Floats{} : y * power;
#endif
}

// Swaps, in every 2 x 2 arrangement of S x S sub-blocks, the two off the diagonal.
template <int S>
TANDEM_INLINE void exchange(Words* rows) {
  constexpr auto low = [](int j) { return (j & S) ? 16 + j - S : j; };
  constexpr auto high = [](int j) { return (j & S) ? 16 + j : j + S; };
  for (int i = 0; i < kLanes; ++i) {
    if (i & S) continue;
    const Words a = rows[i], b = rows[i + S];
    rows[i] = __builtin_shufflevector(a, b, low(0), low(1), low(2), low(3), low(4), low(5), low(6), low(7), low(8),
                                      low(9), low(10), low(11), low(12), low(13), low(14), low(15));
    rows[i + S] = __builtin_shufflevector(a, b, high(0), high(1), high(2), high(3), high(4), high(5), high(6), high(7),
                                          high(8), high(9), high(10), high(11), high(12), high(13), high(14), high(15));
  }
}

// Transposes 16 x 16 words in place.
TANDEM_INLINE void transpose(Words* rows) {
  exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

#if defined(__AVX512F__)
// The first `count` of 32 lanes.
TANDEM_INLINE __mmask32 mask32(int64_t count) {
  return count <= 0 ? 0 : count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
}
#endif

}  // namespace tandem
