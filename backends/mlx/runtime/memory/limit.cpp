#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/memory.h>
#pragma GCC visibility pop

#include "memory/limit.h"

#include <mlx/mlx.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <string_view>
#include <utility>

namespace executorch_mlx {

namespace mx = mlx::core;

namespace {

std::atomic<size_t> limit_bytes{kNoMemoryLimit};
std::atomic<size_t> in_place_bytes{0};
std::atomic<size_t> in_place_peak_bytes{0};

thread_local std::string memory_error;

// The value that MLX's own limit had before ours was set. Guarded by memory_mutex().
size_t mlx_limit_before = 0;

// Updates MLX's own limit when ours changes. MLX takes it as a guideline for freeing its cache. When ours is removed,
// restores the old value, unless other code has changed MLX's limit since.
void follow_limit(size_t before, size_t now) {
  if (before == kNoMemoryLimit && now != kNoMemoryLimit) {
    mlx_limit_before = mx::set_memory_limit(now);
  } else if (now != kNoMemoryLimit) {
    mx::set_memory_limit(now);
  } else if (before != kNoMemoryLimit && mx::get_memory_limit() == before) {
    mx::set_memory_limit(mlx_limit_before);
  }
}

} // namespace

size_t memory_limit() { return limit_bytes.load(std::memory_order_relaxed); }

size_t active_memory() { return mx::get_active_memory() + in_place_bytes.load(std::memory_order_relaxed); }

InPlaceBytes::InPlaceBytes(size_t bytes) : bytes_(bytes) {
  const size_t now = in_place_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  size_t peak = in_place_peak_bytes.load(std::memory_order_relaxed);
  while (peak < now && !in_place_peak_bytes.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

InPlaceBytes::~InPlaceBytes() { in_place_bytes.fetch_sub(bytes_, std::memory_order_relaxed); }

ReleasedBytes::ReleasedBytes(size_t bytes) : bytes_(bytes) {
  in_place_bytes.fetch_sub(bytes, std::memory_order_relaxed);
}

ReleasedBytes::~ReleasedBytes() { in_place_bytes.fetch_add(bytes_, std::memory_order_relaxed); }

size_t in_place_peak() { return in_place_peak_bytes.load(std::memory_order_relaxed); }

void set_in_place_peak(size_t peak) {
  in_place_peak_bytes.store(std::max(peak, in_place_bytes.load(std::memory_order_relaxed)), std::memory_order_relaxed);
}

std::mutex& memory_mutex() {
  static auto* mutex = new std::mutex(); // never destroyed: arrays may be freed at the very end of the process
  return *mutex;
}

void fail_over_limit(const std::string& what, size_t bytes, size_t active, size_t limit) {
  fail(Error::MemoryAllocationFailed, "memory limit: ", what, ": asked for ", bytes, " bytes, ", active,
      " bytes are active, the limit is ", limit, " bytes");
}

bool is_out_of_memory(const std::exception& error) {
  const std::string_view message = error.what();
  // If one of its threads throws, MLX may throw an exception of another type with the same message.
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr || message == "std::bad_alloc" ||
      message.find("malloc]") != std::string_view::npos || // "[malloc] Unable to ...", "[metal::malloc] ..."
      message.find("nable to allocate") != std::string_view::npos;
}

void set_memory_error(std::string message) { memory_error = std::move(message); }

} // namespace executorch_mlx

// -- C API ------------------------------------------------------------------------

using namespace executorch_mlx;

size_t executorch_mlx_get_active_memory() { return active_memory(); }

size_t executorch_mlx_get_peak_memory() {
  return std::max(active_memory(), mx::get_peak_memory() + in_place_peak_bytes.load(std::memory_order_relaxed));
}

void executorch_mlx_reset_peak_memory() {
  mx::reset_peak_memory();
  in_place_peak_bytes.store(in_place_bytes.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

size_t executorch_mlx_get_cache_memory() { return mx::get_cache_memory(); }

void executorch_mlx_clear_cache() { mx::clear_cache(); }

size_t executorch_mlx_set_cache_limit(size_t bytes) { return mx::set_cache_limit(bytes); }

size_t executorch_mlx_get_memory_limit() { return memory_limit(); }

size_t executorch_mlx_set_memory_limit(size_t bytes) {
  std::lock_guard lock(memory_mutex());
  const size_t before = limit_bytes.exchange(bytes, std::memory_order_relaxed);
  follow_limit(before, bytes);
  return before;
}

int executorch_mlx_set_wired_limit(size_t bytes, size_t* previous) {
  try {
    const size_t before = mx::set_wired_limit(bytes);
    if (previous != nullptr) {
      *previous = before;
    }
    return static_cast<int>(Error::Ok);
  } catch (const std::exception&) {
    return static_cast<int>(Error::InvalidArgument);
  }
}

const char* executorch_mlx_memory_error() { return memory_error.c_str(); }
