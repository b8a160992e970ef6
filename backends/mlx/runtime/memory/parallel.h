// `parallel`: a loop on the threads of the CPU kernels, or a plain loop where there are none.
#pragma once

#if EXECUTORCH_MLX_HAS_CPU_KERNELS
#include "kernels/cpu/pool.h"
#else
namespace executorch_mlx {

template <typename Item>
void parallel(int count, Item&& item) {
  for (int i = 0; i < count; ++i) {
    item(i);
  }
}

} // namespace executorch_mlx
#endif
