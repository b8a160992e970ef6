#include "memory/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "memory/parallel.h"

namespace executorch_mlx {

namespace {

constexpr size_t kBytesPerPart = 64 << 10; // enough work to be worth handing over to another thread

class Copy {
 public:
  Copy(const mx::Shape& shape, size_t width, const mx::Strides& from_strides, const mx::Strides& to_strides)
      : shape_(shape), width_(width), from_strides_(from_strides), to_strides_(to_strides), outer_(shape.size()) {
    // The innermost axes that have no gaps in both arrays are copied together.
    int64_t run = 1;
    while (outer_ > 0 && is_dense(outer_ - 1, run)) {
      run *= shape[--outer_];
    }
    run_bytes_ = static_cast<size_t>(run) * width;
  }

  // Copies the sub-array over the axes from `axis` on.
  void run(size_t axis, const char* from, char* to) const {
    if (axis == outer_) {
      std::memcpy(to, from, run_bytes_);
      return;
    }
    const auto width = static_cast<int64_t>(width_);
    for (int i = 0; i < shape_[axis]; ++i) {
      run(axis + 1, from, to);
      from += from_strides_[axis] * width;
      to += to_strides_[axis] * width;
    }
  }

  // Copies the whole array. The threads of the kernels share the first axis that has more than one index.
  void run_in_parallel(size_t bytes, const char* from, char* to) const {
    size_t axis = 0;
    while (axis < outer_ && shape_[axis] == 1) {
      ++axis;
    }
    if (axis == outer_ || bytes < 2 * kBytesPerPart) {
      return run(axis, from, to);
    }
    const int count = shape_[axis];
    const int step = static_cast<int>(std::max<size_t>(1, kBytesPerPart / (bytes / count)));
    const auto width = static_cast<int64_t>(width_);
    parallel(static_cast<int>((int64_t{count} + step - 1) / step), [&](int part) {
      const int64_t first = int64_t{part} * step;
      for (int64_t i = first; i < std::min<int64_t>(count, first + step); ++i) {
        run(axis + 1, from + i * from_strides_[axis] * width, to + i * to_strides_[axis] * width);
      }
    });
  }

 private:
  bool is_dense(size_t axis, int64_t stride) const {
    return shape_[axis] == 1 || (from_strides_[axis] == stride && to_strides_[axis] == stride);
  }

  const mx::Shape& shape_;
  const size_t width_;
  const mx::Strides& from_strides_;
  const mx::Strides& to_strides_;
  size_t outer_; // the number of axes outside the runs
  size_t run_bytes_;
};

} // namespace

void strided_copy(const mx::Shape& shape, size_t width, const char* from, const mx::Strides& from_strides, char* to,
    const mx::Strides& to_strides) {
  size_t bytes = width;
  for (const int size : shape) {
    bytes *= static_cast<size_t>(size);
  }
  Copy(shape, width, from_strides, to_strides).run_in_parallel(bytes, from, to);
}

} // namespace executorch_mlx
