// Sixteen lanes of float in GCC's vector extensions: any instruction set, split by the compiler where registers are
// narrower. Loads and stores convert from and to the storage types float and Bfloat16.
//
// Where registers are narrower, GCC keeps arrays of Floats in memory, so loops whose sums must stay in registers are
// written with Register, which is as wide as the processor's.
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

#if defined(__AVX512F__)
#define TANDEM_REGISTER_BYTES 64
#elif defined(__AVX2__)
#define TANDEM_REGISTER_BYTES 32
#else
#define TANDEM_REGISTER_BYTES 16
#endif
typedef float Register __attribute__((vector_size(TANDEM_REGISTER_BYTES)));
typedef int32_t RegisterInts __attribute__((vector_size(TANDEM_REGISTER_BYTES)));
typedef uint32_t RegisterBits __attribute__((vector_size(TANDEM_REGISTER_BYTES)));
constexpr int kRegisterLanes = TANDEM_REGISTER_BYTES / 4;
constexpr int kRegisters = kLanes / kRegisterLanes;  // that hold sixteen lanes

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

#define TANDEM_INLINE static inline __attribute__((always_inline, unused))

constexpr Ints kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

TANDEM_INLINE Floats splat(float x) { return x - Floats{}; }

TANDEM_INLINE Register splat_register(float x) { return x - Register{}; }

TANDEM_INLINE Register load_register(const float* from) {
  Register x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

TANDEM_INLINE Register load_register(const Bfloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(TANDEM_REGISTER_BYTES / 2)));
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Register)(__builtin_convertvector(bits, RegisterBits) << 16);
}

#ifdef __F16C__
TANDEM_INLINE Register load_register(const Float16* from) {
#if defined(__AVX512F__)
  return (Register)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return (Register)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

// To the nearest, ties to even.
TANDEM_INLINE Float16 to_half(float x) { return {static_cast<uint16_t>(_cvtss_sh(x, 0))}; }

TANDEM_INLINE float from_half(Float16 x) { return _cvtsh_ss(x.bits); }
#endif

TANDEM_INLINE void store_register(float* to, Register x) { std::memcpy(to, &x, sizeof x); }

// a * b + c, rounded once where the processor can. Spelt out because the compiler would fuse here and not there, even
// between the unrolled copies of one loop, and rows of a tile must get the same arithmetic wherever they stand.
TANDEM_INLINE Register fused_register(Register a, Register b, Register c) {
#if defined(__AVX512F__)
  return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

TANDEM_INLINE Floats fused(Floats a, Floats b, Floats c) {
  Register x[kRegisters], y[kRegisters], z[kRegisters];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  std::memcpy(z, &c, sizeof z);
  for (int i = 0; i < kRegisters; ++i) z[i] = fused_register(x[i], y[i], z[i]);
  std::memcpy(&c, z, sizeof z);
  return c;
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

#ifdef __F16C__
TANDEM_INLINE Floats load(const Float16* from) {
  Register x[kRegisters];
  for (int i = 0; i < kRegisters; ++i) x[i] = load_register(from + i * kRegisterLanes);
  Floats result;
  std::memcpy(&result, x, sizeof result);
  return result;
}

// To the nearest, ties to even.
TANDEM_INLINE void store(Float16* to, Floats x) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &narrow, sizeof narrow);
#else
  __m256 halves[2];
  std::memcpy(halves, &x, sizeof halves);
  const __m128i narrow[2] = {_mm256_cvtps_ph(halves[0], _MM_FROUND_TO_NEAREST_INT),
                             _mm256_cvtps_ph(halves[1], _MM_FROUND_TO_NEAREST_INT)};
  std::memcpy(to, narrow, sizeof narrow);
#endif
}
#endif

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
TANDEM_INLINE Register load_register_some(const T* from, int64_t count) {
  if (count >= kRegisterLanes) return load_register(from);
  T padded[kRegisterLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
  return load_register(padded);
}

template <class T>
TANDEM_INLINE void store_some(T* to, Floats x, int64_t count) {
  if (count >= kLanes) return store(to, x);
  T padded[kLanes];
  store(padded, x);
  for (int64_t i = 0; i < count; ++i) to[i] = padded[i];
}

// Folds the lanes of one register, the farthest apart first.
#if TANDEM_REGISTER_BYTES == 64
#define TANDEM_FOLD(x, op)                                                                       \
  x = op(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)); \
  x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)); \
  x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)); \
  x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))
#elif TANDEM_REGISTER_BYTES == 32
#define TANDEM_FOLD(x, op)                                               \
  x = op(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3)); \
  x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5)); \
  x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6))
#else
#define TANDEM_FOLD(x, op)                               \
  x = op(x, __builtin_shufflevector(x, x, 2, 3, 0, 1)); \
  x = op(x, __builtin_shufflevector(x, x, 1, 0, 3, 2))
#endif

TANDEM_INLINE Register add(Register a, Register b) { return a + b; }

// Lanes where either is a NaN take `b`.
TANDEM_INLINE Register larger(Register a, Register b) { return a > b ? a : b; }

#if TANDEM_REGISTER_BYTES < 64
TANDEM_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
#endif

template <Register (*op)(Register, Register)>
TANDEM_INLINE float fold(const Register* parts) {
  Register x[kRegisters];
  for (int i = 0; i < kRegisters; ++i) x[i] = parts[i];
  for (int half = kRegisters / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = op(x[i], x[i + half]);
  TANDEM_FOLD(x[0], op);
  return x[0][0];
}

// Sum of all lanes, in one order on every processor: those eight apart, then four, two and one.
TANDEM_INLINE float sum(Floats x) {
  Register parts[kRegisters];
  std::memcpy(parts, &x, sizeof parts);
  return fold<add>(parts);
}

TANDEM_INLINE float maximum(const Register* parts) { return fold<larger>(parts); }

TANDEM_INLINE float maximum(Floats x) {
  Register parts[kRegisters];
  std::memcpy(parts, &x, sizeof parts);
  return maximum(parts);
}

// 2^x for x of at most 127, relative error below 2e-7, or 1.1e-4 where the result is rounded to bfloat16 in any case;
// exactly 1 at 0, exactly 0 far below -125, NaN at NaN.
// x is split into an integer and a rest within [-0.5, 0.5]; the polynomial is a minimax fit with constant term 1.
template <bool kCoarse = false>
TANDEM_INLINE Register exp2_register(Register x) {
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Register whole = (Register)_mm512_roundscale_ps((__m512)x, 8);
#else
  const RegisterInts vanishes = x < -125.0f;
  x = vanishes ? splat_register(-125.0f) : x;
  const Register shifted = x + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest integer
  const Register whole = shifted - 12582912.0f;
#endif
  const Register rest = x - whole;
  Register y;
  if constexpr (kCoarse) {
    y = fused_register(rest, splat_register(0x1.c2a218p-5f), splat_register(0x1.f00c4ep-3f));
    y = fused_register(y, rest, splat_register(0x1.62f5fap-1f));
  } else {
    y = fused_register(rest, splat_register(0x1.5bba12p-10f), splat_register(0x1.3cea88p-7f));
    y = fused_register(y, rest, splat_register(0x1.c6b752p-5f));
    y = fused_register(y, rest, splat_register(0x1.ebf9bcp-3f));
    y = fused_register(y, rest, splat_register(0x1.62e42ap-1f));
  }
  y = fused_register(y, rest, splat_register(1.0f));
#if defined(__AVX512F__)
  // Zero for what would be denormal: hundreds of cycles in microcode otherwise, for every vector with a hidden key.
  return (Register)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)whole);
#else
  const Register power = (Register)(((RegisterInts)shifted << 23) + 0x3f800000);
  return vanishes ? Register{} : y * power;
#endif
}

template <bool kCoarse = false>
TANDEM_INLINE Floats exp2_of(Floats x) {
  Register parts[kRegisters];
  std::memcpy(parts, &x, sizeof parts);
  for (int i = 0; i < kRegisters; ++i) parts[i] = exp2_register<kCoarse>(parts[i]);
  std::memcpy(&x, parts, sizeof parts);
  return x;
}

#if TANDEM_REGISTER_BYTES == 32
// Transposes 8 x 8 words in registers.
TANDEM_INLINE void transpose8(Register* rows) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = (Register)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    rows[i + 4] = (Register)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

// Transposes 16 x 16 words in place, by its four blocks of 8 x 8.
TANDEM_INLINE void transpose(Words* rows) {
  float* corner = reinterpret_cast<float*>(rows);
  const auto load8 = [&](int row, int column, Register* block) {
    for (int i = 0; i < 8; ++i) block[i] = load_register(corner + (row + i) * kLanes + column);
    transpose8(block);
  };
  const auto store8 = [&](int row, int column, const Register* block) {
    for (int i = 0; i < 8; ++i) store_register(corner + (row + i) * kLanes + column, block[i]);
  };
  Register block[8], other[8];
  load8(0, 0, block);
  store8(0, 0, block);
  load8(8, 8, block);
  store8(8, 8, block);
  load8(0, 8, block);
  load8(8, 0, other);
  store8(0, 8, other);
  store8(8, 0, block);
}
#else
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
#endif

#if defined(__AVX512F__)
// The first `count` of 32 lanes.
TANDEM_INLINE __mmask32 mask32(int64_t count) {
  return count <= 0 ? 0 : count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
}
#endif

}  // namespace tandem
