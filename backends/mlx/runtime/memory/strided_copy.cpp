#include "memory/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "cpu/accelerate.h"

namespace executorch_mlx {

namespace {

constexpr size_t kPageBytes = 4096;         // the smallest page of any system
constexpr size_t kBytesPerPart = 64 << 10;  // enough work to be worth handing over to another thread

// Makes the page of a byte writable. New memory contains zeros, and the exchange of a zero for a zero is a write.
void map_page(char* byte) {
  char zero = 0;
  __atomic_compare_exchange_n(byte, &zero, 0, /*weak=*/false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// Whether `count` bytes, at least one, are 0: the first one is, and all others equal the one before them.
bool are_zero(const char* data, size_t count) {
  return data[0] == 0 && std::memcmp(data, data + 1, count - 1) == 0;
}

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

  // Calls visit(from, to, bytes) for the runs of the sub-arrays over the axes from `axis` on, until it returns false.
  // Returns whether it has always returned true.
  template <typename Visit>
  bool for_runs(size_t axis, const char* from, char* to, Visit&& visit) const {
    if (axis == outer_) {
      return visit(from, to, run_bytes_);
    }
    const auto width = static_cast<int64_t>(width_);
    for (int i = 0; i < shape_[axis]; ++i) {
      if (!for_runs(axis + 1, from, to, visit)) {
        return false;
      }
      from += from_strides_[axis] * width;
      to += to_strides_[axis] * width;
    }
    return true;
  }

  // Copies the sub-array over the axes from `axis` on.
  void run(size_t axis, const char* from, char* to) const {
    for_runs(axis, from, to, [](const char* from, char* to, size_t bytes) {
      std::memcpy(to, from, bytes);
      return true;
    });
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
    cpu::parallel(static_cast<int>((int64_t{count} + step - 1) / step), [&](int part) {
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
  size_t outer_;  // the number of axes outside the runs
  size_t run_bytes_;
};

} // namespace

void strided_copy(
    const mx::Shape& shape, size_t width, const char* from, const mx::Strides& from_strides, char* to,
    const mx::Strides& to_strides) {
  size_t bytes = width;
  for (const int size : shape) {
    bytes *= static_cast<size_t>(size);
  }
  Copy(shape, width, from_strides, to_strides).run_in_parallel(bytes, from, to);
}

void prepare_for_update(const mx::Shape& shape, size_t width, char* data, const mx::Strides& strides) {
  Copy(shape, width, strides, strides).for_runs(0, data, data, [](const char*, char* run, size_t bytes) {
    prepare_for_update(run, bytes);
    return true;
  });
}

void prepare_for_update(char* data, size_t count) {
  if (count > 0) {
    for (size_t i = 0; i < count; i += kPageBytes) {
      map_page(data + i);
    }
    map_page(data + count - 1);
  }
}

bool is_zero(const mx::Shape& shape, size_t width, char* data, const mx::Strides& strides) {
  return Copy(shape, width, strides, strides).for_runs(0, data, data, [](const char* run, char*, size_t bytes) {
    return are_zero(run, bytes);
  });
}

void fill_with_zeros(const mx::Shape& shape, size_t width, char* data, const mx::Strides& strides) {
  Copy(shape, width, strides, strides).for_runs(0, data, data, [](const char*, char* run, size_t bytes) {
    std::memset(run, 0, bytes);
    return true;
  });
}

mx::Strides row_major_strides(const mx::Shape& shape) {
  mx::Strides strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

} // namespace executorch_mlx
