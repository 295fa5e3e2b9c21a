// Scratch memory beside a neighbour who maps memory wherever a page has just been moved away from, as another thread
// might. Every page is timed faster than the one before, so the last ones are chosen and all others given back.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

struct ShrinkingClock {
  using duration = std::chrono::duration<double>;
  using time_point = std::chrono::time_point<ShrinkingClock>;
  static time_point now() {
    static double time = 0, step = 0.5;
    time += step;
    step *= 0.99;
    return time_point(duration(time));
  }
};

std::vector<char*> neighbours;

void* move(void* from, size_t size, size_t new_size, int flags, void* to) {
  void* moved = mremap(from, size, new_size, flags, to);
  void* taken = mmap(from, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (taken == from) neighbours.push_back(static_cast<char*>(taken));
  return moved;
}

int64_t mapped_bytes() {
  long pages = 0;
  FILE* file = std::fopen("/proc/self/statm", "r");
  if (std::fscanf(file, "%ld", &pages) != 1) std::abort();
  std::fclose(file);
  return int64_t{pages} * 4096;
}

}  // namespace

namespace std::chrono {
using shrinking_clock = ShrinkingClock;
}

#define steady_clock shrinking_clock
#define mremap move
#include "scratch.h"
#undef mremap

int main() {
  constexpr int64_t kPages = 3, kSize = kPages * tandem::kHugePage;
  neighbours.reserve(kPages);
  const int64_t before = mapped_bytes();
  int64_t with_scratch = 0;
  {
    tandem::Scratch scratch;
    std::memset(scratch.get(kSize), 1, kSize);
    with_scratch = mapped_bytes();
  }
  const int64_t after = mapped_bytes();
  std::vector<unsigned char> resident(tandem::kHugePage / 4096);
  int64_t kept = 0;
  for (char* neighbour : neighbours) kept += mincore(neighbour, tandem::kHugePage, resident.data()) == 0;
  const auto pages = [&](int64_t now) { return static_cast<long>((now - before) / tandem::kHugePage); };
  std::printf("%zu moved, %ld kept, %ld pages with the scratch, %ld after\n", neighbours.size(),
              static_cast<long>(kept), pages(with_scratch), pages(after));
  return 0;
}
