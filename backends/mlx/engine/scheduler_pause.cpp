// When the engine pauses: without work, suspended, or to free memory. And the copy of a conversation.
#include <chrono>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace executorch_mlx::engine {

void Scheduler::clone(std::vector<int64_t> ids) {
  run(std::move(ids), [this](Row& row) {
    rows_.clone(row);
    return false;
  });
}

void Scheduler::suspend() {
  wait_until(is_suspended_, [this] { return is_parked_ || !is_suspended_; });
}

void Scheduler::resume() {
  {
    std::lock_guard lock(mutex_);
    is_suspended_ = false;
  }
  changed_.notify_one();
  settled_.notify_all();
}

void Scheduler::release_memory() {
  wait_until(releases_, [this] { return !releases_; });
}

// Sets a flag for the thread, and waits until `is_done` or the engine is closed.
void Scheduler::wait_until(bool& flag, const std::function<bool()>& is_done) {
  check_argument(!is_on_thread(), "engine: a callback must not wait for it");
  std::unique_lock lock(mutex_);
  flag = true;
  changed_.notify_one();
  settled_.wait(lock, [&] { return is_closing_ || is_done(); });
  check(!is_closing_, EXECUTORCH_MLX_FAILED, "engine: it is closed");
}

// Returns false if the engine is closing.
bool Scheduler::wait_for_work() {
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return !queue_.empty() || !running_.empty(); };
  changed_.wait(lock, [&] { return is_closing_ || is_suspended_ || releases_ || has_work(); });
  while (!is_closing_ && (is_suspended_ || releases_)) {
    releases_ ? release(lock) : park(lock);
    changed_.wait(lock, [&] { return is_closing_ || is_suspended_ || releases_ || has_work(); });
  }
  return !is_closing_;
}

// Waits until the engine goes on, or memory is to be freed. Meanwhile, requests can be cancelled.
void Scheduler::park(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  finish_pending();
  lock.lock();
  is_parked_ = true;
  settled_.notify_all();
  while (!is_closing_ && is_suspended_ && !releases_) {
    changed_.wait_for(lock, std::chrono::milliseconds(50));
    lock.unlock();
    end_cancelled();
    lock.lock();
  }
  is_parked_ = false;
}

// Frees what the engine can do without.
void Scheduler::release(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  finish_pending();
  free_memory();
  if (running_.empty()) {
    rows_.forget();
    program_.unload();
  }
  executorch_mlx_clear_cache();
  lock.lock();
  releases_ = false;
  settled_.notify_all();
}

} // namespace executorch_mlx::engine
