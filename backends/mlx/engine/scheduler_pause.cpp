// When the engine pauses: without work, suspended, or to free memory. And the copy of a conversation.
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace executorch_mlx::engine {

void Scheduler::clone(std::vector<int64_t> ids) {
  run(std::move(ids), nullptr, [this](Row& row) {
    rows_.clone(row);
    return false;
  });
}

void Scheduler::suspend() {
  check_argument(!is_on_thread(), "engine: a callback must not wait for it");
  std::unique_lock lock(mutex_);
  is_suspended_ = true;
  changed_.notify_one();
  parked_.wait(lock, [this] { return is_closing_ || is_parked_ || !is_suspended_; });
  check(!is_closing_, EXECUTORCH_MLX_FAILED, "engine: it is closed");
}

void Scheduler::resume() {
  {
    std::lock_guard lock(mutex_);
    is_suspended_ = false;
  }
  changed_.notify_one();
  parked_.notify_all();
}

void Scheduler::release_memory() {
  call_between_steps([this] {
    free_memory();
    if (running_.empty() && program_.metadata().adapter_slots == 0) { // adapters would be lost
      rows_.forget();
      program_.unload();
    }
    executorch_mlx_clear_cache();
  });
}

// Returns false if the engine is closing.
bool Scheduler::wait_for_work() {
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return !queue_.empty() || !running_.empty() || !calls_.empty(); };
  changed_.wait(lock, [&] { return is_closing_ || is_suspended_ || has_work(); });
  while (!is_closing_ && is_suspended_) {
    park(lock);
    changed_.wait(lock, [&] { return is_closing_ || is_suspended_ || has_work(); });
  }
  return !is_closing_;
}

// Waits until the engine goes on. Meanwhile, it makes no step, but requests can be cancelled, and memory freed.
void Scheduler::park(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  finish_pending();
  lock.lock();
  is_parked_ = true;
  parked_.notify_all();
  while (!is_closing_ && is_suspended_) {
    changed_.wait_for(lock, std::chrono::milliseconds(50));
    lock.unlock();
    end_cancelled();
    run_calls();
    lock.lock();
  }
  is_parked_ = false;
}

} // namespace executorch_mlx::engine
