// Products of weights of four bits, in groups of 32 of the depth with a scale each, and of rows quantized to eight bits
// by the same groups. One packing for all processors: what differs is the instruction that multiplies.
#include "vector_product.h"

#ifdef TANDEM_GROUP_PRODUCTS

using namespace tandem;

namespace {

// A matrix as checkpoints store it: packed nibbles, [rows][ceil(depth / 2)]; of each group of columns a scale, and the
// code that stands for zero, [rows][groups].
struct StoredCodes {
  const uint8_t* codes;
  const Float16* scales;
  const uint8_t* zeros;  // or null: all are 8
  int64_t depth, groups, lines_of_group;

  void group(int64_t row, int64_t k, uint8_t* to, Float16* scale, uint8_t* zero) const {
    const uint8_t* const from = codes + row * ceil_div(depth, 2);
    for (int64_t i = 0; i < std::min(kGroup, depth - k * kGroup); ++i) {
      const int64_t at = k * kGroup + i;
      to[i] = from[at / 2] >> (at % 2 * 4) & 15;
    }
    const int64_t index = row * groups + k / lines_of_group;
    *scale = scales[index];
    if (zeros) *zero = zeros[index];
  }
};

template <bool kHasZeros>
int64_t packed_bytes(int64_t panels, int64_t depth) {
  return panels * lines_of<Int4Groups<kHasZeros>>(depth) * Int4Groups<kHasZeros>::kBytes;
}

}  // namespace

TANDEM_EXPORT int64_t tandem_int4_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<false>(panels, depth);
}

TANDEM_EXPORT int64_t tandem_int4_zeros_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<true>(panels, depth);
}

// Quantizes and packs bf16 weights.
TANDEM_EXPORT void tandem_int4_pack(const Bfloat16* weight, int64_t stride, int64_t columns, int64_t depth,
                                    int64_t gated, char* packed, int64_t threads) {
  pack_groups<Int4Groups<false>>(
      columns, depth, gated != 0, packed, threads,
      [=](int64_t row, int64_t k, uint8_t* codes, Float16* scale, uint8_t*) {
        const int64_t count = std::min(kGroup, depth - k * kGroup);
        *scale = quantize_group(weight + row * stride + k * kGroup, count, codes);
      });
}

// Packs stored weights. `group_size`: columns that share a scale, a multiple of 32, or as many as there are. `zeros`:
// for the packing that has them, else null.
TANDEM_EXPORT void tandem_int4_pack_stored(const uint8_t* codes, const Float16* scales, const uint8_t* zeros,
                                           int64_t group_size, int64_t columns, int64_t depth, int64_t gated,
                                           char* packed, int64_t threads) {
  const StoredCodes stored{codes, scales, zeros, depth, ceil_div(depth, group_size), ceil_div(group_size, kGroup)};
  const auto fill = [&](auto... group) { stored.group(group...); };
  if (zeros) return pack_groups<Int4Groups<true>>(columns, depth, gated != 0, packed, threads, fill);
  pack_groups<Int4Groups<false>>(columns, depth, gated != 0, packed, threads, fill);
}

TANDEM_EXPORT void tandem_int4_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                                      int64_t out_stride, int64_t threads) {
  multiply_bfloat16<Int4Groups<false>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT void tandem_int4_zeros_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                            void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<Int4Groups<true>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

#endif
