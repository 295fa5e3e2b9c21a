// Threads and ranges shared by the kernels.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))

namespace tandem {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Runs body(thread, threads) on every thread of a team drawn from torch's own OpenMP pool. A team may come out
// smaller than asked (nested regions), so bodies divide work by the second argument, never by `threads`.
template <class Body>
inline void parallel(int64_t threads, Body&& body) {
  if (threads <= 1) {
    body(0, 1);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  body(omp_get_thread_num(), omp_get_num_threads());
}

// The barrier of the team that is inside `parallel`; nothing when there is no team.
inline void team_barrier(int threads) {
  if (threads <= 1) return;
#pragma omp barrier
}

struct Range {
  int64_t begin, end;
};

// Part `index` of `parts` of [0, count) in multiples of `grain`, as even as the grain allows.
inline Range split(int64_t count, int64_t index, int64_t parts, int64_t grain = 1) {
  const int64_t units = ceil_div(count, grain);
  return {std::min(count, units * index / parts * grain), std::min(count, units * (index + 1) / parts * grain)};
}

}  // namespace tandem
