// The instruction set of the kernels: the check of the environment variable, and the C function that names it.
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

// Returns the instruction set of the CPU kernels, such as "avx2", or "" if there are no such kernels.
extern "C" __attribute__((visibility("default"))) const char* executorch_mlx_cpu_kernels() {
  return executorch_mlx_kernels();
}
