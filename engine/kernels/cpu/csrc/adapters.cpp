// Low-rank adapters: adds B (A x) to rows of a projection's result, each row with an adapter of its own or with none.
//
// Products are summed in float32 and each result is rounded once. A row's result depends on that row and its adapter
// alone: the order of its sums is the same whatever other rows there are and however many threads compute.
#include "parallel.h"
#include "vectors.h"

namespace tandem {
namespace {

constexpr int64_t kMostParts = 3;      // queries, keys, values
constexpr int kValues = 4;             // that one task makes of a row
constexpr int64_t kColumns = 512;      // that one task adds to
constexpr int64_t kWorth = 1 << 15;    // multiplications for another thread

// engine/kernels/cpu/adapters.py: _Part.
struct Part {
  int64_t first_column, num_columns, first_value, rank;
  const void* up;  // [rank, num_columns]
};

// What one adapter adds to one projection; engine/kernels/cpu/adapters.py: _Matrices.
struct Matrices {
  const void* down;  // [num_values, depth]
  int64_t num_values, depth, num_columns, num_parts;
  Part parts[kMostParts];
};

// engine/kernels/cpu/adapters.py: _Rows.
struct Rows {
  const int64_t* rows;
  const int64_t* slots;
  int64_t count, stride;  // of values
  float* values;          // [count, stride]
  int64_t threads;
};

// Products of a row with `kCount` rows of `down`. Each has two sums, so that an addition need not wait for the last.
template <int kCount, class T>
TANDEM_INLINE void multiply(const T* x, const T* down, int64_t depth, float* out) {
  constexpr int64_t kStep = 2 * kRegisterLanes;
  Register sums[kCount][2] = {};
  int64_t k = 0;
  for (; k + kStep <= depth; k += kStep)
    for (int half = 0; half < 2; ++half) {
      const int64_t at = k + half * kRegisterLanes;
      const Register value = load_register(x + at);
      for (int i = 0; i < kCount; ++i)
        sums[i][half] = fused_register(value, load_register(down + i * depth + at), sums[i][half]);
    }
  for (int i = 0; i < kCount; ++i) {
    Floats rest = {};
    for (int64_t at = k; at < depth; at += kLanes)
      rest = fused(load_some(x + at, depth - at), load_some(down + i * depth + at, depth - at), rest);
    float lanes[kRegisterLanes];
    store_register(lanes, sums[i][0] + sums[i][1]);
    float total = sum(rest);
    for (int lane = 0; lane < kRegisterLanes; ++lane) total += lanes[lane];
    out[i] = total;
  }
}

// Adds to the columns of a part that lie in [begin, end).
template <class T>
void add_part(const Part& part, const float* values, int64_t begin, int64_t end, T* out) {
  constexpr int kHeld = 2 * kRegisters;  // registers of two vectors
  const T* const up = static_cast<const T*>(part.up) - part.first_column;
  const float* const own = values + part.first_value;
  const int64_t last = std::min(end, part.first_column + part.num_columns);
  int64_t column = std::max(begin, part.first_column);
  for (; column + 2 * kLanes <= last; column += 2 * kLanes) {
    Register totals[kHeld];
    for (int j = 0; j < kHeld; ++j) totals[j] = load_register(out + column + j * kRegisterLanes);
    for (int64_t i = 0; i < part.rank; ++i) {
      const Register value = splat_register(own[i]);
      const T* const row = up + i * part.num_columns + column;
      for (int j = 0; j < kHeld; ++j)
        totals[j] = fused_register(value, load_register(row + j * kRegisterLanes), totals[j]);
    }
    Floats both[2];
    std::memcpy(both, totals, sizeof both);
    store_two(out + column, both[0], both[1]);
  }
  for (; column < last; column += kLanes) {
    Floats total = load_some(out + column, last - column);
    for (int64_t i = 0; i < part.rank; ++i)
      total = fused(splat(own[i]), load_some(up + i * part.num_columns + column, last - column), total);
    store_some(out + column, total, last - column);
  }
}

template <class T>
void add_adapters(const Matrices* of_slots, const T* x, int64_t x_stride, const Rows& step, T* out,
                  int64_t out_stride) {
  if (step.count == 0) return;
  int64_t most_values = 0, most_columns = 0, depth = 0;
  for (int64_t i = 0; i < step.count; ++i) {
    const Matrices& matrices = of_slots[step.slots[i]];
    most_values = std::max(most_values, matrices.num_values);
    most_columns = std::max(most_columns, matrices.num_columns);
    depth = std::max(depth, matrices.depth);
  }
  if (most_values == 0) return;
  const int64_t worth = step.count * most_values * (depth + most_columns) / kWorth;
  parallel(std::min(step.threads, std::max<int64_t>(worth, 1)), [&](int thread, int team) {
    const int64_t groups = ceil_div(most_values, kValues);
    const Range products = split(step.count * groups, thread, team);
    for (int64_t task = products.begin; task < products.end; ++task) {
      const int64_t i = task / groups, first = task % groups * kValues;
      const Matrices& matrices = of_slots[step.slots[i]];
      if (first >= matrices.num_values) continue;
      const T* const row = x + step.rows[i] * x_stride;
      const T* const down = static_cast<const T*>(matrices.down) + first * matrices.depth;
      float* const out_values = step.values + i * step.stride + first;
      const int64_t count = std::min<int64_t>(kValues, matrices.num_values - first);
      if (count == kValues)
        multiply<kValues>(row, down, matrices.depth, out_values);
      else
        for (int64_t k = 0; k < count; ++k) multiply<1>(row, down + k * matrices.depth, matrices.depth, out_values + k);
    }
    team_barrier(team);
    const int64_t pieces = ceil_div(most_columns, kColumns);
    const Range additions = split(step.count * pieces, thread, team);
    for (int64_t task = additions.begin; task < additions.end; ++task) {
      const int64_t i = task / pieces, begin = task % pieces * kColumns;
      const Matrices& matrices = of_slots[step.slots[i]];
      for (int64_t part = 0; part < matrices.num_parts; ++part)
        add_part(matrices.parts[part], step.values + i * step.stride, begin, begin + kColumns,
                 out + step.rows[i] * out_stride);
    }
  });
}

}  // namespace
}  // namespace tandem

TANDEM_EXPORT void tandem_add_adapters_f32(const tandem::Matrices* of_slots, const float* x, int64_t x_stride,
                                           const tandem::Rows* step, float* out, int64_t out_stride) {
  tandem::add_adapters(of_slots, x, x_stride, *step, out, out_stride);
}

TANDEM_EXPORT void tandem_add_adapters_bf16(const tandem::Matrices* of_slots, const tandem::Bfloat16* x,
                                            int64_t x_stride, const tandem::Rows* step, tandem::Bfloat16* out,
                                            int64_t out_stride) {
  tandem::add_adapters(of_slots, x, x_stride, *step, out, out_stride);
}
