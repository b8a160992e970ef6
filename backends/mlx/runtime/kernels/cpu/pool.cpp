#include "pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

namespace executorch_mlx {

namespace {

// How often a waiting thread checks, before it sleeps, whether it can go on. The kernels of a decode step follow each
// other within microseconds, and waking a thread takes longer.
constexpr int kSpins = 2000;

// Whether this thread is running items. If an item calls kernel::run_items(), this thread runs all items of that call
// alone.
thread_local bool is_in_item = false;

class Pool {
 public:
  explicit Pool(int threads) {
    try {
      for (int i = 1; i < threads; ++i) {
        std::thread([this] { work(); }).detach();
      }
    } catch (const std::exception&) {
      // The system refuses more threads. Those that run already use this object, so that it has to stay.
    }
  }

  void run(int count, void (*item)(void*, int), void* context) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) { // the pool is busy with another call: run all items on this thread
      for (int i = 0; i < count; ++i) {
        item(context, i);
      }
      return;
    }
    item_.store(item, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(count) << 32, std::memory_order_release);
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
    take_items();
    for (int spins = 0;; ++spins) {
      const int done = done_.load(std::memory_order_acquire);
      if (done == count) {
        return;
      }
      spins < kSpins ? pause_briefly() : done_.wait(done, std::memory_order_acquire);
    }
  }

 private:
  // Runs items of the present call until none is left. A ticket holds the number of items of the call in its high half
  // and the next item in its low half. A thread that took an item can read item_ and context_ safely, because the call
  // does not return before the item is done.
  void take_items() {
    is_in_item = true;
    for (;;) {
      const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
      const auto next = static_cast<uint32_t>(ticket);
      const auto count = static_cast<uint32_t>(ticket >> 32);
      if (next >= count) {
        is_in_item = false;
        return;
      }
      item_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), static_cast<int>(next));
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<int>(count)) {
        done_.notify_all();
      }
    }
  }

  // The loop of a thread of the pool: waits for the next call and runs items of it.
  void work() {
    for (uint32_t seen = 0;;) { // `seen` is the number of calls that this thread knows of
      for (int spins = 0; spins < kSpins && calls_.load(std::memory_order_acquire) == seen; ++spins) {
        pause_briefly();
      }
      calls_.wait(seen, std::memory_order_acquire);
      seen = calls_.load(std::memory_order_acquire);
      take_items();
    }
  }

  std::mutex mutex_; // locked during a call
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> done_{0}; // items of the present call that are done
  std::atomic<uint32_t> calls_{0}; // calls so far
  std::atomic<void (*)(void*, int)> item_{nullptr};
  std::atomic<void*> context_{nullptr};
};

// Whether this thread has a lower priority than the process. On Linux, 0 stands for the calling thread.
bool has_low_priority() {
  thread_local const bool result = getpriority(PRIO_PROCESS, 0) > getpriority(PRIO_PROCESS, getpid());
  return result;
}

// The pool for the priority of this thread. Those of low priority have a pool of their own: its threads inherit the
// priority of the thread that makes it. Pools are never deleted: their threads run until the process ends.
Pool& pool_of_priority(int threads) {
  if (has_low_priority()) {
    static Pool* const low = new Pool(threads);
    return *low;
  }
  static Pool* const pool = new Pool(threads);
  return *pool;
}

} // namespace

void kernel::run_items(int count, void (*item)(void*, int), void* context) {
  static const int threads = kernel::threads();
  if (threads <= 1 || count <= 1 || is_in_item) {
    for (int i = 0; i < count; ++i) {
      item(context, i);
    }
    return;
  }
  pool_of_priority(threads).run(count, item, context);
}

} // namespace executorch_mlx
