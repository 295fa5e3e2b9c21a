// CPU features that this library may use, and requests to the operating system that are made once per process.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "parallel.h"

namespace {

// Linux grants the 8 KB of tile state only to processes that ask (arch_prctl(2), Documentation/arch/x86/xstate.rst).
bool tiles_granted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

// Bits in the order of engine/kernels/cpu/library.py: CpuFeatures.
TANDEM_EXPORT int64_t tandem_cpu_features() {
  int64_t bits = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(__AVX2__) && defined(__FMA__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) bits |= 1;
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    bits |= 2;
#ifdef __AVX512BF16__
    if (__builtin_cpu_supports("avx512bf16")) bits |= 4;
#endif
#ifdef __AVX512VNNI__
    if (__builtin_cpu_supports("avx512vnni")) bits |= 8;
#endif
  }
#endif
  // The compiler saw these with -march=native on this very processor (the build's key holds its flags); only the
  // permission can still be missing, for example under an old kernel.
#if defined(__AMX_TILE__) && defined(__AVX512F__)
  const bool tiles = tiles_granted();
#ifdef __AMX_BF16__
  if (tiles) bits |= 16;
#endif
#ifdef __AMX_INT8__
  if (tiles) bits |= 32;
#endif
#endif
  // Zen's takes as long as a float multiply-add, for twice the products; Intel's (Cooper Lake and later) four times.
#ifdef __AVX512BF16__
  if ((bits & 4) && __builtin_cpu_is("amd")) bits |= 64;
#endif
#endif
  return bits;
}

// Asks for huge pages behind [address, address + bytes), before it is first touched; 0 on success.
TANDEM_EXPORT int64_t tandem_advise_huge(void* address, int64_t bytes) {
  return madvise(address, static_cast<size_t>(bytes), MADV_HUGEPAGE);
}
