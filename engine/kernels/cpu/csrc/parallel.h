// Threads, ranges and scratch memory shared by the kernels.
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

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

// Memory that a thread keeps for its life and that grows rarely: no allocation in the steady state.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  // At least `bytes` bytes, aligned to a page, a huge one where it is worth it: rows are read at a rate that page walks
  // would halve. What was there before is lost when it grows.
  void* get(size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      const size_t page = bytes >= kHugePage / 4 ? kHugePage : 4096;
      size_ = (bytes + page - 1) / page * page;
      memory_ = std::aligned_alloc(page, size_);
      if (memory_ == nullptr) std::abort();
      if (page == kHugePage) madvise(memory_, size_, MADV_HUGEPAGE);
    }
    return memory_;
  }

  template <class T>
  T* array(int64_t count) {
    return static_cast<T*>(get(static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;

  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tandem
