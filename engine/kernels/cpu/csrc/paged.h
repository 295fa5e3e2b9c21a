// Parameters of every attention kernel, and how keys are addressed. Filled in by engine/kernels/cpu/attention.py.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "scratch.h"
#include "vectors.h"

namespace tandem {

// One step, shared by all layers; the field order is repeated in engine/kernels/cpu/attention.py.
struct AttentionStep {
  const int32_t* tables;      // [num_seqs, table_stride] block ids
  const int32_t* starts;      // [num_seqs] position of the first row
  const int32_t* first_rows;  // [num_seqs] index of that row among the step's
  const int32_t* units;       // [num_units, 3]: sequence, first row within it, number of rows
  float* partials;            // [num_singles * num_segments, num_heads, 2 + head_dim rounded up to 32]
  int32_t num_units;
  int32_t num_singles;   // sequences for the decode kernel: the first ones, with one row each
  int32_t num_segments;  // parts into which it cuts each of them
  int32_t table_stride;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t num_threads;
  float scale;
  float soft_cap;  // bound that scaled scores are bent to, or 0; only the exact kernel bends them
};

// One layer of it.
template <class T>
struct AttentionLayer {
  const T* cache;  // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  const T* queries;  // [num_rows, at least num_heads * head_dim], rows `query_stride` elements apart
  T* out;            // [num_rows, num_heads * head_dim]
  int64_t query_stride;
  int64_t window;  // keys that a row sees, itself included
};

// The keys and values of one head of one sequence.
template <class T>
class HeadView {
 public:
  HeadView(const AttentionStep& step, const T* cache, int64_t sequence, int64_t kv_head)
      : table_(step.tables + sequence * step.table_stride), block_size_(step.block_size), head_dim_(step.head_dim) {
    const int64_t head_size = int64_t(block_size_) * head_dim_;
    plane_ = step.num_kv_heads * head_size;
    keys_ = cache + kv_head * head_size;
  }

  // Addresses of `count` consecutive keys; the values lie `value_offset()` elements behind.
  void locate(int64_t position, int64_t count, const T** rows) const {
    int64_t block = position / block_size_, offset = position % block_size_;
    for (int64_t i = 0; i < count;) {
      const T* row = keys_ + table_[block] * 2 * plane_ + offset * head_dim_;
      for (; i < count && offset < block_size_; ++i, ++offset, row += head_dim_) rows[i] = row;
      ++block;
      offset = 0;
    }
  }

  int64_t value_offset() const { return plane_; }

 private:
  const int32_t* table_;
  int64_t block_size_, head_dim_, plane_;
  const T* keys_;
};

// A thread's memory for one unit of work: uninitialised, valid until its next call.
inline char* scratch(size_t size_bytes) {
  static thread_local Scratch mine;
  return static_cast<char*>(mine.get(size_bytes));
}

// Cuts a thread's scratch into arrays, each on its own cache lines.
class Carver {
 public:
  explicit Carver(char* memory) : next_(memory) {}
  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    return taken;
  }
  template <class T>
  static constexpr size_t bytes(int64_t count) {
    return round_up(count * int64_t(sizeof(T)), 64);
  }

 private:
  char* next_;
};

}  // namespace tandem
