// One side of a chunk as runs of memory, in the order of the wire: planes, in each the units of tokens, in each its runs.
// Adjacent runs are merged. See kv_transfer/layout/strided_table.py, which makes the tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

// One layer of one rank, and which of the distinct ranges of heads it holds.
struct Plane {
  int64_t index, heads;
};

struct Run {
  int64_t offset, length;
};

// Of one side of a pair of workers and some heads; the same for all that they hand over.
struct LayoutTable {
  const Plane* planes;  // [num_layers, planes_per_layer]
  int64_t planes_per_layer;
  const int64_t* starts;  // [distinct ranges of heads * units_per_block + 1]: where a unit's runs begin in `runs`
  const Run* runs;        // in a block, from its beginning
  int64_t units_per_block;
  int64_t block_bytes;  // of one layer of one rank
};

// A prompt's blocks in one pool.
struct PoolBlocks {
  const LayoutTable* table;
  uint8_t* region;
  int64_t pool_blocks;
  const int64_t* ids;
  int64_t num_blocks;
};

// Layers and units of a CellRange; its heads are those of the table.
struct Cells {
  int64_t first_layer, num_layers, num_units;
};

// Whether `num_units` from `first_unit` on, counted from the first of these blocks, lie in the pool.
inline bool contains(const PoolBlocks& blocks, const Cells& cells, int64_t first_unit) {
  const int64_t units = blocks.table->units_per_block;
  if (first_unit < 0 || cells.num_units <= 0 || first_unit + cells.num_units > blocks.num_blocks * units) return false;
  for (int64_t block = first_unit / units; block <= (first_unit + cells.num_units - 1) / units; ++block)
    if (blocks.ids[block] < 0 || blocks.ids[block] >= blocks.pool_blocks) return false;
  return true;
}

class Walk {
 public:
  Walk(const PoolBlocks& blocks, const Cells& cells, int64_t first_unit)
      : blocks_(blocks),
        table_(*blocks.table),
        plane_(table_.planes + cells.first_layer * table_.planes_per_layer),
        end_plane_(plane_ + cells.num_layers * table_.planes_per_layer),
        first_unit_(first_unit),
        end_unit_(first_unit + cells.num_units) {
    enter_plane();
    advance();
  }

  // The next run; false at the end.
  bool next(uint8_t*& begin, int64_t& length) {
    if (!length_) return false;
    begin = begin_;
    length = length_;
    for (advance(); length_ && begin_ == begin + length; advance()) length += length_;
    return true;
  }

 private:
  void enter_plane() {
    unit_ = first_unit_;
    if (plane_ != end_plane_) enter_unit();
  }

  void enter_unit() {
    const int64_t units = table_.units_per_block;
    const int64_t block = blocks_.ids[unit_ / units];
    const int64_t* start = table_.starts + plane_->heads * units + unit_ % units;
    base_ = blocks_.region + (plane_->index * blocks_.pool_blocks + block) * table_.block_bytes;
    run_ = table_.runs + start[0];
    end_run_ = table_.runs + start[1];
  }

  // One run of a unit further; no run is empty, so an empty one says that there is none.
  void advance() {
    length_ = 0;
    while (plane_ != end_plane_) {
      if (run_ != end_run_) {
        begin_ = base_ + run_->offset;
        length_ = run_->length;
        ++run_;
        return;
      }
      if (++unit_ < end_unit_) {
        enter_unit();
      } else {
        ++plane_;
        enter_plane();
      }
    }
  }

  const PoolBlocks& blocks_;
  const LayoutTable& table_;
  const Plane* plane_;
  const Plane* end_plane_;
  int64_t first_unit_, end_unit_, unit_ = 0;
  uint8_t* base_ = nullptr;
  const Run* run_ = nullptr;
  const Run* end_run_ = nullptr;
  uint8_t* begin_ = nullptr;
  int64_t length_ = 0;
};

}  // namespace tandem
