// Lines of packed weights: one or a few elements of the depth for each of the 32 columns of a panel, in the order in
// which one instruction multiplies them.
#pragma once

#include <cstring>

#include "linear.h"
#include "parallel.h"
#include "vectors.h"

namespace tandem {

constexpr int kLineRegisters = kPanel / kRegisterLanes;

// Neighbours of a row that are multiplied together.
struct Pair {
  Bfloat16 low, high;
};

struct UnitPair {
  int16_t units[2];
};

struct UnitQuad {
  int8_t units[4];
};

constexpr int64_t kGroup = 32;  // neighbours that share a scale, in weights of groups and in the rows that they multiply

struct UnitGroup {
  int8_t units[kGroup];
  float scale;
  int16_t sums[2];  // of the units of each half

  int32_t sum() const { return sums[0] + sums[1]; }
};

// A group of one column of weights, before it is packed.
struct CodeGroup {
  uint8_t codes[kGroup];
  uint8_t zero;
  Float16 scales[2], offset;  // the second scale: of the second half, where halves have their own
};

// Writes the words of a line's columns as they are multiplied.
template <class Lines>
void expand_line(const char* line, char* to) {
#pragma GCC unroll 8
  for (int i = 0; i < kLineRegisters; ++i, to += TANDEM_REGISTER_BYTES) {
    const Register words = Lines::columns(line, i);
    std::memcpy(to, &words, sizeof words);
  }
}

// How a line is stored, what it is multiplied by, and its columns in registers.
struct FloatLines {
  using Stored = float;
  using Expanded = FloatLines;  // for many rows
  using Element = float;        // of a row, that a line is multiplied by
  using Sum = Register;         // in a type of its own: GCC copies registers whose type changes
  using Sums = FloatSums;
  static constexpr int64_t kDepth = 1;
  static constexpr int64_t kBytes = kPanel * 4;

  // The columns of register `i`.
  TANDEM_INLINE Register columns(const char* line, int i) {
    return load_register(reinterpret_cast<const float*>(line) + i * kRegisterLanes);
  }

  TANDEM_INLINE Register splat(const float* x) { return splat_register(*x); }

  TANDEM_INLINE Register multiply_add(Register x, Register weights, Register sum) {
    return fused_register(x, weights, sum);
  }

  // Position of a column within its line.
  static int64_t position(int64_t column) { return column; }
};

// Columns c and c + 16 share a word: one instruction makes either of them a float.
struct Bfloat16Lines : FloatLines {
  using Stored = uint16_t;
  static constexpr int64_t kBytes = kPanel * 2;

  TANDEM_INLINE Register columns(const char* line, int i) {
    constexpr int kHalf = kLineRegisters / 2;
    RegisterBits words;
    std::memcpy(&words, line + i % kHalf * static_cast<int64_t>(sizeof words), sizeof words);
    return (Register)(i < kHalf ? words << 16 : words & 0xffff0000u);
  }

  static void expand(const char* line, char* to) { expand_line<Bfloat16Lines>(line, to); }

  static int64_t position(int64_t column) { return column % 16 * 2 + column / 16; }
};

// A word of each column, which is multiplied by a word of the row.
struct WordLines {
  static constexpr int64_t kBytes = kPanel * 4;

  TANDEM_INLINE Register columns(const char* line, int i) {
    Register words;
    std::memcpy(&words, line + i * static_cast<int64_t>(sizeof words), sizeof words);
    return words;
  }

  TANDEM_INLINE Register splat(const void* x) {
    int32_t word;
    std::memcpy(&word, x, sizeof word);
    return (Register)(word - RegisterInts{});
  }
};

#ifdef __AVX512BF16__
// One instruction adds the products of two elements. It takes what is below 2^-126 for zero.
struct Bfloat16Pairs : WordLines {
  using Stored = uint16_t;
  using Expanded = Bfloat16Pairs;
  using Element = Pair;
  using Sum = Register;
  using Sums = FloatSums;
  static constexpr int64_t kDepth = 2;

  TANDEM_INLINE Register multiply_add(Register x, Register weights, Register sum) {
    return (Register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
  }

  static int64_t position(int64_t column) { return column * 2; }
};
#endif

#ifdef __AVX512VNNI__
// One instruction adds the products of four elements, unsigned ones by signed ones. So weights are stored with their
// sign turned over, which is 128 more, and a row's sums begin 128 times the sum of the row lower. Sums wrap around, so
// they are exact if only the last one fits.
struct Int8Quads : WordLines {
  using Stored = int8_t;
  using Expanded = Int8Quads;
  using Element = UnitQuad;
  using Sum = RegisterInts;
  using Sums = IntSums;
  static constexpr int64_t kDepth = 4;
  static constexpr int8_t kTurned = -128;  // exclusive or with weights

  TANDEM_INLINE RegisterInts multiply_add(Register x, Register weights, RegisterInts sum) {
    return (RegisterInts)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
  }

  static int64_t position(int64_t column) { return column * 4; }
};
#endif

#if defined(__AVX2__) && (!defined(__AVX512F__) || defined(__AVX512BW__))
#define TANDEM_SHORT_PRODUCTS 1

// Two elements as short integers, whose products cannot overflow.
struct Int16Pairs : WordLines {
  using Element = UnitPair;
  using Sum = RegisterInts;
  using Sums = IntSums;
  static constexpr int64_t kDepth = 2;

  TANDEM_INLINE RegisterInts multiply_add(Register x, Register weights, RegisterInts sum) {
#if defined(__AVX512F__)
    const auto products = (RegisterInts)_mm512_madd_epi16((__m512i)x, (__m512i)weights);
#else
    const auto products = (RegisterInts)_mm256_madd_epi16((__m256i)x, (__m256i)weights);
#endif
    return sum + products;
  }
};

struct Int8Pairs : Int16Pairs {
  using Stored = int8_t;
  using Expanded = Int16Pairs;
  static constexpr int64_t kBytes = kPanel * 2;
  static constexpr int8_t kTurned = 0;

  TANDEM_INLINE Register columns(const char* line, int i) {
    const char* const from = line + i * (TANDEM_REGISTER_BYTES / 2);
#if defined(__AVX512F__)
    return (Register)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return (Register)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  }

  static void expand(const char* line, char* to) { expand_line<Int8Pairs>(line, to); }

  static int64_t position(int64_t column) { return column * 2; }
};
#endif

#if defined(__AVX2__) && defined(__F16C__) && (!defined(__AVX512F__) || defined(__AVX512BW__))
#define TANDEM_GROUP_PRODUCTS 1

// What a group's codes are relative to.
enum class Centre {
  kMiddle,   // the middle code, for all groups
  kZeros,    // a code that is stored for each group and column
  kOffsets,  // the middle code, and a stored number is added to each product of code and scale
};

// Sums of a group's products of unsigned codes and signed units of a row, in integers.
template <int bits>
struct GroupSums {
  using Sum = Register;
  using Sums = FloatSums;
  using Element = UnitGroup;
  static constexpr int64_t kDepth = kGroup;
  static constexpr int kQuads = kGroup / 4, kMiddle = 1 << (bits - 1);

#ifdef __AVX512VNNI__
  static constexpr int kAbove = 0;  // how much higher the codes are than what is multiplied

  TANDEM_INLINE RegisterInts multiply_add(Register x, Register codes, RegisterInts sum) {
    return (RegisterInts)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
  }

  TANDEM_INLINE RegisterInts total(RegisterInts sums) { return sums; }
#else
  // Neighbours are added as short integers, which may not overflow: 16 products of at most 15 by 128 fit; of eight bits
  // only two do, and only if the codes are signed too.
  static constexpr int kAbove = bits == 4 ? 0 : 128;

  TANDEM_INLINE RegisterInts multiply_add(Register x, Register codes, RegisterInts sum) {
    if constexpr (bits == 4) return add_shorts(sum, products(codes, x));
    const auto weights = (Register)((RegisterBits)codes ^ 0x80808080u);
#ifdef __AVX512F__
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)weights);
    const __m512i signs = _mm512_mask_sub_epi8((__m512i)x, negative, __m512i{}, (__m512i)x);
    return sum + pairs(products((Register)_mm512_abs_epi8((__m512i)weights), (Register)signs));
#else
    const __m256i signs = _mm256_sign_epi8((__m256i)x, (__m256i)weights);
    return sum + pairs(products((Register)_mm256_abs_epi8((__m256i)weights), (Register)signs));
#endif
  }

  TANDEM_INLINE RegisterInts total(RegisterInts sums) { return bits == 4 ? pairs(sums) : sums; }

 private:
#ifdef __AVX512F__
  TANDEM_INLINE RegisterInts products(Register codes, Register x) {
    return (RegisterInts)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
  }
  TANDEM_INLINE RegisterInts add_shorts(RegisterInts a, RegisterInts b) {
    return (RegisterInts)_mm512_add_epi16((__m512i)a, (__m512i)b);
  }
  TANDEM_INLINE RegisterInts pairs(RegisterInts shorts) {
    return (RegisterInts)_mm512_madd_epi16((__m512i)shorts, _mm512_set1_epi16(1));
  }
#else
  TANDEM_INLINE RegisterInts products(Register codes, Register x) {
    return (RegisterInts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
  }
  TANDEM_INLINE RegisterInts add_shorts(RegisterInts a, RegisterInts b) {
    return (RegisterInts)_mm256_add_epi16((__m256i)a, (__m256i)b);
  }
  TANDEM_INLINE RegisterInts pairs(RegisterInts shorts) {
    return (RegisterInts)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
  }
#endif

 public:
#endif

  // Of a row, as it is multiplied by every column.
  TANDEM_INLINE Register quad(const UnitGroup* x, int index) {
    int32_t word;
    std::memcpy(&word, x->units + index * 4, sizeof word);
    return (Register)(word - RegisterInts{});
  }
};

// A line for many rows: a word of each column for every four of the depth, then the columns' scales of each part, then
// their zeros or offsets. `parts`: how many scales a group has, one or two.
template <int bits, Centre centre, int parts>
struct ExpandedGroups : GroupSums<bits> {
  using Expanded = ExpandedGroups;
  using GroupSums<bits>::kQuads;
  static constexpr Centre kCentre = centre;
  static constexpr int kParts = parts;
  static constexpr int64_t kBytes = (kQuads + parts + (centre != Centre::kMiddle)) * kPanel * 4;

  TANDEM_INLINE Register columns(const char* line, int quad, int i) {
    return load_register(reinterpret_cast<const float*>(line) + quad * kPanel + i * kRegisterLanes);
  }

  TANDEM_INLINE Register scales(const char* line, int part, int i) { return columns(line, kQuads + part, i); }
  TANDEM_INLINE RegisterInts zeros(const char* line, int i) { return (RegisterInts)columns(line, kQuads + parts, i); }
  TANDEM_INLINE Register offsets(const char* line, int i) { return columns(line, kQuads + parts, i); }
};

// Weights as they are stored: codes, and for each column the scale of each part in half precision, and its zero or
// offset. Of codes of four bits each eight of the depth share a word of a column, the first four in the low halves of
// its bytes.
template <int bits, Centre centre, int parts = 1>
struct StoredGroups : GroupSums<bits> {
  using Expanded = ExpandedGroups<bits, centre, parts>;
  using GroupSums<bits>::kQuads;
  static constexpr Centre kCentre = centre;
  static constexpr int kParts = parts;
  static constexpr int64_t kScalesAt = kPanel * kGroup * bits / 8, kCentresAt = kScalesAt + kPanel * 2 * parts;
  static constexpr int64_t kBytes =
      kCentresAt + (centre == Centre::kMiddle ? 0 : centre == Centre::kZeros ? kPanel : kPanel * 2);

  TANDEM_INLINE Register columns(const char* line, int quad, int i) {
    RegisterBits words;
    std::memcpy(&words, line + quad * bits / 8 * (kPanel * 4) + i * TANDEM_REGISTER_BYTES, sizeof words);
    if constexpr (bits == 4) words = (quad % 2 ? words >> 4 : words) & 0x0f0f0f0fu;
    return (Register)words;
  }

  TANDEM_INLINE Register scales(const char* line, int part, int i) {
    return halves(line + kScalesAt + part * kPanel * 2, i);
  }

  TANDEM_INLINE RegisterInts zeros(const char* line, int i) {
    typedef uint8_t Bytes __attribute__((vector_size(kRegisterLanes)));
    Bytes found;
    std::memcpy(&found, line + kCentresAt + i * kRegisterLanes, sizeof found);
    return __builtin_convertvector(found, RegisterInts);
  }

  TANDEM_INLINE Register offsets(const char* line, int i) { return halves(line + kCentresAt, i); }

  static void expand(const char* line, char* to) {
    const auto write = [&](auto found) {
      std::memcpy(to, &found, sizeof found);
      to += sizeof found;
    };
    for (int quad = 0; quad < kQuads; ++quad) {
      for (int i = 0; i < kLineRegisters; ++i) write(columns(line, quad, i));
    }
    for (int part = 0; part < parts; ++part) {
      for (int i = 0; i < kLineRegisters; ++i) write(scales(line, part, i));
    }
    for (int i = 0; centre == Centre::kZeros && i < kLineRegisters; ++i) write(zeros(line, i));
    for (int i = 0; centre == Centre::kOffsets && i < kLineRegisters; ++i) write(offsets(line, i));
  }

  // Writes a column's group into its line.
  static void write_column(char* line, int64_t column, const CodeGroup& group) {
    uint32_t quads[kQuads];
    std::memcpy(quads, group.codes, sizeof quads);
    for (int word = 0; word < kQuads * bits / 8; ++word) {
      const uint32_t codes = bits == 4 ? quads[2 * word] | quads[2 * word + 1] << 4 : quads[word];
      std::memcpy(line + word * (kPanel * 4) + column * 4, &codes, sizeof codes);
    }
    for (int part = 0; part < parts; ++part) {
      std::memcpy(line + kScalesAt + (part * kPanel + column) * 2, &group.scales[part], sizeof group.scales[part]);
    }
    if (centre == Centre::kZeros) line[kCentresAt + column] = static_cast<char>(group.zero);
    if (centre == Centre::kOffsets) std::memcpy(line + kCentresAt + column * 2, &group.offset, sizeof group.offset);
  }

 private:
  TANDEM_INLINE Register halves(const char* from, int i) {
    return load_register(reinterpret_cast<const Float16*>(from) + i * kRegisterLanes);
  }
};
#endif

template <class Lines>
int64_t lines_of(int64_t depth) {
  return ceil_div(depth, Lines::kDepth);
}

// Where element `k` of a column is stored, in elements from the beginning of its panel.
template <class Lines>
int64_t offset_of(int64_t k, int64_t column) {
  return k / Lines::kDepth * (kPanel * Lines::kDepth) + Lines::position(column) + k % Lines::kDepth;
}

}  // namespace tandem
