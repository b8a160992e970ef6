// Arrays of float16 and bfloat16 for kernels that compute in float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "pool.h"
#include "simd/kernels.h"

namespace executorch_mlx {

constexpr size_t size_of(FloatType type) {
  return type == FloatType::float16 || type == FloatType::bfloat16 ? 2 : 4;
}

// The address of element `index`.
inline const void* at(const void* x, FloatType type, int64_t index) {
  return static_cast<const char*>(x) + index * static_cast<int64_t>(size_of(type));
}

// Memory for floats that begins at a cache line. A vector that crosses a boundary between lines takes two loads.
class AlignedFloats {
 public:
  AlignedFloats() = default;
  explicit AlignedFloats(size_t count)
      : data_(static_cast<float*>(::operator new(count * sizeof(float), std::align_val_t{64}))) {}

  float* get() const {
    return data_.get();
  }

 private:
  struct Delete {
    void operator()(float* data) const {
      ::operator delete(data, std::align_val_t{64});
    }
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

  const float* get() const {
    return data_;
  }

 private:
  const float* data_;
  AlignedFloats copy_;
};

// Elements first ... first + count - 1 of x in float32: in their place if x is float32, else converted to `buffer`.
inline const float* read_floats(const void* x, FloatType type, int64_t first, int64_t count, float* buffer) {
  if (type == FloatType::float32) {
    return static_cast<const float*>(x) + first;
  }
  kernels().widen(static_cast<const uint16_t*>(x) + first, type, 1, buffer, count);
  return buffer;
}

// Calls compute(to), which writes `count` float32 results to `to`, and stores them as the elements of y from `first`
// on. `to` is in y if y is float32, else it is `buffer`.
template <typename Compute>
void write_floats(void* y, FloatType type, int64_t first, int64_t count, float* buffer, Compute&& compute) {
  if (type == FloatType::float32) {
    return compute(static_cast<float*>(y) + first);
  }
  compute(buffer);
  kernels().narrow(buffer, type, static_cast<uint16_t*>(y) + first, count);
}

} // namespace executorch_mlx
