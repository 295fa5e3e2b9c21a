// One side of a chunk as runs of memory, in the order of the wire: lanes, in each the units of tokens, in each the runs
// of its shape. What is adjacent comes as one run. See kv_transfer/layout/strided_table.py, which makes the tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem {

struct Lane {
  int64_t plane, shape;
};

struct Run {
  int64_t offset, length;
};

// Of one side of a pair of workers and one range of heads; the same for all that they hand over.
struct LaneTable {
  const Lane* lanes;  // [num_layers, lanes_per_layer]
  int64_t lanes_per_layer;
  const int64_t* starts;  // [num_shapes * units_per_block + 1]: where a unit's runs begin in `runs`
  const Run* runs;        // in a block, from its beginning
  int64_t units_per_block;
  int64_t block_bytes;  // of one layer of one rank
};

// Where one prompt lies in one pool.
struct Place {
  const LaneTable* table;
  uint8_t* region;
  int64_t pool_blocks;
  const int64_t* blocks;
  int64_t num_blocks;
};

// A box of cells, its tokens in units.
struct Box {
  int64_t first_layer, num_layers, num_units;
};

// Whether `num_units` from `first_unit` on, counted from the first of the place's blocks, lie in the pool.
inline bool contains(const Place& place, const Box& box, int64_t first_unit) {
  const int64_t units = place.table->units_per_block;
  if (first_unit < 0 || box.num_units <= 0 || first_unit + box.num_units > place.num_blocks * units) return false;
  for (int64_t block = first_unit / units; block <= (first_unit + box.num_units - 1) / units; ++block)
    if (place.blocks[block] < 0 || place.blocks[block] >= place.pool_blocks) return false;
  return true;
}

class Walk {
 public:
  Walk(const Place& place, const Box& box, int64_t first_unit)
      : place_(place),
        table_(*place.table),
        lane_(table_.lanes + box.first_layer * table_.lanes_per_layer),
        end_lane_(lane_ + box.num_layers * table_.lanes_per_layer),
        first_unit_(first_unit),
        end_unit_(first_unit + box.num_units) {
    enter_lane();
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
  void enter_lane() {
    unit_ = first_unit_;
    if (lane_ != end_lane_) enter_unit();
  }

  void enter_unit() {
    const int64_t units = table_.units_per_block;
    const int64_t block = place_.blocks[unit_ / units];
    const int64_t* start = table_.starts + lane_->shape * units + unit_ % units;
    base_ = place_.region + (lane_->plane * place_.pool_blocks + block) * table_.block_bytes;
    run_ = table_.runs + start[0];
    end_run_ = table_.runs + start[1];
  }

  // One run of a shape further; no run is empty, so an empty one says that there is none.
  void advance() {
    length_ = 0;
    while (lane_ != end_lane_) {
      if (run_ != end_run_) {
        begin_ = base_ + run_->offset;
        length_ = run_->length;
        ++run_;
        return;
      }
      if (++unit_ < end_unit_) {
        enter_unit();
      } else {
        ++lane_;
        enter_lane();
      }
    }
  }

  const Place& place_;
  const LaneTable& table_;
  const Lane* lane_;
  const Lane* end_lane_;
  int64_t first_unit_, end_unit_, unit_ = 0;
  uint8_t* base_ = nullptr;
  const Run* run_ = nullptr;
  const Run* end_run_ = nullptr;
  uint8_t* begin_ = nullptr;
  int64_t length_ = 0;
};

}  // namespace tandem
