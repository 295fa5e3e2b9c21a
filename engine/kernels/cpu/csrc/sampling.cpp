// Draws one token per row: temperature, min-p, top-k, top-p, counter-based Gumbel noise, argmax; see engine/sampling/sampler.py
// for the meaning of each step, which this file must match, and engine/sampling/philox.py for the noise.
//
// Cut-offs are found without sorting: floats are mapped to integers of the same order, and three passes of eleven bits
// (radix selection) narrow the cut-off value down, counting (top-k) or adding up probabilities (top-p).
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "parallel.h"
#include "scratch.h"

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t Wide __attribute__((vector_size(64)));

constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Row {
  float temperature;
  float min_p;
  float top_p;
  int64_t top_k;  // the vocabulary: off
  uint64_t seed;
  uint32_t position;
  uint32_t choice;
};

// Natural logarithm of positive normal floats (Cephes' polynomial: within 2 ulp).
inline Floats log_of(Floats x) {
  Ints bits = (Ints)x;
  Ints exponent = ((bits >> 23) & 0xff) - 126;
  Floats m = (Floats)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  Ints low = m < 0.70710678f;
  exponent += low;  // true lanes are -1
  m = m + (Floats)((Ints)m & low) - 1.0f;
  Floats z = m * m;
  Floats p = 7.0376836292e-2f * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  Floats e = __builtin_convertvector(exponent, Floats);
  Floats y = m * z * p + e * -2.12194440e-4f - 0.5f * z;
  return m + y + e * 0.693359375f;
}

// Exponential of values <= 0 (Cephes' polynomial); far below it is zero.
inline Floats exp_of(Floats x) {
  Ints tiny = x < -87.0f;
  x = (Floats)(((Ints)x & ~tiny) | ((Ints)(Floats{} - 87.0f) & tiny));
  Floats n = x * 1.44269504088896341f;
  Ints k = __builtin_convertvector(n - 0.5f, Ints);  // truncation: n is never positive
  n = __builtin_convertvector(k, Floats);
  x = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = 1.9875691500e-4f * x + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  p = p * x * x + x + 1.0f;
  p = (Floats)((Ints)p + (k << 23));
  return (Floats)((Ints)p & ~tiny);
}

inline void multiply(Words a, uint32_t b, Words& high, Words& low) {
  // Even and odd lanes apart: a 32 by 32 bit product takes 64 bits.
  Wide even = ((Wide)a & 0xffffffffull) * (uint64_t)b;
  Wide odd = ((Wide)a >> 32) * (uint64_t)b;
  high = (Words)((even >> 32) | (odd & ~0xffffffffull));
  low = (Words)((even & 0xffffffffull) | (odd << 32));
}

// Philox4x32-10 (Salmon et al., SC'11) of sixteen counters that differ in their first word.
inline void philox(Words quads, const Row& row, Words out[4]) {
  Words c0 = quads, c1 = Words{} + row.position, c2 = Words{} + row.choice, c3 = Words{};
  uint32_t k0 = (uint32_t)row.seed, k1 = (uint32_t)(row.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    Words h0, l0, h1, l1;
    multiply(c0, 0xD2511F53u, h0, l0);
    multiply(c2, 0xCD9E8D57u, h1, l1);
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

inline Floats gumbel_of(Words bits) {
  Floats v = (__builtin_convertvector(bits, Floats) + 0.5f) * 0x1p-32f;
  const float most = 1.0f - 0x1p-24f;
  Ints above = v > most;
  v = (Floats)(((Ints)v & ~above) | ((Ints)(Floats{} + most) & above));
  // log1p(-v) = log(u) * -v / (u - 1) with u = 1 - v rounded: the rounding of u cancels (Kahan).
  Floats u = 1.0f - v;
  Ints exact = u == 1.0f;
  Floats quotient = log_of(u) * v / (Floats)(((Ints)(1.0f - u) & ~exact) | ((Ints)(Floats{} + 1.0f) & exact));
  Floats small = (Floats)(((Ints)(-quotient) & ~exact) | ((Ints)v & exact));  // -log1p(-v), positive
  return -log_of(small);
}

inline uint32_t ordered(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float unordered(uint32_t key) {
  uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Scratch {
  double mass[2048];
  int64_t count[2048];
  float* near;  // [vocab_size]: the values of one bin
};

inline bool any(Ints lanes) {
  Ints folded = lanes;
  int32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= folded[i];
  return found != 0;
}

// Values of x in [low, high], in order; returns how many.
int64_t keep_between(const float* x, int64_t size, float low, float high, float* out) {
  int64_t kept = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const int width = size - i < kLanes ? (int)(size - i) : kLanes;
    Floats values = Floats{} + kNever;
    std::memcpy(&values, x + i, width * 4);
    if (!any((values >= low) & (values <= high))) continue;
    for (int lane = 0; lane < width; ++lane) {
      if (values[lane] >= low && values[lane] <= high) out[kept++] = values[lane];
    }
  }
  return kept;
}

// The least value v >= floor such that what lies strictly above it stays below `limit`: a number of tokens, or, when
// `weigh`, a share of the probability of everything >= floor. At least the largest value is kept.
float cutoff(const float* x, int64_t size, float top, float floor, bool weigh, double limit, Scratch& scratch) {
  const int shifts[3] = {21, 10, 0};
  uint32_t prefix = 0, mask = 0;
  double above = 0.0;
  for (int pass = 0; pass < 3; ++pass) {
    const uint32_t digits = pass == 2 ? 1023u : 2047u;
    std::memset(scratch.mass, 0, sizeof scratch.mass);
    std::memset(scratch.count, 0, sizeof scratch.count);
    for (int64_t i = 0; i < size; i += kLanes) {
      const int width = size - i < kLanes ? (int)(size - i) : kLanes;
      Floats values = Floats{} + kNever, weights = {};
      std::memcpy(&values, x + i, width * 4);
      if (weigh) weights = exp_of(values - top);
      for (int lane = 0; lane < width; ++lane) {
        const uint32_t key = ordered(values[lane]);
        if (!(values[lane] >= floor) || (key & mask) != prefix) continue;
        const uint32_t bin = (key >> shifts[pass]) & digits;
        scratch.count[bin] += 1;
        scratch.mass[bin] += weights[lane];
      }
    }
    if (weigh && pass == 0) {
      double total = 0.0;
      for (double mass : scratch.mass) total += mass;
      limit *= total;
    }
    int chosen = -1;
    for (int bin = (int)digits; bin >= 0; --bin) {
      if (!scratch.count[bin]) continue;
      if (chosen >= 0) {
        const double next = above + (weigh ? scratch.mass[chosen] : (double)scratch.count[chosen]);
        if (!(next < limit)) break;
        above = next;
      }
      chosen = bin;
    }
    if (chosen < 0) return floor;  // nothing comparable in the row
    prefix |= (uint32_t)chosen << shifts[pass];
    mask |= digits << shifts[pass];
    if (pass == 0) {
      size = keep_between(x, size, unordered(prefix), unordered(prefix | ~mask), scratch.near);
      x = scratch.near;
    }
  }
  return unordered(prefix);
}

// Index of the largest x + noise among x >= floor; ties go to the lowest index. Zero when nothing is comparable.
int64_t draw(const float* x, int64_t size, float floor, const Row& row) {
  Words iota;
  for (int lane = 0; lane < kLanes; ++lane) iota[lane] = lane;
  Floats best[4];
  Ints where[4];
  for (int word = 0; word < 4; ++word) best[word] = Floats{} + kNever, where[word] = Ints{};
  for (int64_t i = 0; i < size; i += 4 * kLanes) {
    // Token 4 * quad + word reads the word of its quad's counter: a transposed view of 64 consecutive logits.
    float block[4][kLanes];
    const int width = size - i < 4 * kLanes ? (int)(size - i) : 4 * kLanes;
    for (int j = 0; j < 4 * kLanes; ++j) block[j & 3][j >> 2] = j < width ? x[i + j] : kNever;
    Floats values[4];
    std::memcpy(values, block, sizeof block);
    Ints kept = Ints{};
    for (int word = 0; word < 4; ++word) kept |= values[word] >= floor;
    if (!any(kept)) continue;
    Words bits[4];
    philox(iota + (uint32_t)(i / 4), row, bits);
    for (int word = 0; word < 4; ++word) {
      Floats score = values[word] + gumbel_of(bits[word]);
      Ints wins = (values[word] >= floor) & (score > best[word]);
      best[word] = (Floats)(((Ints)score & wins) | ((Ints)best[word] & ~wins));
      where[word] = (((Ints)(iota + (uint32_t)(i / 4)) * 4 + word) & wins) | (where[word] & ~wins);
    }
  }
  float most = kNever;
  int64_t index = -1;
  for (int word = 0; word < 4; ++word) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float score = best[word][lane];
      if (score > most || (score == most && index >= 0 && where[word][lane] < index)) {
        most = score;
        index = where[word][lane];
      }
    }
  }
  return index < 0 ? 0 : index;
}

int64_t sample_row(const float* logits, int64_t size, const Row& row, float* scaled, Scratch& scratch) {
  float top = kNever;
  for (int64_t i = 0; i < size; ++i) {
    scaled[i] = logits[i] / row.temperature;
    top = scaled[i] > top ? scaled[i] : top;
  }
  float floor = kNever;
  if (row.min_p > 0.0f) floor = top + std::log(row.min_p);
  if (row.top_k < size) floor = cutoff(scaled, size, top, floor, false, (double)row.top_k, scratch);
  if (row.top_p < 1.0f) floor = cutoff(scaled, size, top, floor, true, (double)row.top_p, scratch);
  return draw(scaled, size, floor, row);
}

// Index of the largest value, the lowest of equal ones; of the first NaN where there is one. Twice through the row: to
// find a maximum alone needs no bookkeeping between one value and the next, and its place is seldom asked for.
int64_t largest(const float* x, int64_t size) {
  constexpr int kChains = 4;
  Floats best[kChains];
  Ints odd[kChains] = {};
  for (Floats& chain : best) chain = Floats{} + kNever;
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
    for (int chain = 0; chain < kChains; ++chain) {
      Floats values;
      std::memcpy(&values, x + i + chain * kLanes, sizeof values);
      odd[chain] |= values != values;
      best[chain] = values > best[chain] ? values : best[chain];
    }
  }
  float most = kNever;
  bool has_nan = any(odd[0] | odd[1] | odd[2] | odd[3]);
  for (const Floats& chain : best)
    for (int lane = 0; lane < kLanes; ++lane) most = chain[lane] > most ? chain[lane] : most;
  for (; i < size; ++i) {
    has_nan |= x[i] != x[i];
    most = x[i] > most ? x[i] : most;
  }
  for (i = 0; !has_nan && i + kLanes <= size; i += kLanes) {
    Floats values;
    std::memcpy(&values, x + i, sizeof values);
    if (any(values == most)) break;
  }
  for (; i < size; ++i)
    if (has_nan ? x[i] != x[i] : x[i] == most) return i;
  return 0;
}

}  // namespace

// logits: float32 [num_rows, size]; the parameters, each [num_rows], as in engine/sampling/backend.py: DrawParams;
// tokens: int64 [num_rows], out.
TANDEM_EXPORT void tandem_draw(const float* logits, int64_t num_rows, int64_t size, const float* temperature,
                               const float* min_p, const float* top_p, const int64_t* top_k, const int64_t* seed,
                               const int64_t* position, const int64_t* choice, int64_t* tokens, int64_t threads) {
  std::atomic<int64_t> next{0};
  tandem::parallel(std::min(threads, num_rows), [&](int, int) {
    static thread_local tandem::Scratch memory;
    float* scaled = memory.array<float>(2 * size);
    Scratch scratch;
    scratch.near = scaled + size;
    for (int64_t r = next++; r < num_rows; r = next++) {
      const int64_t keep = top_k[r] < 1 || top_k[r] > size ? size : top_k[r];
      const Row row{temperature[r],         min_p[r], top_p[r], keep, static_cast<uint64_t>(seed[r]),
                    static_cast<uint32_t>(position[r]), static_cast<uint32_t>(choice[r])};
      tokens[r] = sample_row(logits + r * size, size, row, scaled, scratch);
    }
  });
}

// Index of each row's largest value, the lowest of equal ones; a NaN wins, as in numpy, so that it is not overlooked.
TANDEM_EXPORT void tandem_argmax(const float* logits, int64_t num_rows, int64_t size, int64_t* tokens,
                                 int64_t threads) {
  tandem::parallel(std::min(threads, num_rows), [&](int thread, int team) {
    const tandem::Range rows = tandem::split(num_rows, thread, team);
    for (int64_t r = rows.begin; r < rows.end; ++r) tokens[r] = largest(logits + r * size, size);
  });
}

// The same, but -1 where the largest value is no number: what greedy requests choose when nothing is changed for them.
TANDEM_EXPORT void tandem_choose_largest(const float* logits, int64_t num_rows, int64_t size, int64_t* tokens,
                                         int64_t threads) {
  tandem_argmax(logits, num_rows, size, tokens, threads);
  for (int64_t r = 0; r < num_rows; ++r)
    if (!std::isfinite(logits[r * size + tokens[r]])) tokens[r] = -1;
}

// Bans, in place, what is not set in `bits`, [num_guided, words] with the lowest bit first; rows: int64 [num_guided].
TANDEM_EXPORT void tandem_forbid(float* logits, int64_t size, const int64_t* rows, const uint32_t* bits,
                                 int64_t num_guided, int64_t words) {
  for (int64_t r = 0; r < num_guided; ++r) {
    float* row = logits + rows[r] * size;
    for (int64_t w = 0; w < words; ++w) {
      const uint32_t word = bits[r * words + w];
      const int64_t left = std::min<int64_t>(32, size - 32 * w);
      for (int64_t b = 0; b < left; ++b) row[32 * w + b] = (word >> b & 1) ? row[32 * w + b] : kNever;
    }
  }
}
