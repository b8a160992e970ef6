// The instruction set of the kernels: the check of the environment variable, and the C function that names it.
#pragma GCC visibility push(default)  // the library exports only these functions
#include <executorch_mlx/delegate.h>
#pragma GCC visibility pop

#include <cstdlib>

#include "../error.h"
#include "accelerate.h"
#include "kernels/blas.h"

namespace executorch_mlx::cpu {

void check_instruction_set() {
  const char* const name = std::getenv(EXECUTORCH_MLX_CPU_KERNELS);
  if (name == nullptr) {
    return;
  }
  const std::string all = executorch_mlx_all_kernels();
  check_argument(
      str(", ", all, ", ").find(str(", ", name, ", ")) != std::string::npos, EXECUTORCH_MLX_CPU_KERNELS, ": got \"",
      name, "\", expected one of ", all);
}

} // namespace executorch_mlx::cpu

const char* executorch_mlx_cpu_kernels() {
  return executorch_mlx_kernels();
}
