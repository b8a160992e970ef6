// The choice of the instruction set of the kernels.
#pragma once

#include "api.h"

// The environment variable that chooses the instruction set of the kernels. Without it, or if this processor does not
// support that instruction set, the kernels are those of the fastest one.
#define EXECUTORCH_MLX_CPU_KERNELS "EXECUTORCH_MLX_CPU_KERNELS"

namespace executorch_mlx::kernel {

// Returns the instruction set of the kernels: "amx", "avx512_bf16", "avx512" or "avx2" on x86-64, "i8mm" (with
// bfloat16) or "dotprod" on arm64, or "portable".
EXECUTORCH_MLX_KERNEL_API const char* instruction_set();

// Returns the instruction sets that this processor supports, such as "avx2, portable".
EXECUTORCH_MLX_KERNEL_API const char* instruction_sets();

// Selects the kernels for an instruction set from now on. Returns false and changes nothing if this processor does not
// support it. Must not be called while kernels run.
EXECUTORCH_MLX_KERNEL_API bool use_instruction_set(const char* name);

} // namespace executorch_mlx::kernel
