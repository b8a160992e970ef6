#include "call/in_place.h"

#include <cstring>

#include "memory/parallel.h"
#include "memory/strided_copy.h"
#include "mlx_internals/internals.h"

namespace executorch_mlx {

namespace {

// Drops `other`, if it is a reference to x, and returns true if x can then be updated in place.
bool take(const mx::array& x, std::optional<mx::array>& other) {
  if (!x.is_available() || !can_update_in_place(x, other)) {
    return false;
  }
  if (other && other->id() == x.id()) {
    other.reset();
  }
  return true;
}

} // namespace

bool can_update_in_place(const mx::array& x, std::optional<mx::array>& other) {
  if (!internals::are_usable() || !x.flags().contiguous || x.data_size() != x.size()) {
    return false;
  }
  if (!other || other->id() != x.id()) {
    return x.is_donatable();
  }
  other.reset();
  const bool is_sole = x.is_donatable();
  other = x;
  return is_sole;
}

bool write_in_place(mx::array& x, std::optional<mx::array>& other, const mx::array& update, const mx::Shape& start,
    const mx::Shape& stop, const mx::Shape& steps) {
  mx::Shape shape;
  mx::Strides strides;
  int64_t offset = 0;
  for (size_t i = 0; i < x.ndim(); ++i) {
    shape.push_back((stop[i] - start[i] + steps[i] - 1) / steps[i]);
    strides.push_back(x.strides()[i] * steps[i]);
    offset += x.strides()[i] * start[i];
  }
  const bool is_copy = update.dtype() == x.dtype() && update.shape() == shape;
  if (!is_copy || !update.is_available() || !take(x, other)) {
    return false;
  }
  char* const memory = x.data<char>() + offset * static_cast<int64_t>(x.itemsize());
  strided_copy(shape, x.itemsize(), update.data<char>(), update.strides(), memory, strides);
  return true;
}

bool write_positions_in_place(
    mx::array& x, std::optional<mx::array>& other, const mx::array& update, const mx::Shape& positions) {
  if (x.strides(3) != 1 || update.strides(3) != 1 || !update.is_available() || !take(x, other)) {
    return false;
  }
  const auto width = static_cast<int64_t>(x.itemsize());
  const size_t vector_bytes = x.shape(3) * width;
  parallel(x.shape(0) * x.shape(1), [&](int i) {
    const int batch = i / x.shape(1);
    const int head = i % x.shape(1);
    char* const memory = x.data<char>() + (batch * x.strides(0) + head * x.strides(1)) * width;
    const char* from = update.data<char>() + (batch * update.strides(0) + head * update.strides(1)) * width;
    for (const int position : positions) {
      std::memcpy(memory + position * x.strides(2) * width, from, vector_bytes);
      from += update.strides(2) * width;
    }
  });
  return true;
}

} // namespace executorch_mlx
