// Operands of the attention kernels, from MLX arrays.
#pragma once

#include <algorithm>

#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

inline ExecutorchMlxHeads heads_of(const mx::array& x) {
  return {x.data<void>(), *float_type(x.dtype()), {x.strides(0), x.strides(1), x.strides(2), x.strides(3)}};
}

// Sets the mask of a task of a kernel. `mask` has four axes, and is bool or float32.
template <typename Attention>
void set_mask(Attention& attention, const mx::array& mask) {
  const bool is_bool = mask.dtype() == mx::bool_;
  attention.bool_mask = is_bool ? mask.data<bool>() : nullptr;
  attention.float_mask = is_bool ? nullptr : mask.data<float>();
  std::copy(mask.strides().begin(), mask.strides().end(), attention.mask_strides);
}

} // namespace executorch_mlx::cpu
