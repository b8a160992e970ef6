// Takes the place of MLX's CPU allocator by LD_PRELOAD, and behaves like the one for Metal: a buffer is an object apart
// from its memory, and make_buffer() takes memory without a copy, but only whole pages. Counts what it gives out.
#include <mlx/allocator.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

struct MetalBuffer {
  void* contents;
  size_t length;
};

std::atomic<size_t> mapped{0}; // bytes of the buffers of make_buffer() that are not released
std::atomic<size_t> mapped_buffers{0};
std::atomic<size_t> refused{0}; // calls of make_buffer()
std::atomic<size_t> large_buffers{0}; // of malloc(), with 16 KiB or more, that are not freed

class MetalLikeAllocator : public mlx::core::allocator::Allocator {
 public:
  using Buffer = mlx::core::allocator::Buffer;

  Buffer malloc(size_t size) override {
    large_buffers += size >= kLarge;
    return Buffer(new MetalBuffer{std::malloc(size), size});
  }

  void free(Buffer buffer) override {
    if (auto* const x = static_cast<MetalBuffer*>(buffer.ptr())) {
      large_buffers -= x->length >= kLarge;
      std::free(x->contents);
      delete x;
    }
  }

  size_t size(Buffer buffer) const override {
    const auto* const x = static_cast<const MetalBuffer*>(buffer.ptr());
    return x == nullptr ? 0 : x->length;
  }

  Buffer make_buffer(void* pointer, size_t size) override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (reinterpret_cast<uintptr_t>(pointer) % page != 0 || size % page != 0 || size == 0) {
      ++refused;
      return Buffer(nullptr);
    }
    mapped += size;
    ++mapped_buffers;
    return Buffer(new MetalBuffer{pointer, size});
  }

  void release(Buffer buffer) override {
    auto* const x = static_cast<MetalBuffer*>(buffer.ptr());
    mapped -= x->length;
    --mapped_buffers;
    delete x;
  }

 private:
  static constexpr size_t kLarge = 16 << 10;
};

} // namespace

namespace mlx::core::allocator {

Allocator& allocator() {
  static auto* const result = new MetalLikeAllocator; // arrays are freed while the process ends
  return *result;
}

void* Buffer::raw_ptr() { return ptr_ == nullptr ? nullptr : static_cast<MetalBuffer*>(ptr_)->contents; }

} // namespace mlx::core::allocator

extern "C" {

size_t metal_like_mapped() { return mapped; }
size_t metal_like_mapped_buffers() { return mapped_buffers; }
size_t metal_like_refused() { return refused; }
size_t metal_like_large_buffers() { return large_buffers; }
}
