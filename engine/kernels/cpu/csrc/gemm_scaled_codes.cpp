// Products of weights that are codes of floats (FP8's E4M3, tables of sixteen values) and of rows in bf16 or float,
// which are not rounded. One packing for all processors.
#include "vector_product.h"

#ifdef TANDEM_GROUP_PRODUCTS

using namespace tandem;

TANDEM_EXPORT int64_t tandem_fp8_packed_bytes(int64_t panels, int64_t depth) {
  return panels * ScaledCodes<Float8Codes>::panel_bytes(depth);
}

TANDEM_EXPORT void tandem_fp8_pack(const uint8_t* codes, const float* scales, int64_t group_size, int64_t columns,
                                  int64_t depth, int64_t gated, char* packed, int64_t threads) {
  ScaledCodes<Float8Codes>::pack(codes, scales, group_size, columns, depth, gated != 0, packed, threads);
}

TANDEM_EXPORT void tandem_fp8_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                                    int64_t out_stride, int64_t threads) {
  multiply_bfloat16<ScaledCodes<Float8Codes>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT void tandem_fp8_f32_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                        void* out, int64_t out_stride, int64_t threads) {
  multiply_rows<ScaledCodes<Float8Codes>, float, float>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT int64_t tandem_table16_packed_bytes(int64_t panels, int64_t depth) {
  return panels * ScaledCodes<TableCodes>::panel_bytes(depth);
}

TANDEM_EXPORT void tandem_table16_pack(const uint8_t* codes, const float* scales, int64_t group_size, int64_t columns,
                                  int64_t depth, int64_t gated, char* packed, int64_t threads) {
  ScaledCodes<TableCodes>::pack(codes, scales, group_size, columns, depth, gated != 0, packed, threads);
}

TANDEM_EXPORT void tandem_table16_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows, void* out,
                                    int64_t out_stride, int64_t threads) {
  multiply_bfloat16<ScaledCodes<TableCodes>>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

TANDEM_EXPORT void tandem_table16_f32_linear(const Linear* linear, const void* x, int64_t x_stride, int64_t rows,
                                        void* out, int64_t out_stride, int64_t threads) {
  multiply_rows<ScaledCodes<TableCodes>, float, float>(*linear, {x, x_stride, rows, out, out_stride}, threads);
}

#endif
