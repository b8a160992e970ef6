#include "device_memory.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace executorch_mlx::gpu {

namespace {

constexpr size_t kGranularity = 64 << 10;
constexpr size_t kMaxFreeBytes = 64 << 20;

// The memory of one stream. Each block is an evaluated array.
class Blocks {
 public:
  mx::array take(size_t bytes, mx::Stream stream) {
    std::unique_lock lock(mutex_);
    auto& blocks = free_[bytes];
    if (!blocks.empty()) {
      mx::array block = std::move(blocks.back());
      blocks.pop_back();
      free_bytes_ -= bytes;
      return block;
    }
    if (free_bytes_ > kMaxFreeBytes) {
      free_.clear();
      free_bytes_ = 0;
    }
    lock.unlock();
    mx::array block = mx::zeros({static_cast<int>(bytes)}, mx::uint8, stream);
    block.eval();
    return block;
  }

  void give_back(mx::array block) {
    std::lock_guard lock(mutex_);
    free_bytes_ += block.nbytes();
    free_[block.nbytes()].push_back(std::move(block));
  }

 private:
  std::mutex mutex_;
  std::map<size_t, std::vector<mx::array>> free_;  // by size
  size_t free_bytes_ = 0;
};

Blocks& blocks_of(mx::Stream stream) {
  static std::mutex mutex;
  // Never destroyed: at the end of the process, MLX may be gone before.
  static auto& all = *new std::map<int, Blocks>;
  std::lock_guard lock(mutex);
  return all[stream.index];
}

} // namespace

mx::array allocate_on_gpu(size_t bytes, mx::Stream stream) {
  bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  Blocks& blocks = blocks_of(stream);
  mx::array block = blocks.take(bytes, stream);
  const auto buffer = block.data_shared_ptr()->buffer();
  mx::allocator::Data data(buffer, [&blocks, block = std::move(block)](mx::allocator::Buffer) mutable {
    blocks.give_back(std::move(block));
  });
  return mx::array(std::move(data), {static_cast<int>(bytes)}, mx::uint8);
}

} // namespace executorch_mlx::gpu
