// The memory of MLX arrays in this process, and the limit that loads and calls keep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>
#include <string>

#include "error.h"

namespace executorch_mlx {

inline constexpr size_t kNoMemoryLimit = std::numeric_limits<size_t>::max();

// kNoMemoryLimit if there is none.
size_t memory_limit();

inline bool has_memory_limit() {
  return memory_limit() != kNoMemoryLimit;
}

// Bytes that MLX has allocated for arrays, plus the weights that are used in place. MLX's own count lacks the latter.
size_t active_memory();

// Counts weights that are used in place for as long as it lives.
class InPlaceBytes {
 public:
  explicit InPlaceBytes(size_t bytes);
  ~InPlaceBytes();
  InPlaceBytes(const InPlaceBytes&) = delete;
  InPlaceBytes& operator=(const InPlaceBytes&) = delete;

 private:
  size_t bytes_;
};

// Held from a check against the limit until the memory is allocated, so that two threads cannot both take the rest.
// Also serializes evaluations, which share a stream.
std::mutex& memory_mutex();

// Throws a Failure that names the sizes. `what` asks for the memory.
[[noreturn]] void fail_over_limit(const std::string& what, size_t bytes, size_t active, size_t limit);

// Throws if `bytes` more would pass the limit.
template <typename What>
void check_memory(const What& what, size_t bytes) {
  const size_t limit = memory_limit();
  if (limit == kNoMemoryLimit) [[likely]] {
    return;
  }
  const size_t active = active_memory();
  if (bytes > limit || active > limit - bytes) {
    fail_over_limit(what(), bytes, active, limit);
  }
}

// Whether an exception, possibly one of MLX, means that there is no memory left.
bool is_out_of_memory(const std::exception& error);

// Keeps the message of the last failure for want of memory on this thread, for executorch_mlx_memory_error().
void set_memory_error(std::string message);

} // namespace executorch_mlx
