// Memory for intermediate results that are reused out of L2.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#include "parallel.h"

namespace tandem {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Seconds for reading half a huge page, whichever half takes longer, after it has been read once: out of L2, that is,
// unless its lines compete for the same sets.
inline double reading_time(const char* page) {
  constexpr int64_t kHalf = kHugePage / 2;
  constexpr int kReadings = 5;
  double worst = 0;
  for (const char* half = page; half < page + kHugePage; half += kHalf) {
    double best = 1;
    for (int i = 0; i < kReadings; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      uint64_t sum = 0;
      for (int64_t at = 0; at < kHalf; at += 64) sum += *reinterpret_cast<const volatile uint64_t*>(half + at);
      asm volatile("" ::"r"(sum));
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    worst = std::max(worst, best);
  }
  return worst;
}

struct TimedPage {
  double seconds;
  char* page;
};

// Backs `count` pages from `page` on with memory and sorts them, the fastest first.
inline void time_pages(char* page, int64_t count, TimedPage* timed) {
  for (int64_t i = 0; i < count; ++i, page += kHugePage) {
    for (int64_t at = 0; at < kHugePage; at += 4096) page[at] = 1;
    TimedPage* place = timed + i;
    const TimedPage found{reading_time(page), page};
    for (; place > timed && place[-1].seconds > found.seconds; --place) *place = place[-1];
    *place = found;
  }
}

// `count` huge pages in a row that the calling thread's L2 holds well; null when there is no memory.
//
// L2 is addressed physically. A virtual machine's huge page may be small pages of its host, anywhere: in about
// one in twenty, so many of them map to the same sets that half of it does not stay in L2, and products that read it
// take 1.5 times as long for as long as it is used. So a few more pages than needed are timed, and the slowest are
// released: by one thread at a time, since the spare pages of all threads together would be much memory.
inline char* well_placed_pages(int64_t count) {
  constexpr int64_t kSpare = 6;
  static std::mutex one_by_one;
  const std::lock_guard<std::mutex> alone(one_by_one);
  const int64_t tried = count + kSpare;
  const auto size = static_cast<size_t>((count + tried + 1) * kHugePage);
  auto* const timed = static_cast<TimedPage*>(std::malloc(static_cast<size_t>(tried) * sizeof(TimedPage)));
  char* const memory =
      static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (timed == nullptr || memory == MAP_FAILED) return nullptr;
  char* const result = memory + (-reinterpret_cast<uintptr_t>(memory) & (kHugePage - 1));
  char* const candidates = result + count * kHugePage;
  madvise(candidates, static_cast<size_t>(tried * kHugePage), MADV_HUGEPAGE);
  time_pages(candidates, tried, timed);
  for (int64_t i = 0; i < count; ++i) {
    char* target = result + i * kHugePage;
    if (mremap(timed[i].page, kHugePage, kHugePage, MREMAP_MAYMOVE | MREMAP_FIXED, target) != target) std::abort();
  }
  // Never the range of the chosen pages: it may have been mapped again by now.
  for (int64_t i = count; i < tried; ++i) munmap(timed[i].page, kHugePage);
  std::free(timed);
  char* const behind = candidates + tried * kHugePage;
  munmap(behind, static_cast<size_t>(memory + size - behind));
  if (result > memory) munmap(memory, static_cast<size_t>(result - memory));
  return result;
}

// Memory that a thread keeps for its lifetime and that grows rarely: no allocation in the steady state.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { drop(); }

  // At least `bytes` bytes, aligned to a page, a huge one where it is worth it: rows are read at a rate that page walks
  // would halve. What was there before is lost when it grows.
  void* get(size_t bytes) {
    if (bytes <= size_) return memory_;
    drop();
    const int64_t wanted = static_cast<int64_t>(bytes);
    if (wanted >= kHugePage / 4) {
      mapped_ = true;
      size_ = static_cast<size_t>(round_up(wanted, kHugePage));
      memory_ = well_placed_pages(static_cast<int64_t>(size_) / kHugePage);
    } else {
      size_ = static_cast<size_t>(round_up(wanted, 4096));
      memory_ = std::aligned_alloc(4096, size_);
    }
    if (memory_ == nullptr) std::abort();
    return memory_;
  }

  template <class T>
  T* array(int64_t count) {
    return static_cast<T*>(get(static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  void drop() {
    if (mapped_) {
      munmap(memory_, size_);
    } else {
      std::free(memory_);
    }
    memory_ = nullptr;
    size_ = 0;
    mapped_ = false;
  }

  void* memory_ = nullptr;
  size_t size_ = 0;
  bool mapped_ = false;
};

}  // namespace tandem
