// Entry of the decode kernel: one row per sequence, work shared by (sequence, segment, key-value heads).
#include "attention_decode.h"

#if TANDEM_DECODE

namespace tandem {
namespace {

struct NoState {};

template <class Scores, class ThreadState>
void attend_singles(const AttentionStep& step, const AttentionLayer<Bfloat16>& layer) {
  const int64_t group = step.num_heads / step.num_kv_heads, row_size = int64_t(step.num_heads) * step.head_dim;
  const int64_t head_size = 2 + round_up(step.head_dim, 32), partial_size = step.num_heads * head_size;
  const int64_t segments = step.num_segments, count = DecodePart::count(step);
#pragma omp parallel num_threads(step.num_threads) if (step.num_threads > 1 && count > 1)
  {
    [[maybe_unused]] ThreadState state;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) attend_part<Scores>(step, layer, i);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (segments > 1 ? int64_t(step.num_singles) * step.num_heads : 0); ++i) {
      const int64_t single = i / step.num_heads, head = i % step.num_heads;
      merge(step.partials + single * segments * partial_size + head * head_size, segments, partial_size,
            step.head_dim, layer.out + step.first_rows[single] * row_size + head * step.head_dim);
    }
  }
}

}  // namespace
}  // namespace tandem

#endif

// Answers the first `num_singles` sequences of the step, which have one row each.
TANDEM_EXPORT void tandem_attend_singles_bf16(const tandem::AttentionStep* step, const tandem::Bfloat16* cache,
                                              const tandem::Bfloat16* queries, int64_t query_stride,
                                              tandem::Bfloat16* out, int64_t window, int64_t use_tiles) {
#if TANDEM_DECODE
  using namespace tandem;
  const AttentionLayer<Bfloat16> layer{cache, queries, out, query_stride, window};
#if TANDEM_AMX
  if (use_tiles && TileScores::fits(*step)) return attend_singles<TileScores, Tiles>(*step, layer);
#endif
  attend_singles<TransposedScores, NoState>(*step, layer);
#else
  (void)step, (void)cache, (void)queries, (void)query_stride, (void)out, (void)window, (void)use_tiles;
#endif
}
