// The largest size of a call: its rows, its tokens of a prompt, or its draft tokens.
#pragma once

#include <algorithm>
#include <cstdint>

namespace executorch_mlx::engine {

// A limit that is lowered if a call does not fit into memory, and raised again later.
class CallLimit {
 public:
  CallLimit(int64_t smallest, int64_t largest) : smallest_(smallest), largest_(largest), value_(largest) {}

  int64_t value() const { return value_; }

  // Lowers the limit after a call of this size. Returns false if no call can be smaller.
  bool lower(int64_t size) {
    value_ = size > smallest_ ? size / 2 : value_;
    return size > smallest_;
  }

  void set_to_smallest() { value_ = smallest_; }

  void raise() { value_ = std::min(2 * value_ + 1, largest_); }

 private:
  const int64_t smallest_, largest_;
  int64_t value_;
};

} // namespace executorch_mlx::engine
