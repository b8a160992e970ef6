#include "undo.h"

#include <mlx/primitives.h>

#include <string_view>

namespace executorch_mlx {

namespace {

bool is_pending_update(const mx::array& x) {
  return x.status() == mx::array::Status::unscheduled && x.has_primitive() &&
      std::string_view(x.primitive().name()) == "SliceUpdate";
}

} // namespace

const mx::array& array_before_updates(const mx::array& x) {
  const mx::array* base = &x;
  while (is_pending_update(*base)) {
    base = &base->inputs()[0];
  }
  return *base;
}

bool Undo::record(
    const mx::array& before, const mx::array& now, mx::Stream stream, std::vector<mx::array>& saved) {
  if (now.id() == before.id() || array_before_updates(now).id() != before.id()) {
    return false;
  }
  for (const mx::array* x = &now; is_pending_update(*x); x = &x->inputs()[0]) {
    const auto [reduce, start, stop, strides] = static_cast<const mx::SliceUpdate&>(x->primitive()).state();
    const auto slice = mx::slice(before, start, stop, strides, stream);
    // Unlike a copy or mx::contiguous, this never shares the memory of `before`.
    const auto contents = mx::where(mx::array(true), slice, slice, stream);
    slices_.push_back({contents, start, stop, strides});
    saved.push_back(contents);
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

} // namespace executorch_mlx
