// Mixtures of experts in one call: the router's product, the choice of experts, and each chosen expert's products over
// the rows that chose it. Which experts these are depends on the rows, so that a recorded program has this one call, and
// memory is read for the experts that are chosen, each once for all of its rows.
//
// Logits, choice, weights and the sum over a row's experts are in float32. Experts are added in the order of their
// numbers, whatever other rows there are; the products of a row do not depend on other rows either (linear.h).
#include <cmath>
#include <cstring>
#include <vector>

#include "linear.h"
#include "rows.h"

namespace tandem {
namespace {

// A packed matrix and the kernel for its form.
struct Matrix {
  void (*multiply)(const Linear*, const void* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride,
                   int64_t threads);
  const Linear* linear;

  void operator()(const void* x, int64_t x_stride, int64_t rows, void* out, int64_t threads) const {
    multiply(linear, x, x_stride, rows, out, linear->columns, threads);
  }
};

struct Expert {
  Matrix gate_up;  // gated
  Matrix down;     // gives float
};

// engine/kernels/cpu/mixture.py: _Mixture.
struct Mixture {
  Matrix router;          // gives float
  const Expert* experts;  // a shared one, which computes every row, is the last
  int64_t num_experts;    // to choose from
  int64_t per_row;
  int64_t has_shared;
  int64_t normalizes;
  int64_t size;  // of a row
  int64_t largest_gate;

  int64_t slots() const { return per_row + has_shared; }
  int64_t all_experts() const { return num_experts + has_shared; }
};

constexpr int64_t kAlignment = 64;

// Memory for the rows of a call, from what the caller provides; engine/kernels/cpu/mixture.py: scratch_bytes.
class Room {
 public:
  explicit Room(void* memory) : next_(static_cast<char*>(memory)) {}

  template <class T>
  T* array(int64_t count) {
    char* const begin = next_;
    next_ += round_up(count * int64_t(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(begin);
  }

 private:
  char* next_;
};

// Chooses a row's experts: engine/model/layers/mixture.py: route. Overwrites the logits. With a logit that is no number
// all weights are none, and the choice is still one of experts.
void choose(const Mixture& m, float* logits, int32_t* chosen, float* weights) {
  if (m.has_shared) {
    chosen[m.per_row] = static_cast<int32_t>(m.num_experts);
    weights[m.per_row] = 1.0f / (1.0f + std::exp(-logits[m.num_experts]));
  }
  float largest = logits[0], total = 0.0f;
  for (int64_t i = 1; i < m.num_experts; ++i) largest = std::max(largest, logits[i]);
  for (int64_t i = 0; i < m.num_experts; ++i) total += logits[i] = std::exp(logits[i] - largest);
  float of_chosen = 0.0f;
  for (int64_t slot = 0; slot < m.per_row; ++slot) {
    int64_t best = -1;
    for (int64_t i = 0; i < m.num_experts; ++i) {
      const bool is_left = !(logits[i] < 0.0f);
      if (is_left && (best < 0 || logits[i] > logits[best])) best = i;
    }
    chosen[slot] = static_cast<int32_t>(best);
    weights[slot] = logits[best] / total;
    of_chosen += weights[slot];
    logits[best] = -1.0f;
  }
  if (!m.normalizes) return;
  for (int64_t slot = 0; slot < m.per_row; ++slot) weights[slot] /= of_chosen;
}

// Sorts the slots of all rows by expert, rows in order: those of expert e are [begins[e], begins[e + 1]).
void sort_by_expert(const int32_t* chosen, int64_t count, int64_t experts, std::vector<int64_t>& begins,
                    int32_t* order) {
  begins.assign(static_cast<size_t>(experts + 2), 0);
  for (int64_t i = 0; i < count; ++i) ++begins[static_cast<size_t>(chosen[i] + 2)];
  for (size_t e = 2; e < begins.size(); ++e) begins[e] += begins[e - 1];
  for (int64_t i = 0; i < count; ++i) order[begins[static_cast<size_t>(chosen[i] + 1)]++] = static_cast<int32_t>(i);
}

template <class T>
void compute(const Mixture& m, const T* x, int64_t x_stride, int64_t rows, void* scratch, T* out, int64_t out_stride,
             int64_t threads) {
  static thread_local std::vector<int64_t> begins;
  const int64_t slots = m.slots(), size = m.size;
  Room room(scratch);
  auto* const logits = room.array<float>(rows * m.all_experts());
  auto* const weights = room.array<float>(rows * slots);
  auto* const chosen = room.array<int32_t>(rows * slots);
  auto* const order = room.array<int32_t>(rows * slots);
  auto* const sums = room.array<float>(rows * size);
  auto* const products = room.array<float>(rows * size);
  auto* const gates = room.array<T>(rows * m.largest_gate);
  auto* const gathered = room.array<T>(rows * size);

  m.router(x, x_stride, rows, logits, threads);
  for_rows(rows, m.num_experts * m.per_row, threads, [&](int64_t row) {
    choose(m, logits + row * m.all_experts(), chosen + row * slots, weights + row * slots);
    std::memset(sums + row * size, 0, static_cast<size_t>(size) * sizeof(float));
  });
  sort_by_expert(chosen, rows * slots, m.all_experts(), begins, order);
  for (int64_t e = 0; e < m.all_experts(); ++e) {
    const int32_t* const own = order + begins[static_cast<size_t>(e)];
    const int64_t count = begins[static_cast<size_t>(e + 1)] - begins[static_cast<size_t>(e)];
    if (count == 0) continue;
    const T* from = x + own[0] / slots * x_stride;
    int64_t stride = x_stride;
    if (count > 1 && count < rows) {  // all rows of a call lie as they are
      for_rows(count, size, threads, [&](int64_t i) {
        std::memcpy(gathered + i * size, x + own[i] / slots * x_stride, static_cast<size_t>(size) * sizeof(T));
      });
      from = gathered;
      stride = size;
    }
    m.experts[e].gate_up(from, stride, count, gates, threads);
    m.experts[e].down(gates, m.experts[e].gate_up.linear->columns, count, products, threads);
    for_rows(count, size, threads, [&](int64_t i) {
      const Floats weight = splat(weights[own[i]]);
      float* const sum = sums + own[i] / slots * size;
      for (int64_t k = 0; k < size; k += kLanes) {
        const Floats product = load_some(products + i * size + k, size - k);
        store_some(sum + k, fused(weight, product, load_some(sum + k, size - k)), size - k);
      }
    });
  }
  for_rows(rows, size, threads, [&](int64_t row) {
    for (int64_t k = 0; k < size; k += kLanes)
      store_some(out + row * out_stride + k, load_some(sums + row * size + k, size - k), size - k);
  });
}

}  // namespace
}  // namespace tandem

TANDEM_EXPORT void tandem_mixture_f32(const tandem::Mixture* mixture, const float* x, int64_t x_stride, int64_t rows,
                                      void* scratch, float* out, int64_t out_stride, int64_t threads) {
  tandem::compute(*mixture, x, x_stride, rows, scratch, out, out_stride, threads);
}

TANDEM_EXPORT void tandem_mixture_bf16(const tandem::Mixture* mixture, const tandem::Bfloat16* x, int64_t x_stride,
                                       int64_t rows, void* scratch, tandem::Bfloat16* out, int64_t out_stride,
                                       int64_t threads) {
  tandem::compute(*mixture, x, x_stride, rows, scratch, out, out_stride, threads);
}
