// Arrays of float16 and bfloat16 for kernels that compute in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "pool.h"
#include "simd/kernels.h"

namespace executorch_mlx {

constexpr size_t size_of(FloatType type) { return type == FloatType::float16 || type == FloatType::bfloat16 ? 2 : 4; }

// The address of element `index`.
inline const void* at(const void* x, FloatType type, int64_t index) {
  return static_cast<const char*>(x) + index * static_cast<int64_t>(size_of(type));
}

inline void* at(void* x, FloatType type, int64_t index) {
  return const_cast<void*>(at(static_cast<const void*>(x), type, index));
}

// Memory for floats that begins at a cache line. A vector that crosses a boundary between lines takes two loads.
class AlignedFloats {
 public:
  AlignedFloats() = default;
  explicit AlignedFloats(size_t count)
      : data_(static_cast<float*>(::operator new(count * sizeof(float), std::align_val_t{64}))) {}

  float* get() const { return data_.get(); }

 private:
  struct Delete {
    void operator()(float* data) const { ::operator delete(data, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Delete> data_;
};

// Elements in float32, float16 or bfloat16 as float32: the array itself if it is float32, else a converted copy.
class AsFloats {
 public:
  AsFloats(const void* x, FloatType type, int64_t count) : data_(static_cast<const float*>(x)) {
    if (x != nullptr && type != FloatType::float32) {
      copy_ = AlignedFloats(count);
      data_ = copy_.get();
      parallel_ranges(count, 1, [&](int64_t first, int64_t last) {
        kernels().widen(static_cast<const uint16_t*>(x) + first, type, 1, copy_.get() + first, last - first);
      });
    }
  }

  const float* get() const { return data_; }

 private:
  const float* data_;
  AlignedFloats copy_;
};

// Copies `width` elements with the distance `stride` between them.
inline void copy_row(const void* from, FloatType type, int64_t stride, int64_t width, void* to) {
  if (stride == 1) {
    std::memcpy(to, from, width * size_of(type));
    return;
  }
  const auto copy = [&](auto* x, auto* y) {
    for (int64_t i = 0; i < width; ++i) {
      y[i] = x[i * stride];
    }
  };
  if (size_of(type) == 2) {
    copy(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to));
  } else {
    copy(static_cast<const float*>(from), static_cast<float*>(to));
  }
}

} // namespace executorch_mlx
