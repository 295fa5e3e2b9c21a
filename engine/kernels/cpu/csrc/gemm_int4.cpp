// Products of weights of four bits, in groups of 32 of the depth with a scale each, and of rows quantized to eight bits
// by the same groups. One packing for all processors: what differs is the instruction that multiplies.
#include "vector_product.h"

#ifdef TANDEM_GROUP_PRODUCTS

using namespace tandem;

TANDEM_EXPORT int64_t tandem_int4_packed_bytes(int64_t panels, int64_t depth) {
  return panels * lines_of<Int4Groups>(depth) * Int4Groups::kBytes;
}

TANDEM_EXPORT void tandem_int4_pack(const Bfloat16* weight, int64_t stride, int64_t columns, int64_t depth,
                                    int64_t gated, char* packed, int64_t threads) {
  quantize_groups<Int4Groups>(weight, stride, columns, depth, gated != 0, packed, threads);
}

TANDEM_EXPORT void tandem_int4_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                                      int64_t out_stride, int64_t threads) {
  multiply_bfloat16<Int4Groups>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

#endif
