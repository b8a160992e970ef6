// One pool of threads for all products on a CPU.
#pragma once

#include <type_traits>

#include "blas.h"

namespace executorch_mlx {

// Calls item(0) … item(count - 1), on as many threads as there are; on the caller's alone while the
// pool works for another. Items must not throw.
template <typename Item>
void parallel(int count, Item&& item) {
  executorch_mlx_parallel(
      count, [](void* context, int i) { (*static_cast<std::remove_reference_t<Item>*>(context))(i); }, &item);
}

} // namespace executorch_mlx
