// float matrix products on vector registers, and lookups in the packed matrix.
#include "vector_product.h"

using namespace tandem;

TANDEM_EXPORT int64_t tandem_f32_packed_bytes(int64_t panels, int64_t depth) {
  return panels * depth * FloatLines::kBytes;
}

TANDEM_EXPORT void tandem_f32_pack(const float* weight, int64_t stride, int64_t columns, int64_t depth, int64_t gated,
                                   float* packed, int64_t threads) {
  pack_panels<FloatLines>(weight, stride, columns, depth, gated != 0, packed, threads);
}

TANDEM_EXPORT int64_t tandem_f32_embed(const float* packed, int64_t columns, int64_t depth, const int64_t* ids,
                                       int64_t count, float* out, int64_t out_stride, int64_t threads) {
  return embed_rows<FloatLines>(packed, columns, depth, ids, count, out, out_stride, threads);
}

TANDEM_EXPORT void tandem_f32_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                                     int64_t out_stride, int64_t threads) {
  multiply_rows<FloatLines, float, float>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}
