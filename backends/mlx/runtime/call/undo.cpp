#include "call/undo.h"

#include <mlx/primitives.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "checks.h"
#include "cpu/accelerate.h"
#include "gpu/fused.h"
#include "memory/limit.h"
#include "memory/strided_copy.h"

namespace executorch_mlx {

namespace {

// A slice of its first input that a pending update overwrites.
struct UpdatedSlice {
  mx::Shape start;
  mx::Shape stop;
  mx::Shape strides;
};

// Returns no slices if x is no pending update.
std::vector<UpdatedSlice> updated_slices(const mx::array& x) {
  if (is_lazy(x, "SliceUpdate")) {
    const auto [reduce, start, stop, strides] = static_cast<const mx::SliceUpdate&>(x.primitive()).state();
    return {{start, stop, strides}};
  }
  std::vector<UpdatedSlice> slices;
  if (const auto* positions = gpu::updated_positions(x)) {
    for (const int position : *positions) {
      UpdatedSlice slice{{0, 0, position, 0}, x.shape(), {1, 1, 1, 1}};
      slice.stop[2] = position + 1;
      slices.push_back(std::move(slice));
    }
  }
  return slices;
}

} // namespace

bool holds(const std::optional<mx::array>& holder, const mx::array& x) {
  return holder && holder->id() == x.id();
}

bool can_update_in_place(const mx::array& x, std::optional<mx::array>* first, std::optional<mx::array>* second) {
  if (!x.flags().contiguous || x.data_size() != x.size()) {
    return false;
  }
  const bool in_first = first != nullptr && holds(*first, x);
  const bool in_second = second != nullptr && holds(*second, x);
  if (in_first) {
    first->reset();
  }
  if (in_second) {
    second->reset();
  }
  const bool is_sole = x.is_donatable();
  if (in_first) {
    *first = x;
  }
  if (in_second) {
    *second = x;
  }
  return is_sole;
}

const mx::array& array_before_updates(const mx::array& x) {
  const mx::array* base = &x;
  while (!updated_slices(*base).empty()) {
    base = &base->inputs()[0];
  }
  return *base;
}

bool Undo::record(
    const mx::array& before, const mx::array& now, mx::Stream stream, std::vector<mx::array>& saved) {
  if (now.id() == before.id() || array_before_updates(now).id() != before.id()) {
    return false;
  }
  std::vector<Slice> slices;
  size_t bytes = 0;
  for (const mx::array* x = &now; x->id() != before.id(); x = &x->inputs()[0]) {
    for (const auto& updated : updated_slices(*x)) {
      const auto is_stored = [&updated](const Slice& slice) {
        return slice.start == updated.start && slice.stop == updated.stop && slice.strides == updated.strides;
      };
      if (std::any_of(slices_.begin(), slices_.end(), is_stored)) {
        continue;
      }
      const auto slice = mx::slice(before, updated.start, updated.stop, updated.strides, stream);
      // Unlike a copy or mx::contiguous, this never shares the memory of `before`.
      const auto contents = mx::where(mx::array(true), slice, slice, stream);
      slices.push_back({contents, updated.start, updated.stop, updated.strides});
      bytes += slice.nbytes();
    }
  }
  if (bytes_ + bytes > before.nbytes()) {
    return false;
  }
  bytes_ += bytes;
  for (Slice& slice : slices) {
    saved.push_back(slice.contents);
    slices_.push_back(std::move(slice));
  }
  return true;
}

mx::array Undo::apply(const mx::array& now, mx::Stream stream) const {
  mx::array result = now;
  for (auto slice = slices_.rbegin(); slice != slices_.rend(); ++slice) {
    result = mx::slice_update(result, slice->contents, slice->start, slice->stop, slice->strides, stream);
  }
  return result;
}

namespace {

// The largest update in place, which bounds the memory for the old contents. That memory does not count towards a
// memory limit.
constexpr size_t kMaxInPlaceBytes = 8 << 20;
constexpr size_t kMaxInPlaceBytesWithLimit = 256 << 10;

size_t max_bytes() {
  return has_memory_limit() ? kMaxInPlaceBytesWithLimit : kMaxInPlaceBytes;
}

} // namespace

bool InPlaceUpdates::take(const mx::array& x, std::optional<mx::array>* backup) {
  const bool restores_another = !slices_.empty() && !holds(array_, x);
  if (restores_another || !x.is_available() || !can_update_in_place(x, &array_, backup)) {
    return false;
  }
  if (backup != nullptr && holds(*backup, x)) {
    backup->reset();
  }
  array_ = x;
  return true;
}

bool InPlaceUpdates::write(
    mx::array& x, std::optional<mx::array>* backup, const mx::array& update, const mx::Shape& start,
    const mx::Shape& stop, const mx::Shape& steps, bool saves) {
  Slice slice{0, mx::Shape{}, mx::Strides{}, nullptr};
  const auto width = static_cast<int64_t>(x.itemsize());
  for (size_t i = 0; i < x.ndim(); ++i) {
    slice.shape.push_back((stop[i] - start[i] + steps[i] - 1) / steps[i]);
    slice.strides.push_back(x.strides()[i] * steps[i]);
    slice.offset += x.strides()[i] * start[i] * width;
  }
  const bool is_copy = update.dtype() == x.dtype() && update.shape() == slice.shape && update.nbytes() <= max_bytes();
  if (!is_copy || !update.is_available() || !take(x, backup)) {
    return false;
  }
  saves = saves && needs_saving(update.nbytes());
  const auto dense = row_major_strides(slice.shape);
  char* memory = x.data<char>() + slice.offset;
  if (saves) {
    prepare_for_update(slice.shape, x.itemsize(), memory, slice.strides);
    if (!is_zero(slice.shape, x.itemsize(), memory, slice.strides)) {
      slice.contents = std::make_unique_for_overwrite<char[]>(update.nbytes());
      strided_copy(slice.shape, x.itemsize(), memory, slice.strides, slice.contents.get(), dense);
    }
    slices_.push_back(std::move(slice));
  }
  const Slice& written = saves ? slices_.back() : slice;
  strided_copy(written.shape, x.itemsize(), update.data<char>(), update.strides(), memory, written.strides);
  return true;
}

bool InPlaceUpdates::write_positions(
    mx::array& x, std::optional<mx::array>* backup, const mx::array& update, const mx::Shape& positions,
    bool saves) {
  if (update.nbytes() > max_bytes() || x.strides(3) != 1 || update.strides(3) != 1 || !update.is_available() ||
      !take(x, backup)) {
    return false;
  }
  saves = saves && needs_saving(update.nbytes());
  const auto width = static_cast<int64_t>(x.itemsize());
  const mx::Shape shape{x.shape(0), x.shape(1), 1, x.shape(3)};
  const size_t vector_bytes = x.shape(3) * width;
  const size_t vectors = static_cast<size_t>(x.shape(0)) * x.shape(1);
  std::vector<Slice> slices;
  for (const int position : positions) {
    slices.push_back(
        {position * x.strides(2) * width, shape, x.strides(),
         saves ? std::make_unique_for_overwrite<char[]>(vectors * vector_bytes) : nullptr});
  }
  cpu::parallel(static_cast<int>(vectors), [&](int i) {
    const int batch = i / x.shape(1);
    const int head = i % x.shape(1);
    char* memory = x.data<char>() + (batch * x.strides(0) + head * x.strides(1)) * width;
    const char* from = update.data<char>() + (batch * update.strides(0) + head * update.strides(1)) * width;
    for (const Slice& slice : slices) {
      char* to = memory + slice.offset;
      if (saves) {
        prepare_for_update(to, vector_bytes);
        std::memcpy(slice.contents.get() + i * vector_bytes, to, vector_bytes);
      }
      std::memcpy(to, from, vector_bytes);
      from += update.strides(2) * width;
    }
  });
  if (saves) {
    slices_.insert(slices_.end(), std::make_move_iterator(slices.begin()), std::make_move_iterator(slices.end()));
  }
  return true;
}

bool InPlaceUpdates::needs_saving(size_t bytes) {
  if (!has_whole_array_ && saved_bytes_ + bytes > array_->nbytes()) {
    save_whole_array();
  }
  saved_bytes_ += bytes;
  return !has_whole_array_;
}

void InPlaceUpdates::save_whole_array() {
  const auto dense = row_major_strides(array_->shape());
  const auto copy = [&] {
    auto contents = std::make_unique_for_overwrite<char[]>(array_->nbytes());
    strided_copy(
        array_->shape(), array_->itemsize(), array_->data<char>(), array_->strides(), contents.get(), dense);
    return contents;
  };
  const auto now = copy();
  write_slices_back();
  Slice whole{0, array_->shape(), array_->strides(), copy()};
  strided_copy(array_->shape(), array_->itemsize(), now.get(), dense, array_->data<char>(), array_->strides());
  slices_.clear();
  slices_.push_back(std::move(whole));
  has_whole_array_ = true;
}

void InPlaceUpdates::write_slices_back() {
  for (auto slice = slices_.rbegin(); slice != slices_.rend(); ++slice) {
    char* memory = array_->data<char>() + slice->offset;
    if (slice->contents == nullptr) {
      fill_with_zeros(slice->shape, array_->itemsize(), memory, slice->strides);
      continue;
    }
    strided_copy(
        slice->shape, array_->itemsize(), slice->contents.get(), row_major_strides(slice->shape), memory,
        slice->strides);
  }
}

std::optional<mx::array> InPlaceUpdates::undo() {
  write_slices_back();
  slices_.clear();
  return std::exchange(array_, std::nullopt);
}

} // namespace executorch_mlx
