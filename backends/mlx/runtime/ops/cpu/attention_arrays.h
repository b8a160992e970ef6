// Operands and results of the attention kernels, as MLX arrays.
#pragma once

#include "memory/views.h"
#include "kernels/cpu/heads.h"
#include "memory/kernel_result.h"

namespace executorch_mlx::cpu {

inline kernel::Heads heads_of(const mx::array& x) {
  return {x.data<void>(), *float_type(x.dtype()), {x.strides(0), x.strides(1), x.strides(2), x.strides(3)}};
}

// Sets the mask of `attention`, the arguments of an attention kernel. `mask` is bool or float32, and broadcasts to four
// axes.
template <typename Attention>
void set_mask(Attention& attention, const mx::array& mask) {
  const bool is_bool = mask.dtype() == mx::bool_;
  attention.bool_mask = is_bool ? mask.data<bool>() : nullptr;
  attention.float_mask = is_bool ? nullptr : mask.data<float>();
  const int added = 4 - static_cast<int>(mask.ndim());
  for (int axis = 0; axis < 4; ++axis) {
    const bool repeats = axis < added || mask.shape(axis - added) == 1;
    attention.mask_strides[axis] = repeats ? 0 : mask.strides(axis - added);
  }
}

// The result [batch, heads, queries, width] of attention for q, from a kernel that writes the heads of a query side by
// side.
template <typename Make>
mx::array attention_result(
    const char* name, const mx::array& q, int width, std::vector<mx::array> inputs, mx::Stream stream, Make make_task) {
  const mx::Shape shape{q.shape(0), q.shape(2), q.shape(1), width};
  const auto y = kernel_result(name, shape, q.dtype(), std::move(inputs), stream, std::move(make_task));
  return views::transpose(y, {0, 2, 1, 3}, stream);
}

} // namespace executorch_mlx::cpu
