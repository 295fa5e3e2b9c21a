// One run: copied, checksummed, or both at once while each byte is in a register.
//
// Long runs are stored past the caches, whole lines at a time: a store that fills a cache would first read what it
// overwrites, which costs half as much again, and the target is not read before the whole chunk has landed.
#pragma once

#include "crc32.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TANDEM_X86 1
#endif

namespace tandem {

// Where a run is stored as well: nowhere, in the caches, or past them. kHot: nowhere, and the source is in the caches.
enum class Store { kNone, kHot, kCached, kPast };

constexpr bool stores(Store store) { return store == Store::kCached || store == Store::kPast; }

constexpr size_t kLine = 64;

// The instructions of a kernel; numbers as in kv_transfer/memory/mover.py.
enum Level : int64_t { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

// Moves the bytes in front of the first whole line of the target, and returns how many.
template <Store kStore, bool kSum>
inline size_t to_line(const uint8_t* source, uint8_t* target, size_t count, uint32_t& state) {
  if (kStore != Store::kPast) return 0;
  const size_t head = -reinterpret_cast<uintptr_t>(target) & (kLine - 1);
  const size_t size = head < count ? head : count;
  std::memcpy(target, source, size);
  if (kSum) state = after_few(state, source, size);
  return size;
}

template <Store kStore, bool kSum>
inline uint32_t run_plain(const uint8_t* source, uint8_t* target, size_t count, uint32_t state) {
  constexpr size_t kPart = 16 << 10;  // both passes over a part find it in the first-level cache
  for (size_t at = 0; at < count; at += kPart) {
    const size_t size = count - at < kPart ? count - at : kPart;
    if (stores(kStore)) std::memcpy(target + at, source + at, size);
    if (kSum) state = after_few(state, source + at, size);
  }
  return state;
}

#ifdef TANDEM_X86

#define TANDEM_AVX2 __attribute__((target("avx2,pclmul")))
#define TANDEM_AVX512 __attribute__((target("avx2,pclmul,avx512f,avx512bw,avx512vl,avx512dq,vpclmulqdq")))

TANDEM_AVX2 inline __m128i load_fold(Fold fold) {
  return _mm_set_epi64x(static_cast<int64_t>(fold.last), static_cast<int64_t>(fold.first));
}

TANDEM_AVX2 inline __m128i carried(__m128i value, __m128i by) {
  return _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11));
}

template <Store kStore>
TANDEM_AVX2 inline void store_16(uint8_t* target, __m128i value) {
  if (kStore == Store::kPast) _mm_stream_si128(reinterpret_cast<__m128i*>(target), value);
  if (kStore == Store::kCached) _mm_storeu_si128(reinterpret_cast<__m128i*>(target), value);
}

TANDEM_AVX2 inline __m128i load_16(const uint8_t* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

// The rest of a run behind `sum`, which stands for everything before: sixteen bytes at a time, then byte by byte.
template <Store kStore>
TANDEM_AVX2 inline uint32_t finish(__m128i sum, const uint8_t* source, uint8_t* target, size_t count) {
  constexpr Store kRest = stores(kStore) ? Store::kCached : kStore;
  const __m128i next = load_fold(fold_by(128));
  for (; count >= 16; source += 16, count -= 16) {
    const __m128i data = load_16(source);
    store_16<kRest>(target, data);
    if (stores(kRest)) target += 16;
    sum = _mm_xor_si128(carried(sum, next), data);
  }
  alignas(16) uint8_t left[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(left), sum);
  if (stores(kRest)) std::memcpy(target, source, count);
  return after_few(after_16(0, left), source, count);
}

template <Store kStore, bool kSum>
TANDEM_AVX2 inline uint32_t run_avx2(const uint8_t* source, uint8_t* target, size_t count, uint32_t state) {
  const size_t head = to_line<kStore, kSum>(source, target, count, state);
  source += head, target += head, count -= head;
  if (!kSum) {
    for (; count >= kLine; source += kLine, target += kLine, count -= kLine)
      for (size_t i = 0; i < kLine; i += 16) store_16<kStore>(target + i, load_16(source + i));
    if (stores(kStore)) std::memcpy(target, source, count);
    return state;
  }
  if (count < kLine) return run_plain<kStore, kSum>(source, target, count, state);
  __m128i sums[4];
  for (size_t i = 0; i < 4; ++i) {
    sums[i] = load_16(source + 16 * i);
    store_16<kStore>(target + 16 * i, sums[i]);
  }
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  const __m128i next = load_fold(fold_by(512));
  for (source += kLine, target += kLine, count -= kLine; count >= kLine;
       source += kLine, target += kLine, count -= kLine)
    for (size_t i = 0; i < 4; ++i) {
      const __m128i data = load_16(source + 16 * i);
      store_16<kStore>(target + 16 * i, data);
      sums[i] = _mm_xor_si128(carried(sums[i], next), data);
    }
  const __m128i one = load_fold(fold_by(128));
  __m128i sum = sums[0];
  for (size_t i = 1; i < 4; ++i) sum = _mm_xor_si128(carried(sum, one), sums[i]);
  return finish<kStore>(sum, source, target, count);
}

TANDEM_AVX512 inline __m512i carried(__m512i value, __m512i by) {
  return _mm512_xor_si512(_mm512_clmulepi64_epi128(value, by, 0x00), _mm512_clmulepi64_epi128(value, by, 0x11));
}

TANDEM_AVX512 inline __m512i four_times(Fold fold) { return _mm512_broadcast_i32x4(load_fold(fold)); }

template <Store kStore>
TANDEM_AVX512 inline __m512i move_line(const uint8_t* source, uint8_t* target) {
  const __m512i data = _mm512_loadu_si512(source);
  if (kStore == Store::kPast) _mm512_stream_si512(reinterpret_cast<__m512i*>(target), data);
  if (kStore == Store::kCached) _mm512_storeu_si512(target, data);
  return data;
}

// Four lanes of sixteen bytes as the one that stands for all.
TANDEM_AVX512 inline __m128i joined(__m512i lanes) {
  constexpr Fold kBy[3] = {fold_by(384), fold_by(256), fold_by(128)};
  const __m512i by = _mm512_set_epi64(0, 0, static_cast<int64_t>(kBy[2].last), static_cast<int64_t>(kBy[2].first),
                                      static_cast<int64_t>(kBy[1].last), static_cast<int64_t>(kBy[1].first),
                                      static_cast<int64_t>(kBy[0].last), static_cast<int64_t>(kBy[0].first));
  const __m512i moved = carried(lanes, by);
  const __m128i first = _mm_xor_si128(_mm512_castsi512_si128(moved), _mm512_extracti32x4_epi32(moved, 1));
  return _mm_xor_si128(_mm_xor_si128(first, _mm512_extracti32x4_epi32(moved, 2)), _mm512_extracti32x4_epi32(lanes, 3));
}

// `kParts` parts, each of `kLines` lines, side by side. `entry` is what comes before, carried to the first line; the
// result stands for that and for all parts.
template <Store kStore, bool kSum, size_t kParts, size_t kLines>
TANDEM_AVX512 inline __m512i move_block(const uint8_t* source, uint8_t* target, __m512i entry, __m512i one) {
  constexpr size_t kPart = kLines * kLine;
  __m512i sums[kParts];
  for (size_t part = 0; part < kParts; ++part)
    sums[part] = move_line<kStore>(source + kPart * part, target + kPart * part);
  if (kSum) sums[0] = _mm512_xor_si512(entry, sums[0]);
  for (size_t at = kLine; at < kPart; at += kLine)
    for (size_t part = 0; part < kParts; ++part) {
      const __m512i data = move_line<kStore>(source + kPart * part + at, target + kPart * part + at);
      if (kSum) sums[part] = _mm512_xor_si512(carried(sums[part], one), data);
    }
  if (!kSum) return entry;
  const __m512i over = four_times(fold_by(8 * kPart));
  __m512i sum = sums[0];
  for (size_t part = 1; part < kParts; ++part) sum = _mm512_xor_si512(carried(sum, over), sums[part]);
  return sum;
}

template <Store kStore, bool kSum>
TANDEM_AVX512 inline uint32_t run_avx512(const uint8_t* source, uint8_t* target, size_t count, uint32_t state) {
  // Two pages at once: a hardware prefetcher follows each, and one alone does not use the full memory bandwidth.
  // Cached data is bound by the latency of multiplications, so more lines are in flight.
  constexpr bool kIsHot = kStore == Store::kHot;
  constexpr size_t kParts = kIsHot ? 4 : 2, kPartLines = kIsHot ? 16 : 64;
  constexpr size_t kBlock = kParts * kPartLines * kLine, kFew = 4 * kLine;
  const size_t head = to_line<kStore, kSum>(source, target, count, state);
  source += head, target += head, count -= head;
  if (count < kFew) return run_avx2<kStore, kSum>(source, target, count, state);
  const __m512i one = four_times(fold_by(512));
  __m512i entry = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))), sum = entry;
  if (kStore != Store::kCached)
    for (; count >= kBlock; source += kBlock, target += kBlock, count -= kBlock) {
      sum = move_block<kStore, kSum, kParts, kPartLines>(source, target, entry, one);
      if (kSum) entry = carried(sum, one);
    }
  for (; count >= kFew; source += kFew, target += kFew, count -= kFew) {
    sum = move_block<kStore, kSum, 4, 1>(source, target, entry, one);
    if (kSum) entry = carried(sum, one);
  }
  for (; count >= kLine; source += kLine, target += kLine, count -= kLine) {
    sum = move_block<kStore, kSum, 1, 1>(source, target, entry, one);
    if (kSum) entry = carried(sum, one);
  }
  if (kSum) return finish<kStore>(joined(sum), source, target, count);
  if (stores(kStore)) std::memcpy(target, source, count);
  return state;
}

#endif  // TANDEM_X86

template <Store kStore, bool kSum>
inline uint32_t run(Level level, const uint8_t* source, uint8_t* target, size_t count, uint32_t state) {
#ifdef TANDEM_X86
  if (level == kAvx512) return run_avx512<kStore, kSum>(source, target, count, state);
  if (level == kAvx2) return run_avx2<kStore, kSum>(source, target, count, state);
#endif
  return run_plain<kStore, kSum>(source, target, count, state);
}

// Instruction sets of this processor.
inline Level best_level() {
#ifdef TANDEM_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("pclmul")) return kPlain;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq"))
    return kAvx512;
  return kAvx2;
#else
  return kPlain;
#endif
}

// Stores past the caches are ordered by nothing else: not by a lock, nor by a message to another process.
inline void settle_stores() {
#ifdef TANDEM_X86
  _mm_sfence();
#endif
}

}  // namespace tandem
