// Matrix products on vector registers whose results do not depend on the batch: every output element is one chain of
// fused multiply-adds, or of dot products of two elements, over the depth, in order, whatever the number of rows and
// threads.
//
// Weights are packed as [panel of 32 columns][line], a line being one or two elements of the depth for each column. A
// block of rows times one panel lives in registers. How the weights reach it depends on the number of rows:
// - those of one block: the panel is read as it is stored, once, from memory, and several panels are computed at once
//   where the latency of the chains would be the bottleneck;
// - some: a segment of the depth at a time, which stays in L1 for all blocks while the next one comes from memory;
// - many, where reading no longer matters: the whole panel in the form that is multiplied, which stays in L2, so that
//   weights of fewer bits are converted once.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear.h"
#include "parallel.h"
#include "scratch.h"
#include "vectors.h"

namespace tandem {

// Rows of a block: as many as leave registers for a line of weights.
#if defined(__AVX512F__)
constexpr int kBlockRows = 12;
#else
constexpr int kBlockRows = 3;
#endif
constexpr int kLineRegisters = kPanel / kRegisterLanes;

constexpr int64_t kLinesAhead = 48;         // prefetch distance
constexpr int64_t kThreadWork = 64 * 1024;  // multiply-adds below which a second thread costs more than it saves
constexpr int64_t kChunkRows = 256;         // rows that are converted, and whose sums are kept, at a time
constexpr int64_t kSomeRows = 32;
constexpr int64_t kSegmentBytes = 16 * 1024;
constexpr int64_t kMostSums = 12 * kPanel;  // of a block

// Two neighbours of a row.
struct Pair {
  Bfloat16 low, high;
};

// How a line is stored, what it is multiplied by, and its columns in registers.
struct FloatLines {
  using Stored = float;
  using Expanded = FloatLines;  // for many rows
  using Element = float;        // of a row, that a line is multiplied by
  static constexpr int64_t kDepth = 1;
  static constexpr int64_t kBytes = kPanel * 4;

  // The columns of register `i`.
  TANDEM_INLINE Register columns(const char* line, int i) {
    return load_register(reinterpret_cast<const float*>(line) + i * kRegisterLanes);
  }

  TANDEM_INLINE Register splat(const float* x) { return splat_register(*x); }

  TANDEM_INLINE Register multiply_add(Register x, Register weights, Register sum) {
    return fused_register(x, weights, sum);
  }

  // Position of a column within its line.
  static int64_t position(int64_t column) { return column; }
};

// Columns c and c + 16 share a word: one instruction makes either of them a float.
struct Bfloat16Lines : FloatLines {
  using Stored = uint16_t;
  static constexpr int64_t kBytes = kPanel * 2;

  TANDEM_INLINE Register columns(const char* line, int i) {
    constexpr int kHalf = kLineRegisters / 2;
    RegisterBits words;
    std::memcpy(&words, line + i % kHalf * static_cast<int64_t>(sizeof words), sizeof words);
    return (Register)(i < kHalf ? words << 16 : words & 0xffff0000u);
  }

  static int64_t position(int64_t column) { return column % 16 * 2 + column / 16; }
};

#ifdef __AVX512BF16__
// Two elements of each column share a word, and one instruction adds both products. It takes what is below 2^-126 for
// zero.
struct Bfloat16Pairs {
  using Stored = uint16_t;
  using Expanded = Bfloat16Pairs;
  using Element = Pair;
  static constexpr int64_t kDepth = 2;
  static constexpr int64_t kBytes = kPanel * 4;

  TANDEM_INLINE Register columns(const char* line, int i) {
    Register words;
    std::memcpy(&words, line + i * static_cast<int64_t>(sizeof words), sizeof words);
    return words;
  }

  TANDEM_INLINE Register splat(const Pair* x) {
    float word;
    std::memcpy(&word, x, sizeof word);
    return (Register)_mm512_broadcastss_ps(_mm_load_ss(&word));
  }

  TANDEM_INLINE Register multiply_add(Register x, Register weights, Register sum) {
    return (Register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
  }

  static int64_t position(int64_t column) { return column * 2; }
};
#endif

template <class Lines>
int64_t lines_of(int64_t depth) {
  return ceil_div(depth, Lines::kDepth);
}

// Where element `k` of a column is stored, in elements from the beginning of its panel.
template <class Lines>
int64_t offset_of(int64_t k, int64_t column) {
  return k / Lines::kDepth * (kPanel * Lines::kDepth) + Lines::position(column) + k % Lines::kDepth;
}

// Rows times panels, added to `sums`, [rows][panels * kPanel].
template <class Element>
struct Block {
  const char* weights;  // of the first panel; so many lines, and as many to the next panel
  int64_t lines, panel_lines;
  const Element* x;
  int64_t x_stride;
  float* sums;
  const char* next;  // lines that are asked for meanwhile
};

template <class Lines, int Rows, int Panels, bool ahead>
void multiply_block(const Block<typename Lines::Element>& block) {
  constexpr int kSums = Panels * kLineRegisters;
  const int64_t stride = block.x_stride;
  const auto* x = block.x;
  Register sums[Rows][kSums];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      sums[r][i] = load_register(block.sums + (r * kSums + i) * kRegisterLanes);
    }
  }
  for (int64_t k = 0; k < block.lines; ++k) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      const int64_t line = p * block.panel_lines + k;
      if (ahead) {
#pragma GCC unroll 2
        for (int64_t at = 0; at < Lines::kBytes; at += 64) __builtin_prefetch(block.next + line * Lines::kBytes + at);
      }
      Register values[Rows];
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) values[r] = Lines::splat(x + r * stride + k);
#pragma GCC unroll 8
      for (int i = 0; i < kLineRegisters; ++i) {
        const Register weights = Lines::columns(block.weights + line * Lines::kBytes, i);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
          Register& sum = sums[r][p * kLineRegisters + i];
          sum = Lines::multiply_add(values[r], weights, sum);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      store_register(block.sums + (r * kSums + i) * kRegisterLanes, sums[r][i]);
    }
  }
}

template <class Lines>
using MultiplyBlock = void (*)(const Block<typename Lines::Element>&);

template <class Lines, int Rows, int Panels>
MultiplyBlock<Lines> block_of(bool ahead) {
  return ahead ? multiply_block<Lines, Rows, Panels, true> : multiply_block<Lines, Rows, Panels, false>;
}

// The block for so many rows, and how many panels it takes.
template <class Lines>
MultiplyBlock<Lines> block_for(int64_t rows, int64_t panels, bool ahead, int64_t* taken) {
#if defined(__AVX512F__)
  if (rows <= 3 && panels >= 4) {
    *taken = 4;
    return rows == 1   ? block_of<Lines, 1, 4>(ahead)
           : rows == 2 ? block_of<Lines, 2, 4>(ahead)
                       : block_of<Lines, 3, 4>(ahead);
  }
  if (rows <= 6 && panels >= 2) {
    *taken = 2;
    switch (rows) {
      case 1: return block_of<Lines, 1, 2>(ahead);
      case 2: return block_of<Lines, 2, 2>(ahead);
      case 3: return block_of<Lines, 3, 2>(ahead);
      case 4: return block_of<Lines, 4, 2>(ahead);
      case 5: return block_of<Lines, 5, 2>(ahead);
      default: return block_of<Lines, 6, 2>(ahead);
    }
  }
#else
  if (rows == 1 && panels >= 2) {
    *taken = 2;
    return block_of<Lines, 1, 2>(ahead);
  }
#endif
  *taken = 1;
  switch (rows) {
    case 1: return block_of<Lines, 1, 1>(ahead);
    case 2: return block_of<Lines, 2, 1>(ahead);
#if defined(__AVX512F__)
    case 3: return block_of<Lines, 3, 1>(ahead);
    case 4: return block_of<Lines, 4, 1>(ahead);
    case 5: return block_of<Lines, 5, 1>(ahead);
    case 6: return block_of<Lines, 6, 1>(ahead);
    case 7: return block_of<Lines, 7, 1>(ahead);
    case 8: return block_of<Lines, 8, 1>(ahead);
    case 9: return block_of<Lines, 9, 1>(ahead);
    case 10: return block_of<Lines, 10, 1>(ahead);
    case 11: return block_of<Lines, 11, 1>(ahead);
#endif
    default: return block_of<Lines, kBlockRows, 1>(ahead);
  }
}

// x * sigmoid(x). e^-x = 2^n e^r with |r| <= ln 2 / 2; both steps keep full float precision.
TANDEM_INLINE Floats silu(Floats x) {
  Floats y = -x;
  const Ints closed = y > 88.0f;     // e^-x overflows soon, and the result is below the least normal number
  y = closed ? splat(88.0f) : y;     // a NaN compares false and stays
  y = y < -87.0f ? splat(-87.0f) : y;
  const Floats shifted = y * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits are the nearest integer
  const Floats n = shifted - 12582912.0f;
  const Floats r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Floats power = (Floats)(((Ints)shifted << 23) + 0x3f800000);
  return closed ? x * 0.0f : x / (1.0f + p * power);
}

TANDEM_INLINE Floats rounded_to(const float*, Floats x) { return x; }

TANDEM_INLINE Floats rounded_to(const Bfloat16*, Floats x) {
  Bfloat16 narrow[kLanes];
  store(narrow, x);
  return load(narrow);
}

template <class Out>
TANDEM_INLINE void add_some(Out* out, Floats x, int64_t count) {
  store_some(out, load_some(out, count) + rounded_to(out, x), count);
}

// Writes the sums of one row and panel.
template <class Out>
void write_sums(const Linear& w, const Call& call, int64_t row, int64_t panel, const float* sums) {
  const int64_t width = w.epilogue == kGated ? kPanel / 2 : kPanel;
  Floats low = load(sums), high = load(sums + 16);
  if (w.bias) {
    low += load(w.bias + panel * kPanel);
    high += load(w.bias + panel * kPanel + 16);
  }
  Out* out = static_cast<Out*>(call.out) + row * call.out_stride + panel * width;
  const int64_t left = w.columns - panel * width;
  if (w.epilogue == kGated) return store_some(out, silu(low) * high, left);
  if (w.epilogue == kAdd) {
    add_some(out, low, left);
    if (left > 16) add_some(out + 16, high, left - 16);
    return;
  }
  store_some(out, low, left);
  if (left > 16) store_some(out + 16, high, left - 16);
}

// Rows in the form in which they are multiplied.
template <class Element>
struct ElementRows {
  const Element* data;
  int64_t stride, count;

  const Element* row(int64_t index) const { return data + index * stride; }
};

template <class In>
void convert(const In* x, int64_t stride, Range rows, int64_t depth, float* floats, int64_t floats_stride) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const In* from = x + row * stride;
    float* to = floats + row * floats_stride;
    for (int64_t k = 0; k < depth; k += kLanes) store_some(to + k, load_some(from + k, depth - k), depth - k);
  }
}

// A last element without a neighbour gets a zero.
inline void convert(const Bfloat16* x, int64_t stride, Range rows, int64_t depth, Pair* pairs, int64_t pairs_stride) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    Pair* to = pairs + row * pairs_stride;
    std::memcpy(to, x + row * stride, static_cast<size_t>(depth) * sizeof(Bfloat16));
    if (depth % 2) to[depth / 2].high = Bfloat16{0};
  }
}

// The rows as they are, where they are multiplied so.
inline const float* unconverted(const float* x, int64_t, int64_t, const float*) { return x; }
inline const float* unconverted(const Bfloat16*, int64_t, int64_t, const float*) { return nullptr; }
inline const Pair* unconverted(const Bfloat16* x, int64_t stride, int64_t depth, const Pair*) {
  return depth % 2 || stride % 2 ? nullptr : reinterpret_cast<const Pair*>(x);
}

// The share of one thread: some panels.
template <class Lines, class Out>
class VectorProduct {
 public:
  using Rows = ElementRows<typename Lines::Element>;

  VectorProduct(const Linear& linear, const Call& call, Range panels)
      : w_(linear), call_(call), panels_(panels), lines_(lines_of<Lines>(linear.depth)) {}

  // Rows that fit into one block.
  void one_block(Rows x) {
    alignas(64) float sums[kMostSums];
    for (int64_t panel = panels_.begin, taken = 1; panel < panels_.end; panel += taken) {
      const auto multiply = block_for<Lines>(x.count, panels_.end - panel, true, &taken);
      std::fill_n(sums, x.count * taken * kPanel, 0.0f);
      const char* weights = line(panel, 0);
      multiply({weights, lines_, lines_, x.data, x.stride, sums, weights + kLinesAhead * Lines::kBytes});
      for (int64_t row = 0; row < x.count; ++row) {
        for (int64_t p = 0; p < taken; ++p) {
          write_sums<Out>(w_, call_, row, panel + p, sums + (row * taken + p) * kPanel);
        }
      }
    }
  }

  // At most kSomeRows.
  void some_rows(Rows x) {
    constexpr int64_t kLines = kSegmentBytes / Lines::kBytes;
    alignas(64) float sums[kSomeRows * kPanel];
    for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) {
      std::fill_n(sums, x.count * kPanel, 0.0f);
      for (int64_t k = 0; k < lines_; k += kLines) {
        multiply_lines<Lines>(x, k, std::min(kLines, lines_ - k), line(panel, k), line(panel, k + kLines), sums);
      }
      for (int64_t row = 0; row < x.count; ++row) write_sums<Out>(w_, call_, row, panel, sums + row * kPanel);
    }
  }

  // Any number of rows, of which the first is row `first` of the call.
  void many_rows(Rows x, int64_t first) {
    static thread_local Scratch scratch;
    float* const sums = scratch.array<float>(x.count * kPanel);
    for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) {
      std::fill_n(sums, x.count * kPanel, 0.0f);
      multiply_lines<typename Lines::Expanded>(x, 0, lines_, expanded(panel), nullptr, sums);
      for (int64_t row = 0; row < x.count; ++row) {
        write_sums<Out>(w_, call_, first + row, panel, sums + row * kPanel);
      }
    }
  }

 private:
  const char* line(int64_t panel, int64_t k) const { return w_.weights + (panel * lines_ + k) * Lines::kBytes; }

  // All blocks of rows times so many lines, from line `k` on. `next`: lines that the first block asks for.
  template <class Stored>
  static void multiply_lines(Rows x, int64_t k, int64_t lines, const char* weights, const char* next, float* sums) {
    const int64_t blocks = ceil_div(x.count, kBlockRows);
    for (int64_t b = 0; b < blocks; ++b) {
      const Range rows = split(x.count, b, blocks);
      int64_t taken = 1;
      const auto multiply = block_for<Stored>(rows.end - rows.begin, 1, next != nullptr && b == 0, &taken);
      multiply({weights, lines, lines, x.row(rows.begin) + k, x.stride, sums + rows.begin * kPanel, next});
    }
  }

  // A whole panel.
  const char* expanded(int64_t panel) const {
    if constexpr (std::is_same_v<Lines, typename Lines::Expanded>) {
      return line(panel, 0);
    } else {
      static thread_local Scratch scratch;
      float* const found = scratch.array<float>(w_.depth * kPanel);
      for (int64_t k = 0; k < w_.depth; ++k) {
#pragma GCC unroll 8
        for (int i = 0; i < kLineRegisters; ++i) {
          const Register weights = Lines::columns(line(panel, k), i);
          std::memcpy(found + k * kPanel + i * kRegisterLanes, &weights, sizeof weights);
        }
      }
      return reinterpret_cast<const char*>(found);
    }
  }

  const Linear& w_;
  const Call& call_;
  const Range panels_;
  const int64_t lines_;  // of a panel
};

// A product by a team of threads. `In`: elements of x; `Out`: of the output.
template <class Lines, class In, class Out>
void multiply_rows(const Linear& w, const Call& call, int64_t threads) {
  if (call.rows == 0) return;
  using Element = typename Lines::Element;
  const int64_t panels = panels_of(w), worth = call.rows * panels * kPanel * w.depth / kThreadWork;
  const int64_t wanted = std::min(threads, std::max<int64_t>(1, worth));
  const int64_t lines = lines_of<Lines>(w.depth);
  const In* const x = static_cast<const In*>(call.x);
  // Apart by an odd number of cache lines: a block's rows would compete for the same sets of L1.
  const int64_t stride = round_up(lines, 2 * kLanes) + kLanes;
  static thread_local Scratch scratch;
  if (call.rows <= kSomeRows) {
    const Element* const ready = unconverted(x, call.x_stride, w.depth, static_cast<const Element*>(nullptr));
    parallel(wanted, [&](int thread, int team) {
      VectorProduct<Lines, Out> product(w, call, split(panels, thread, team));
      ElementRows<Element> rows{ready, call.x_stride / Lines::kDepth, call.rows};
      if (!ready) {  // so few that waiting for each other would take longer than doing it twice
        Element* const converted = scratch.array<Element>(call.rows * stride);
        convert(x, call.x_stride, {0, call.rows}, w.depth, converted, stride);
        rows = {converted, stride, call.rows};
      }
      if (call.rows <= kBlockRows) {
        product.one_block(rows);
      } else {
        product.some_rows(rows);
      }
    });
    return;
  }
  Element* const converted = scratch.array<Element>(std::min(call.rows, kChunkRows) * stride);
  parallel(wanted, [&](int thread, int team) {
    VectorProduct<Lines, Out> product(w, call, split(panels, thread, team));
    for (int64_t first = 0; first < call.rows; first += kChunkRows) {
      const int64_t count = std::min(kChunkRows, call.rows - first);
      convert(x + first * call.x_stride, call.x_stride, split(count, thread, team), w.depth, converted, stride);
      team_barrier(team);
      product.many_rows({converted, stride, count}, first);
      team_barrier(team);  // before the rows are overwritten
    }
  });
}

// Packs weight [columns (twice that when gated: gates, then values), depth] into panels.
template <class Lines>
void pack_panels(const typename Lines::Stored* weight, int64_t stride, int64_t columns, int64_t depth, bool gated,
                 typename Lines::Stored* packed, int64_t threads) {
  using Stored = typename Lines::Stored;
  constexpr int64_t kTogether = 64;  // elements of a column read, and lines written, while they are in L1
  constexpr int64_t kLineSize = kPanel * Lines::kDepth;
  const int64_t panels = ceil_div(columns, gated ? kPanel / 2 : kPanel);
  const int64_t lines = lines_of<Lines>(depth);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(panels, thread, team);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      for (int64_t begin = 0; begin < depth; begin += kTogether) {
        const int64_t count = std::min(kTogether, depth - begin);
        Stored* const first = packed + panel * lines * kLineSize + begin * kPanel;
        for (int64_t column = 0; column < kPanel; ++column) {
          const int64_t row = source_row(columns, gated, panel, column);
          Stored values[kTogether + Lines::kDepth] = {};
          if (row >= 0) std::memcpy(values, weight + row * stride + begin, static_cast<size_t>(count) * sizeof(Stored));
          Stored* target = first + Lines::position(column);
          for (int64_t k = 0; k < count; k += Lines::kDepth, target += kLineSize) {
            std::memcpy(target, values + k, Lines::kDepth * sizeof(Stored));
          }
        }
      }
    }
  });
}

// Rows `ids` of an ungated packed matrix, [count, depth]. Returns 0, and writes nothing, when an id is out of range.
template <class Lines>
int64_t embed_rows(const typename Lines::Stored* packed, int64_t columns, int64_t depth, const int64_t* ids,
                   int64_t count, typename Lines::Stored* out, int64_t out_stride, int64_t threads) {
  if (!all_below(ids, count, columns)) return 0;
  const int64_t whole = lines_of<Lines>(depth) * Lines::kDepth;
  parallel(threads, [&](int thread, int team) {
    const Range range = split(count, thread, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const auto* panel = packed + ids[i] / kPanel * whole * kPanel;
      for (int64_t k = 0; k < depth; ++k) out[i * out_stride + k] = panel[offset_of<Lines>(k, ids[i] % kPanel)];
    }
  });
  return 1;
}

}  // namespace tandem
