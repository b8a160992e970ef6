#include "pool.h"

#include <atomic>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The calls of one step follow each other within microseconds: a worker looks this often before it
// goes to sleep.
constexpr int kLooks = 2000;

// An item that has work to share out itself does it alone.
thread_local bool is_inside = false;

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) {
      std::thread([this] { work(); }).detach();
    }
  }

  void run(int count, void (*item)(void*, int), void* context) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {  // another caller has the threads
      for (int i = 0; i < count; ++i) {
        item(context, i);
      }
      return;
    }
    item_.store(item, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(count) << 32, std::memory_order_release);
    bell_.fetch_add(1, std::memory_order_release);
    bell_.notify_all();
    take_items();
    for (int looks = 0;; ++looks) {
      const int done = done_.load(std::memory_order_acquire);
      if (done == count) {
        return;
      }
      looks < kLooks ? pause_briefly() : done_.wait(done, std::memory_order_acquire);
    }
  }

 private:
  // A ticket says how many items its job has and which one is next. Who holds an item holds the
  // job: it is not over before all its items are.
  void take_items() {
    is_inside = true;
    for (;;) {
      const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      const auto next = static_cast<uint32_t>(ticket);
      const auto count = static_cast<uint32_t>(ticket >> 32);
      if (next >= count) {
        is_inside = false;
        return;
      }
      item_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), static_cast<int>(next));
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<int>(count)) {
        done_.notify_all();
      }
    }
  }

  void work() {
    for (uint32_t heard = 0;;) {
      for (int looks = 0; looks < kLooks && bell_.load(std::memory_order_acquire) == heard; ++looks) {
        pause_briefly();
      }
      bell_.wait(heard, std::memory_order_acquire);
      heard = bell_.load(std::memory_order_acquire);
      take_items();
    }
  }

  std::mutex mutex_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> done_{0};
  std::atomic<uint32_t> bell_{0};
  std::atomic<void (*)(void*, int)> item_{nullptr};
  std::atomic<void*> context_{nullptr};
};

} // namespace

extern "C" void executorch_mlx_parallel(int count, void (*item)(void*, int), void* context) {
  static const int threads = executorch_mlx_threads();
  if (threads <= 1 || count <= 1 || is_inside) {
    for (int i = 0; i < count; ++i) {
      item(context, i);
    }
    return;
  }
  static Pool* const pool = new Pool(threads);  // its threads outlive everything
  pool->run(count, item, context);
}
