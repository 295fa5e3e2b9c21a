// Entries over a cache in int8: attention of single rows in place, and blocks restored for the other kernels.
#include "attention_int8.h"

namespace tandem {
namespace {

template <class T>
void attend_singles(const Int8Step& step, const Int8Layer& layer, const T* queries, int64_t query_stride, T* out,
                    int64_t window) {
  const int64_t group = step.num_heads / step.num_kv_heads, row_size = step.num_heads * step.head_dim;
  const int64_t head_size = 2 + round_up(step.head_dim, kLanes), partial_size = step.num_heads * head_size;
  const int64_t segments = step.num_segments, count = step.num_singles * segments * step.num_kv_heads;
#pragma omp parallel num_threads(int(step.num_threads)) if (step.num_threads > 1 && count > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t kv_head = i % step.num_kv_heads, part = i / step.num_kv_heads, single = part / segments;
      const int64_t column = kv_head * group * step.head_dim;
      Int8Unit<T> unit(step, layer, queries + single * query_stride + column, single, kv_head, part % segments, window);
      unit.run();
      if (segments > 1)
        unit.write_partial(step.partials + part * partial_size + kv_head * group * head_size);
      else
        unit.write(out + single * row_size + column);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (segments > 1 ? step.num_singles * step.num_heads : 0); ++i) {
      const int64_t single = i / step.num_heads, head = i % step.num_heads;
      merge_int8(step.partials + single * segments * partial_size + head * head_size, segments, partial_size,
                 step.head_dim, out + single * row_size + head * step.head_dim);
    }
  }
}

// Blocks by number, one after another: `lines` of `size` values each.
template <class T>
void restore(const Int8Layer& layer, const int32_t* blocks, int64_t num_blocks, int64_t lines, int64_t size, T* out,
             int64_t threads) {
  parallel(threads, [&](int thread, int team) {
    const Range range = split(num_blocks, thread, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int8_t* codes = layer.codes + blocks[i] * layer.code_stride;
      const float* scales = layer.scales + blocks[i] * layer.scale_stride;
      T* to = out + i * lines * size;
      for (int64_t line = 0; line < lines; ++line, codes += size, to += size)
        for (int64_t d = 0; d < size; d += kLanes)
          store_some(to + d, load_codes(codes + d, size - d) * scales[line], size - d);
    }
  });
}

}  // namespace
}  // namespace tandem

#define TANDEM_INT8(T, suffix)                                                                                        \
  TANDEM_EXPORT void tandem_attend_singles_int8_##suffix(const tandem::Int8Step* step, const tandem::Int8Layer* layer, \
                                                         const T* queries, int64_t query_stride, T* out,              \
                                                         int64_t window) {                                            \
    tandem::attend_singles(*step, *layer, queries, query_stride, out, window);                                        \
  }                                                                                                                   \
  TANDEM_EXPORT void tandem_restore_int8_##suffix(const tandem::Int8Layer* layer, const int32_t* blocks,              \
                                                  int64_t num_blocks, int64_t lines, int64_t size, T* out,            \
                                                  int64_t threads) {                                                  \
    tandem::restore(*layer, blocks, num_blocks, lines, size, out, threads);                                           \
  }

TANDEM_INT8(float, f32)
TANDEM_INT8(tandem::Bfloat16, bf16)
