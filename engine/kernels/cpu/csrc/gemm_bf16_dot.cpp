// bf16 matrix products by AVX-512's dot product of pairs, for processors without AMX on which it is the faster one.
#include "vector_product.h"

#ifdef __AVX512BF16__

using namespace tandem;

TANDEM_EXPORT int64_t tandem_bf16_dot_packed_bytes(int64_t panels, int64_t depth) {
  return panels * lines_of<Bfloat16Pairs>(depth) * Bfloat16Pairs::kBytes;
}

TANDEM_EXPORT void tandem_bf16_dot_pack(const uint16_t* weight, int64_t stride, int64_t columns, int64_t depth,
                                        int64_t gated, uint16_t* packed, int64_t threads) {
  pack_panels<Bfloat16Pairs>(weight, stride, columns, depth, gated != 0, packed, threads);
}

TANDEM_EXPORT int64_t tandem_bf16_dot_embed(const uint16_t* packed, int64_t columns, int64_t depth, const int64_t* ids,
                                            int64_t count, uint16_t* out, int64_t out_stride, int64_t threads) {
  return embed_rows<Bfloat16Pairs>(packed, columns, depth, ids, count, out, out_stride, threads);
}

TANDEM_EXPORT void tandem_bf16_dot_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                          void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<Bfloat16Pairs>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

#endif
