// Attention over paged keys for any number of rows per sequence: causal, grouped queries, sliding windows.
//
// Work is split into units (sequence, rows, key-value head), the most expensive first, which threads take one by one.
#include "attention_amx.h"
#include "attention_exact.h"

namespace tandem {
namespace {

template <class Unit, class T>
void attend_units(const AttentionStep& step, const AttentionLayer<T>& layer) {
  const int64_t count = int64_t(step.num_units) * step.num_kv_heads;
#pragma omp parallel num_threads(step.num_threads) if (step.num_threads > 1 && count > 1)
  {
    [[maybe_unused]] typename Unit::ThreadState state;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i)
      Unit(step, layer, step.units + i / step.num_kv_heads * 3, i % step.num_kv_heads).run();
  }
}

}  // namespace
}  // namespace tandem

TANDEM_EXPORT void tandem_attend_units_f32(const tandem::AttentionStep* step, const float* cache, const float* queries,
                                           int64_t query_stride, float* out, int64_t window) {
  using namespace tandem;
  attend_units<ExactUnit<float>>(*step, AttentionLayer<float>{cache, queries, out, query_stride, window});
}

TANDEM_EXPORT void tandem_attend_units_bf16(const tandem::AttentionStep* step, const tandem::Bfloat16* cache,
                                            const tandem::Bfloat16* queries, int64_t query_stride,
                                            tandem::Bfloat16* out, int64_t window) {
  using namespace tandem;
  attend_units<ExactUnit<Bfloat16>>(*step, AttentionLayer<Bfloat16>{cache, queries, out, query_stride, window});
}

// As above, on AMX tiles; only where CpuFeatures says amx_bf16.
TANDEM_EXPORT void tandem_attend_units_amx(const tandem::AttentionStep* step, const tandem::Bfloat16* cache,
                                            const tandem::Bfloat16* queries, int64_t query_stride,
                                            tandem::Bfloat16* out, int64_t window) {
#if TANDEM_AMX
  using namespace tandem;
  attend_units<AmxUnit>(*step, AttentionLayer<Bfloat16>{cache, queries, out, query_stride, window});
#else
  tandem_attend_units_bf16(step, cache, queries, query_stride, out, window);
#endif
}
