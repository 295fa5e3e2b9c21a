// Shared by the calls that process a chunk burst by burst.
#pragma once

#include "walk.h"

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))

namespace tandem {

// Return values of a call; numbers as in kv_transfer/memory/mover.py and kv_transfer/memory/socket_stream.py.
constexpr int64_t kPaused = 0, kDone = 1, kBlocked = 2, kEnded = 3;
constexpr int64_t kOutside = -1, kUnequal = -2, kFailed = -3;

// Set by a thread that waits for the lock under which bytes are moved.
struct Wanted {
  const int32_t* one;
  const int32_t* other;

  bool any() const { return is_set(one) || is_set(other); }
  static bool is_set(const int32_t* flag) { return flag && __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
};

// What is left of a walk after its first bytes.
class Rest {
 public:
  Rest(const Walk& walk, int64_t skipped) : walk_(walk) {
    while (skipped && more()) {
      const int64_t count = skipped < left_ ? skipped : left_;
      drop(count);
      skipped -= count;
    }
  }

  bool more() { return left_ || walk_.next(at_, left_); }
  uint8_t* at() const { return at_; }
  int64_t left() const { return left_; }
  void drop(int64_t count) { at_ += count, left_ -= count; }

 private:
  Walk walk_;
  uint8_t* at_ = nullptr;
  int64_t left_ = 0;
};

}  // namespace tandem
