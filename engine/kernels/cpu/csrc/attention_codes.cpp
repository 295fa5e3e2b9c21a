// Entries over a cache in codes: attention of single rows in place, and blocks restored for the other kernels.
#include "attention_codes.h"

namespace tandem {
namespace {

template <class T, class Codes>
void attend_singles(const CodesStep& step, const CodedLayer& layer, const T* queries, int64_t query_stride, T* out,
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
      CodesUnit<T, Codes> unit(step, layer, queries + single * query_stride + column, single, kv_head, part % segments,
                               window);
      unit.run();
      if (segments > 1)
        unit.write_partial(step.partials + part * partial_size + kv_head * group * head_size);
      else
        unit.write(out + single * row_size + column);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (segments > 1 ? step.num_singles * step.num_heads : 0); ++i) {
      const int64_t single = i / step.num_heads, head = i % step.num_heads;
      merge_parts(step.partials + single * segments * partial_size + head * head_size, segments, partial_size,
                 step.head_dim, out + single * row_size + head * step.head_dim);
    }
  }
}

// Blocks by number, one after another: `lines` of `size` values each.
template <class T, class Codes>
void restore(const CodedLayer& layer, const int32_t* blocks, int64_t num_blocks, int64_t lines, int64_t size, T* out,
             int64_t threads) {
  constexpr int kParts = Codes::kChunk / kLanes;
  const int64_t line_bytes = Codes::line_bytes(size), num_groups = Codes::num_groups(size);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(num_blocks, thread, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const uint8_t* codes = layer.codes + blocks[i] * layer.code_stride;
      const uint32_t* scales = layer.scales + blocks[i] * layer.scale_stride;
      T* to = out + i * lines * size;
      for (int64_t line = 0; line < lines; ++line, codes += line_bytes, scales += num_groups, to += size)
        for (int64_t d = 0; d < size; d += Codes::kChunk) {
          const Words word = Words{} + scales[d / Codes::kGroup];
          Floats x[kParts];
          Codes::template load_codes<kParts>(codes, d, size, x);
          Codes::order(x);
          for (int n = 0; n < kParts; ++n)
            store_some(to + d + n * kLanes, Codes::restore(x[n], word), size - d - n * kLanes);
        }
    }
  });
}

}  // namespace
}  // namespace tandem

#define TANDEM_CODES(Codes, name, T, suffix)                                                                       \
  TANDEM_EXPORT void tandem_attend_singles_##name##_##suffix(const tandem::CodesStep* step,                        \
                                                             const tandem::CodedLayer* layer, const T* queries,    \
                                                             int64_t query_stride, T* out, int64_t window) {       \
    tandem::attend_singles<T, tandem::Codes>(*step, *layer, queries, query_stride, out, window);                   \
  }                                                                                                                \
  TANDEM_EXPORT void tandem_restore_##name##_##suffix(const tandem::CodedLayer* layer, const int32_t* blocks,      \
                                                      int64_t num_blocks, int64_t lines, int64_t size, T* out,     \
                                                      int64_t threads) {                                           \
    tandem::restore<T, tandem::Codes>(*layer, blocks, num_blocks, lines, size, out, threads);                      \
  }

TANDEM_CODES(Int8Codes, int8, float, f32)
TANDEM_CODES(Int8Codes, int8, tandem::Bfloat16, bf16)
TANDEM_CODES(Int4Codes, int4, float, f32)
TANDEM_CODES(Int4Codes, int4, tandem::Bfloat16, bf16)
