// Operands of the attention kernels, from MLX arrays.
#pragma once

#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

inline ExecutorchMlxHeads heads_of(const mx::array& x) {
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

} // namespace executorch_mlx::cpu
