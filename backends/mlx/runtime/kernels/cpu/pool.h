// The thread pool of all kernels.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "api.h"

namespace executorch_mlx {

namespace kernel {

// Returns the number of threads in the pool: the environment variable OPENBLAS_NUM_THREADS or OMP_NUM_THREADS if one
// is set, or else the number of processors that the process may use: those of its affinity mask, and in a container not
// more than the CPU quota (cgroup version 2).
EXECUTORCH_MLX_KERNEL_API int threads();

// Calls item(context, 0) ... item(context, count - 1) on the threads of the pool, and returns when all calls have
// returned. The items throw nothing.
EXECUTORCH_MLX_KERNEL_API void run_items(int count, void (*item)(void*, int), void* context);

} // namespace kernel

// For the loop of a thread that waits for another one.
inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls item(0) ... item(count - 1) on the threads of the pool, or on the calling thread alone if the pool is
// busy with another call. Returns when all items are done. If items throw, rethrows one of the exceptions then.
template <typename Item>
void parallel(int count, Item&& item) {
  struct Call {
    std::remove_reference_t<Item>& item;
    std::atomic<bool> has_failed{false};
    std::exception_ptr error{};
  } call{item};
  const auto run = [](void* context, int i) {
    Call& call = *static_cast<Call*>(context);
    try {
      call.item(i);
    } catch (...) {
      if (!call.has_failed.exchange(true)) {
        call.error = std::current_exception();
      }
    }
  };
  kernel::run_items(count, run, &call);
  if (call.has_failed) [[unlikely]] {
    std::rethrow_exception(call.error);
  }
}

// Calls run(first, last) for ranges that together cover [0, count), in parallel if there is enough work.
// `size` is the number of floats to process for each index, which tells how much work there is.
template <typename Run>
void parallel_ranges(int64_t count, int64_t size, Run&& run) {
  constexpr int64_t kFloatsPerRange = 16 << 10; // enough work to be worth handing over to another thread
  const int64_t step = std::max<int64_t>(1, kFloatsPerRange / std::max<int64_t>(1, size));
  const int ranges = static_cast<int>((count + step - 1) / step);
  if (ranges <= 1) {
    return run(0, count);
  }
  parallel(ranges, [&](int i) { run(i * step, std::min(count, (i + 1) * step)); });
}

} // namespace executorch_mlx
