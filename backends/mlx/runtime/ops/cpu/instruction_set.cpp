// The instruction set of the kernels: its name, and the check of the environment variable.
#include <cstdlib>

#include "error.h"
#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/instruction_set.h"

namespace executorch_mlx::cpu {

void check_instruction_set() {
  const char* const name = std::getenv(EXECUTORCH_MLX_CPU_KERNELS);
  if (name == nullptr) {
    return;
  }
  const std::string all = kernel::instruction_sets();
  check_argument(str(", ", all, ", ").find(str(", ", name, ", ")) != std::string::npos, EXECUTORCH_MLX_CPU_KERNELS,
      ": got \"", name, "\", expected one of ", all);
}

std::optional<const char*> instruction_set() { return kernel::instruction_set(); }

} // namespace executorch_mlx::cpu
