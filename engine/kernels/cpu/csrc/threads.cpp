// Processor affinity of a team's threads.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>

#include <atomic>
#include <cstdint>

#include "parallel.h"

// Binds each thread of the calling thread's team to one processor of `cpus`, the caller to the first; returns how many
// were bound. OpenMP keeps a team for the thread that calls it, so they stay bound for its later calls.
TANDEM_EXPORT int64_t tandem_bind_threads(const int64_t* cpus, int64_t threads) {
#if defined(__linux__)
  std::atomic<int64_t> bound{0};
  tandem::parallel(threads, [&](int thread, int) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<int>(cpus[thread]), &one);
    if (sched_setaffinity(0, sizeof one, &one) == 0) ++bound;
  });
  return bound;
#else
  return 0;
#endif
}
