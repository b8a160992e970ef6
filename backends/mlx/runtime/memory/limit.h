// The memory of MLX arrays in this process, and its limit, which loads and calls must not exceed.
#pragma once

#include <cstddef>
#include <exception>
#include <limits>
#include <mutex>
#include <string>

#include "error.h"

namespace executorch_mlx {

inline constexpr size_t kNoMemoryLimit = std::numeric_limits<size_t>::max();

// Returns the limit in bytes, or kNoMemoryLimit if there is none.
size_t memory_limit();

inline bool has_memory_limit() { return memory_limit() != kNoMemoryLimit; }

// Returns the bytes that MLX has allocated for arrays, plus those of the weights that are used in place. MLX itself
// does not count weights in place.
size_t active_memory();

// While it exists, active_memory() counts `bytes` of weights that are used in place.
class InPlaceBytes {
 public:
  explicit InPlaceBytes(size_t bytes);
  ~InPlaceBytes();
  InPlaceBytes(const InPlaceBytes&) = delete;
  InPlaceBytes& operator=(const InPlaceBytes&) = delete;

 private:
  size_t bytes_;
};

// While it exists, active_memory() does not count `bytes` of those that an InPlaceBytes counts: no instruction reads
// these weights, and their pages are released.
class ReleasedBytes {
 public:
  explicit ReleasedBytes(size_t bytes);
  ~ReleasedBytes();
  ReleasedBytes(const ReleasedBytes&) = delete;
  ReleasedBytes& operator=(const ReleasedBytes&) = delete;

 private:
  size_t bytes_;
};

// Returns the largest number of bytes in place so far.
size_t in_place_peak();

// Sets the peak to `peak`, or to the number of bytes in place now if that is larger. A load calls it at its end with
// the peak from before: the pages of weights that the load has released were never in memory at the same time.
void set_in_place_peak(size_t peak);

// Returns the mutex that a thread holds from a check against the limit until the memory is allocated, so that two
// threads cannot both count on the same free bytes. With a limit, an evaluation takes it after the
// mutex of its stream, and holds both.
std::mutex& memory_mutex();

// Throws a Failure whose message has the sizes. `what` names the operation or data that needs `bytes`.
[[noreturn]] void fail_over_limit(const std::string& what, size_t bytes, size_t active, size_t limit);

// Throws Failure if `bytes` more would exceed the limit. `what` is a function that returns the name of what needs them.
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

// Whether an exception, possibly one that MLX threw, means that an allocation failed.
bool is_out_of_memory(const std::exception& error);

// Stores the message of a failure that was caused by lack of memory. executorch_mlx_memory_error() returns the last one
// of the thread.
void set_memory_error(std::string message);

} // namespace executorch_mlx
