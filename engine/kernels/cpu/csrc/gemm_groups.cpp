// Products of weights in groups of 32 of the depth with a scale each, in four or eight bits, and of rows quantized to
// eight bits by the same groups. One packing for all processors: what differs is the instruction that multiplies.
#include "vector_product.h"

#ifdef TANDEM_GROUP_PRODUCTS

using namespace tandem;

namespace {

// A matrix as checkpoints store it, [rows][depth], four bits packed as nibbles; of each group of columns a scale, and
// perhaps the code that stands for zero, or what is added, [rows][groups]. Groups of 16 are two to a line, which have
// the same added to them.
struct StoredCodes {
  const uint8_t* codes;
  const Float16* scales;
  const uint8_t* zeros;  // or null
  const Float16* offsets;  // or null
  int64_t bits, depth, groups, group_size;

  void fill(int64_t row, int64_t k, CodeGroup& group) const {
    const uint8_t* const from = codes + row * ceil_div(depth * bits, 8);
    for (int64_t i = 0; i < std::min(kGroup, depth - k * kGroup); ++i) {
      const int64_t at = k * kGroup + i;
      group.codes[i] = bits == 8 ? from[at] : from[at / 2] >> (at % 2 * 4) & 15;
    }
    const int64_t at = std::min(k * kGroup / group_size, groups - 1), index = row * groups + at;
    group.scales[0] = scales[index];
    if (group_size < kGroup && at + 1 < groups) group.scales[1] = scales[index + 1];
    if (zeros) group.zero = zeros[index];
    if (offsets) group.offset = offsets[index];
  }
};

template <class Lines>
int64_t packed_bytes(int64_t panels, int64_t depth) {
  return panels * lines_of<Lines>(depth) * Lines::kBytes;
}

}  // namespace

// Quantizes bf16 weights to four bits and packs them.
TANDEM_EXPORT void tandem_int4_pack(const Bfloat16* weight, int64_t stride, int64_t columns, int64_t depth,
                                    int64_t gated, char* packed, int64_t threads) {
  pack_groups<StoredGroups<4, Centre::kMiddle>>(
      columns, depth, gated != 0, packed, threads, [=](int64_t row, int64_t k, CodeGroup& group) {
        const int64_t count = std::min(kGroup, depth - k * kGroup);
        group.scales[0] = quantize_group(weight + row * stride + k * kGroup, count, group.codes);
      });
}

// Packs stored weights. `group_size`: columns that share a scale, a multiple of 32, or as many as there are, or with
// eight bits 16. `zeros`, `offsets`: for the packings that have them, else null.
TANDEM_EXPORT void tandem_groups_pack(int64_t bits, const uint8_t* codes, const Float16* scales, const uint8_t* zeros,
                                      const Float16* offsets, int64_t group_size, int64_t columns, int64_t depth,
                                      int64_t gated, char* packed, int64_t threads) {
  const StoredCodes stored{codes, scales, zeros, offsets, bits, depth, ceil_div(depth, group_size), group_size};
  const auto fill = [&](int64_t row, int64_t k, CodeGroup& group) { stored.fill(row, k, group); };
  const auto pack = [&](auto lines) {
    pack_groups<decltype(lines)>(columns, depth, gated != 0, packed, threads, fill);
  };
  const bool has_halves = group_size < kGroup && group_size < depth;
  if (has_halves && offsets) return pack(StoredGroups<8, Centre::kOffsets, 2>());
  if (has_halves) return pack(StoredGroups<8, Centre::kMiddle, 2>());
  if (bits == 8 && offsets) return pack(StoredGroups<8, Centre::kOffsets>());
  if (bits == 8) return pack(StoredGroups<8, Centre::kMiddle>());
  if (zeros) return pack(StoredGroups<4, Centre::kZeros>());
  if (offsets) return pack(StoredGroups<4, Centre::kOffsets>());
  pack(StoredGroups<4, Centre::kMiddle>());
}

TANDEM_EXPORT int64_t tandem_int4_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<StoredGroups<4, Centre::kMiddle>>(panels, depth);
}

TANDEM_EXPORT void tandem_int4_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                      void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<StoredGroups<4, Centre::kMiddle>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT int64_t tandem_int4_zeros_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<StoredGroups<4, Centre::kZeros>>(panels, depth);
}

TANDEM_EXPORT void tandem_int4_zeros_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                            void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<StoredGroups<4, Centre::kZeros>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT int64_t tandem_int4_offsets_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<StoredGroups<4, Centre::kOffsets>>(panels, depth);
}

TANDEM_EXPORT void tandem_int4_offsets_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                           void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<StoredGroups<4, Centre::kOffsets>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT int64_t tandem_int8_groups_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<StoredGroups<8, Centre::kMiddle>>(panels, depth);
}

TANDEM_EXPORT void tandem_int8_groups_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                             void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<StoredGroups<8, Centre::kMiddle>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT int64_t tandem_int8_offsets_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<StoredGroups<8, Centre::kOffsets>>(panels, depth);
}

TANDEM_EXPORT void tandem_int8_offsets_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                           void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<StoredGroups<8, Centre::kOffsets>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT int64_t tandem_int8_halves_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<StoredGroups<8, Centre::kMiddle, 2>>(panels, depth);
}

TANDEM_EXPORT void tandem_int8_halves_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                             void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<StoredGroups<8, Centre::kMiddle, 2>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT int64_t tandem_int8_offset_halves_packed_bytes(int64_t panels, int64_t depth) {
  return packed_bytes<StoredGroups<8, Centre::kOffsets, 2>>(panels, depth);
}

TANDEM_EXPORT void tandem_int8_offset_halves_linear(const Linear* linear, const void* x, int64_t x_stride,
                                                    int64_t rows, void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<StoredGroups<8, Centre::kOffsets, 2>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

#endif
