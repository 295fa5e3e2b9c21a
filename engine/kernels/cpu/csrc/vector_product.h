// Matrix products on vector registers whose results do not depend on the batch: every output element is one chain of
// fused multiply-adds, or of dot products of a few elements, over the depth, in order, whatever the number of rows and
// threads.
//
// Weights are packed as [panel of 32 columns][line], a line (lines.h) being one or a few elements of the depth for each
// column. A block of rows times one panel lives in registers. How the weights reach it depends on the number of rows:
// - those of one block: the panel is read as it is stored, once, from memory. One panel at a time, since memory answers
//   faster to one stream than to several, but for one row on narrow registers, where the latency of the chains would be
//   the bottleneck;
// - some: a segment of the depth at a time, which stays in L1 for all blocks while the next one comes from memory;
// - many, where reading no longer matters: the whole panel in the form that is multiplied, which stays in L2, so that
//   weights of fewer bits are converted once.
// Codes of floats (scaled_codes.h) are never read as they are stored: a segment of them is made floats, then multiplied.
#pragma once

#include <algorithm>
#include <cstring>

#include "converted_rows.h"
#include "lines.h"
#include "parallel.h"
#include "scaled_codes.h"
#include "scratch.h"

namespace tandem {

template <class Lines>
constexpr bool kIsGrouped = std::is_same_v<typename Lines::Element, UnitGroup>;

// Whether lines are made floats before they are multiplied, by however few rows.
template <class Lines>
constexpr bool kIsCoded = false;
template <class Codes>
constexpr bool kIsCoded<ScaledCodes<Codes>> = true;

// Rows of a block: as many as leave registers for a line of weights, and for a group's integers beside its sums.
#if defined(__AVX512F__)
template <class Lines>
constexpr int kBlockRows = kIsGrouped<Lines> ? 6 : 12;
#else
template <class Lines>
constexpr int kBlockRows = 3;
#endif

template <class Lines>
constexpr int64_t kLinesAhead = Lines::kBytes > kPanel * 4 ? 12 : 48;  // prefetch distance
constexpr int64_t kThreadWork = 64 * 1024;  // multiply-adds below which a second thread costs more than it saves
constexpr int64_t kChunkRows = 256;         // rows that are converted, and whose sums are kept, at a time
constexpr int64_t kSomeRows = 32;
constexpr int64_t kSegmentBytes = 16 * 1024;

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

// Adds the products of a line, of which the first sums of a row are those from `first` on. All of it is unrolled, and of
// the line and the elements of the rows the fewer are kept in registers meanwhile: there is none to spare.
template <class Lines, int Rows, int Sums>
TANDEM_INLINE void multiply_line(const char* line, const typename Lines::Element* x, int64_t stride,
                                 typename Lines::Sum (&sums)[Rows][Sums], int first) {
  constexpr bool kKeepsRows = Rows < kLineRegisters;
  constexpr int kKept = kKeepsRows ? Rows : kLineRegisters, kOthers = kKeepsRows ? kLineRegisters : Rows;
  Register kept[kKept];
#pragma GCC unroll 12
  for (int i = 0; i < kKept; ++i) kept[i] = kKeepsRows ? Lines::splat(x + i * stride) : Lines::columns(line, i);
#pragma GCC unroll 12
  for (int j = 0; j < kOthers; ++j) {
    const Register other = kKeepsRows ? Lines::columns(line, j) : Lines::splat(x + j * stride);
#pragma GCC unroll 12
    for (int i = 0; i < kKept; ++i) {
      auto& sum = kKeepsRows ? sums[i][first + j] : sums[j][first + i];
      sum = kKeepsRows ? Lines::multiply_add(kept[i], other, sum) : Lines::multiply_add(other, kept[i], sum);
    }
  }
}

// How much higher what is multiplied is than a weight in units of its scale.
template <class Lines>
TANDEM_INLINE RegisterInts above(const char* line, int i) {
  if constexpr (Lines::kCentre == Centre::kZeros) return Lines::kAbove - Lines::zeros(line, i);
  return Lines::kAbove - Lines::kMiddle - RegisterInts{};
}

// The same for a group: integers first, whose sum is scaled once, or once for each half. Narrow registers have room for
// those of one register of columns at a time.
template <class Lines, int Rows, int Sums>
TANDEM_INLINE void multiply_group(const char* line, const UnitGroup* x, int64_t stride, Register (&sums)[Rows][Sums],
                                  int first) {
  constexpr int kTogether = kLineRegisters > 2 ? 1 : kLineRegisters, kQuads = Lines::kQuads / Lines::kParts;
#pragma GCC unroll 8
  for (int step = 0; step < kLineRegisters / kTogether * Lines::kParts; ++step) {
    const int begin = step / Lines::kParts * kTogether, part = step % Lines::kParts;
    RegisterInts integers[Rows][kTogether] = {};
#pragma GCC unroll 8
    for (int quad = part * kQuads; quad < (part + 1) * kQuads; ++quad) {
      Register weights[kTogether];
#pragma GCC unroll 2
      for (int i = 0; i < kTogether; ++i) weights[i] = Lines::columns(line, quad, begin + i);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const Register units = Lines::quad(x + r * stride, quad);
#pragma GCC unroll 2
        for (int i = 0; i < kTogether; ++i) integers[r][i] = Lines::multiply_add(units, weights[i], integers[r][i]);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < kTogether; ++i) {
      const Register scales = Lines::scales(line, part, begin + i);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const UnitGroup& row = x[r * stride];
        auto& sum = sums[r][first + begin + i];
        const int32_t units = Lines::kParts == 1 ? row.sum() : row.sums[part];
        if (Lines::kCentre == Centre::kOffsets && part == 0) {
          const float all = static_cast<float>(row.sum()) * row.scale;
          sum = fused_register(splat_register(all), Lines::offsets(line, begin + i), sum);
        }
        const RegisterInts product = Lines::total(integers[r][i]) + units * above<Lines>(line, begin + i);
        sum = fused_register(__builtin_convertvector(product, Register) * row.scale, scales, sum);
      }
    }
  }
}

template <class Lines, int Rows, int Panels, bool ahead>
void multiply_block(const Block<typename Lines::Element>& block) {
  constexpr int kSums = Panels * kLineRegisters;
  const int64_t stride = block.x_stride;
  const auto* x = block.x;
  typename Lines::Sum sums[Rows][kSums];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      std::memcpy(&sums[r][i], block.sums + (r * kSums + i) * kRegisterLanes, sizeof sums[r][i]);
    }
  }
  for (int64_t k = 0; k < block.lines; ++k) {
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      const int64_t line = p * block.panel_lines + k;
      if (ahead) {
#pragma GCC unroll 9
        for (int64_t at = 0; at < Lines::kBytes; at += 64) __builtin_prefetch(block.next + line * Lines::kBytes + at);
      }
      const char* const weights = block.weights + line * Lines::kBytes;
      if constexpr (kIsGrouped<Lines>) {
        multiply_group<Lines>(weights, x + k, stride, sums, p * kLineRegisters);
      } else {
        multiply_line<Lines>(weights, x + k, stride, sums, p * kLineRegisters);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      std::memcpy(block.sums + (r * kSums + i) * kRegisterLanes, &sums[r][i], sizeof sums[r][i]);
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
#if !defined(__AVX512F__)
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
#endif
    default: break;
  }
#if defined(__AVX512F__)
  if constexpr (kBlockRows<Lines> > 6) {
    switch (rows) {
      case 6: return block_of<Lines, 6, 1>(ahead);
      case 7: return block_of<Lines, 7, 1>(ahead);
      case 8: return block_of<Lines, 8, 1>(ahead);
      case 9: return block_of<Lines, 9, 1>(ahead);
      case 10: return block_of<Lines, 10, 1>(ahead);
      case 11: return block_of<Lines, 11, 1>(ahead);
      default: break;
    }
  }
#endif
  return block_of<Lines, kBlockRows<Lines>, 1>(ahead);
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

template <class Sums>
TANDEM_INLINE Floats gated(Floats gate, Floats value) {
#ifdef TANDEM_AVX512
  if constexpr (std::is_same_v<Sums, IntSums>) return (Floats)silu512((__m512)gate) * value;  // as on AMX
#endif
  return silu(gate) * value;
}

// Writes the sums of one row and panel.
template <class Sums, class Out>
void write_sums(const Linear& w, const Call& call, int64_t row, float row_scale, int64_t panel, const float* sums) {
  const int64_t width = w.epilogue == kGated ? kPanel / 2 : kPanel;
  const auto half = [&](int64_t begin) {
    const int64_t column = panel * kPanel + begin;
    const Floats bias = w.bias ? load(w.bias + column) : Floats{};
    return Sums::value(w, row_scale, reinterpret_cast<const char*>(sums + begin), column, bias);
  };
  const Floats low = half(0), high = half(16);
  Out* out = static_cast<Out*>(call.out) + row * call.out_stride + panel * width;
  const int64_t left = w.columns - panel * width;
  if (w.epilogue == kGated) return store_some(out, gated<Sums>(low, high), left);
  if (w.epilogue == kAdd) {
    add_some(out, low, left);
    if (left > 16) add_some(out + 16, high, left - 16);
    return;
  }
  store_some(out, low, left);
  if (left > 16) store_some(out + 16, high, left - 16);
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
    alignas(64) float sums[kBlockRows<Lines> * kPanel];
    for (int64_t panel = panels_.begin, taken = 1; panel < panels_.end; panel += taken) {
      const auto multiply = block_for<Lines>(x.count, panels_.end - panel, true, &taken);
      start(x, taken * kPanel, sums);
      const char* weights = line(panel, 0);
      multiply({weights, lines_, lines_, x.data, x.stride, sums, weights + kLinesAhead<Lines> * Lines::kBytes});
      for (int64_t row = 0; row < x.count; ++row) {
        for (int64_t p = 0; p < taken; ++p) write(x, 0, row, panel + p, sums + (row * taken + p) * kPanel);
      }
    }
  }

  // At most kSomeRows.
  void some_rows(Rows x) {
    constexpr int64_t kLines = kSegmentBytes / Lines::kBytes;
    alignas(64) float sums[kSomeRows * kPanel];
    for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) {
      start(x, kPanel, sums);
      for (int64_t k = 0; k < lines_; k += kLines) {
        multiply_lines<Lines>(x, k, std::min(kLines, lines_ - k), line(panel, k), line(panel, k + kLines), sums);
      }
      for (int64_t row = 0; row < x.count; ++row) write(x, 0, row, panel, sums + row * kPanel);
    }
  }

  // At most kSomeRows, of weights that are made floats: a segment of the depth at a time, which stays in L1.
  void coded_rows(Rows x) {
    constexpr int64_t kLines = kSegmentBytes / FloatLines::kBytes;
    static_assert(kLines % Lines::kGroupDepth == 0);
    alignas(64) float sums[kSomeRows * kPanel];
    alignas(64) float segment[kLines * kPanel];
    for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) {
      start(x, kPanel, sums);
      for (int64_t k = 0; k < lines_; k += kLines) {
        const int64_t lines = std::min(kLines, lines_ - k);
        Lines::expand(w_, panel, k, lines, segment);
        multiply_lines<FloatLines>(x, k, lines, reinterpret_cast<const char*>(segment), nullptr, sums);
      }
      for (int64_t row = 0; row < x.count; ++row) write(x, 0, row, panel, sums + row * kPanel);
    }
  }

  // Any number of rows, of which the first is row `first` of the call.
  void many_rows(Rows x, int64_t first) {
    static thread_local Scratch scratch;
    float* const sums = scratch.array<float>(x.count * kPanel);
    for (int64_t panel = panels_.begin; panel < panels_.end; ++panel) {
      start(x, kPanel, sums);
      multiply_lines<typename Lines::Expanded>(x, 0, lines_, expanded(panel), nullptr, sums);
      for (int64_t row = 0; row < x.count; ++row) write(x, first, row, panel, sums + row * kPanel);
    }
  }

 private:
  const char* line(int64_t panel, int64_t k) const { return w_.weights + (panel * lines_ + k) * Lines::kBytes; }

  // Sums of so many columns, before anything is added.
  static void start(Rows x, int64_t columns, float* sums) {
    for (int64_t row = 0; row < x.count; ++row, sums += columns) {
      const int32_t from = x.units(row).start;
      float bits;
      std::memcpy(&bits, &from, sizeof bits);
      std::fill_n(sums, columns, bits);
    }
  }

  // Row `row` of `x`, whose rows are those of the call from `first` on.
  void write(Rows x, int64_t first, int64_t row, int64_t panel, const float* sums) const {
    write_sums<typename Lines::Sums, Out>(w_, call_, first + row, x.units(row).scale, panel, sums);
  }

  // All blocks of rows times so many lines, from line `k` on. `next`: lines that the first block asks for.
  template <class Stored>
  static void multiply_lines(Rows x, int64_t k, int64_t lines, const char* weights, const char* next, float* sums) {
    const int64_t blocks = ceil_div(x.count, kBlockRows<Stored>);
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
      constexpr int64_t kBytes = Lines::Expanded::kBytes;
      static thread_local Scratch scratch;
      char* const found = scratch.array<char>(lines_ * kBytes);
      if constexpr (kIsCoded<Lines>) {
        Lines::expand(w_, panel, 0, lines_, reinterpret_cast<float*>(found));
      } else {
        for (int64_t k = 0; k < lines_; ++k) Lines::expand(line(panel, k), found + k * kBytes);
      }
      return found;
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
  const In* const x = static_cast<const In*>(call.x);
  const int64_t stride = stride_of<Element>(lines_of<Lines>(w.depth));
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
      if constexpr (kIsCoded<Lines>) {
        product.coded_rows(rows);
      } else if (call.rows <= kBlockRows<Lines>) {
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

// The same for rows in bf16.
template <class Lines>
void multiply_bfloat16(const Linear& w, const Call& call, int64_t threads) {
  if (w.epilogue == kStoreF32) return multiply_rows<Lines, Bfloat16, float>(w, call, threads);
  multiply_rows<Lines, Bfloat16, Bfloat16>(w, call, threads);
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

// Puts units of a column into panels of `panel_size` bytes.
template <class Lines>
auto unit_placer(int8_t* packed, int64_t depth) {
  constexpr int64_t kLineSize = kPanel * Lines::kDepth;
  const int64_t panel_size = lines_of<Lines>(depth) * kLineSize;
  return [=](int64_t panel, int64_t column, int64_t begin, int8_t* units, int64_t count) {
    int8_t* target = packed + panel * panel_size + begin * kPanel + Lines::position(column);
    for (int64_t k = 0; k < count; k += Lines::kDepth, target += kLineSize) {
      for (int64_t i = k; i < k + Lines::kDepth; ++i) units[i] ^= Lines::kTurned;
      std::memcpy(target, units + k, Lines::kDepth);
    }
  };
}

// Rows `ids` of an ungated int8 matrix; see embed_units.
template <class Lines>
int64_t embed_quantized(const int8_t* packed, const float* scales, int64_t columns, int64_t depth, const int64_t* ids,
                        int64_t count, Bfloat16* out, int64_t out_stride, int64_t threads) {
  const int64_t panel_size = lines_of<Lines>(depth) * Lines::kDepth * kPanel;
  return embed_units(scales, columns, depth, ids, count, out, out_stride, threads, [=](int64_t id, int64_t k) {
    const int8_t stored = packed[id / kPanel * panel_size + offset_of<Lines>(k, id % kPanel)];
    return static_cast<int8_t>(stored ^ Lines::kTurned);
  });
}

// Packs weights in groups into panels; fill(row, k, group) is called for each group of each row.
template <class Lines, class Fill>
void pack_groups(int64_t columns, int64_t depth, bool gated, char* packed, int64_t threads, Fill&& fill) {
  const int64_t panels = ceil_div(columns, gated ? kPanel / 2 : kPanel), lines = lines_of<Lines>(depth);
  parallel(threads, [&](int thread, int team) {
    const Range range = split(panels, thread, team);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      for (int64_t k = 0; k < lines; ++k) {
        char* const line = packed + (panel * lines + k) * Lines::kBytes;
        std::memset(line, 0, Lines::kBytes);
        for (int64_t column = 0; column < kPanel; ++column) {
          const int64_t row = source_row(columns, gated, panel, column);
          if (row < 0) continue;
          CodeGroup group = {};
          fill(row, k, group);
          Lines::write_column(line, column, group);
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
