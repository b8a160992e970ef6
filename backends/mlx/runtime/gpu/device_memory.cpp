#include "device_memory.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "mlx_internals/arrays.h"

namespace executorch_mlx::gpu {

namespace {

constexpr size_t kGranularity = 64 << 10;
constexpr size_t kMaxFreeBytes = 64 << 20;

// Memory of one stream that is free. Each piece is an evaluated array.
class FreeMemory {
 public:
  mx::array take(size_t bytes, mx::Stream stream) {
    std::unique_lock lock(mutex_);
    auto& pieces = pieces_[bytes];
    if (!pieces.empty()) {
      mx::array piece = std::move(pieces.back());
      pieces.pop_back();
      bytes_ -= bytes;
      return piece;
    }
    if (bytes_ > kMaxFreeBytes) {
      pieces_.clear();
      bytes_ = 0;
    }
    lock.unlock();
    mx::array piece = mx::zeros({static_cast<int>(bytes)}, mx::uint8, stream);
    piece.eval();
    return piece;
  }

  void give_back(mx::array piece) {
    std::lock_guard lock(mutex_);
    bytes_ += piece.nbytes();
    pieces_[piece.nbytes()].push_back(std::move(piece));
  }

 private:
  std::mutex mutex_;
  std::map<size_t, std::vector<mx::array>> pieces_; // by size
  size_t bytes_ = 0;
};

FreeMemory& free_memory(mx::Stream stream) {
  static std::mutex mutex;
  // Never destroyed: at the end of the process, MLX may be gone before.
  static auto& all = *new std::map<int, FreeMemory>;
  std::lock_guard lock(mutex);
  return all[stream.index];
}

} // namespace

mx::array allocate_on_gpu(size_t bytes, mx::Stream stream) {
  bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  FreeMemory& free = free_memory(stream);
  mx::array piece = free.take(bytes, stream);
  return internals::lend(std::move(piece), [&free](mx::array piece) { free.give_back(std::move(piece)); });
}

} // namespace executorch_mlx::gpu
