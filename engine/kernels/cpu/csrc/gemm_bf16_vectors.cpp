// bf16 matrix products for processors without AMX: weights are read as bf16 and multiplied as floats, which is exact.
// Where AVX-512 has a bf16 dot product that is faster, gemm_bf16_dot.cpp takes its place.
#include "vector_product.h"

using namespace tandem;

TANDEM_EXPORT int64_t tandem_bf16_vectors_packed_bytes(int64_t panels, int64_t depth) {
  return panels * depth * Bfloat16Lines::kBytes;
}

TANDEM_EXPORT void tandem_bf16_vectors_pack(const uint16_t* weight, int64_t stride, int64_t columns, int64_t depth,
                                            int64_t gated, uint16_t* packed, int64_t threads) {
  pack_panels<Bfloat16Lines>(weight, stride, columns, depth, gated != 0, packed, threads);
}

TANDEM_EXPORT int64_t tandem_bf16_vectors_embed(const uint16_t* packed, int64_t columns, int64_t depth,
                                                const int64_t* ids, int64_t count, uint16_t* out, int64_t out_stride,
                                                int64_t threads) {
  return embed_rows<Bfloat16Lines>(packed, columns, depth, ids, count, out, out_stride, threads);
}

TANDEM_EXPORT void tandem_bf16_vectors_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                              void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<Bfloat16Lines>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}
