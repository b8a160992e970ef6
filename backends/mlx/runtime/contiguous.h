#pragma once

#include <mlx/mlx.h>

namespace executorch_mlx {

namespace mx = mlx::core;

// `a` in rows one after the other, as kernels of ours read it: itself where it is known to be so.
inline mx::array contiguous(const mx::array& a, mx::Stream stream) {
  const bool is_plain = a.is_available() && a.flags().row_contiguous;
  return is_plain ? a : mx::contiguous(a, /*allow_col_major=*/false, stream);
}

} // namespace executorch_mlx
