// int8 matrix products by AVX-512's dot product of four (VNNI), for processors without AMX; the same bits as on AMX
// (gemm_int8.cpp).
#include "vector_product.h"

#ifdef __AVX512VNNI__

using namespace tandem;

TANDEM_EXPORT int64_t tandem_int8_dot_packed_bytes(int64_t panels, int64_t depth) {
  return panels * lines_of<Int8Quads>(depth) * Int8Quads::kBytes;
}

TANDEM_EXPORT void tandem_int8_dot_pack(const Bfloat16* weight, int64_t stride, int64_t columns, int64_t depth,
                                        int64_t gated, int8_t* packed, float* scales, int64_t threads) {
  quantize_columns(weight, stride, columns, depth, gated != 0, scales, threads, unit_placer<Int8Quads>(packed, depth));
}

TANDEM_EXPORT void tandem_int8_dot_pack_stored(const int8_t* codes, const float* stored_scales, int64_t columns,
                                               int64_t depth, int64_t gated, int8_t* packed, float* scales,
                                               int64_t threads) {
  place_stored_columns(codes, stored_scales, columns, depth, gated != 0, scales, threads,
                       unit_placer<Int8Quads>(packed, depth));
}

TANDEM_EXPORT void tandem_int8_dot_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                          void* out, int64_t out_stride, int64_t threads) {
  multiply_bfloat16<Int8Quads>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT int64_t tandem_int8_dot_embed(const int8_t* packed, const float* scales, int64_t columns, int64_t depth,
                                            const int64_t* ids, int64_t count, Bfloat16* out, int64_t out_stride,
                                            int64_t threads) {
  return embed_quantized<Int8Quads>(packed, scales, columns, depth, ids, count, out, out_stride, threads);
}

#endif
