// The kernels of this library for GPUs. Part of the C API of libmlx_delegate; thread-safe.
//
// At the first use of a GPU, each kernel has a trial: its results are compared with those of MLX's operations, or of
// the sampler's definition, and its time with that of the operations that it replaces. Only a kernel that is right and
// not slower is used. The verdicts hold for the process, and are kept in $XDG_CACHE_HOME/executorch-mlx or
// ~/.cache/executorch-mlx for later processes, until the device, the system, MLX or this library changes.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct executorch_mlx_kernel {
  const char* name;
  // "used", "wrong" (its results), "slow", "failed" (with an exception), "crashed" (the process ended in the trial,
  // more than once), or "chosen": by executorch_mlx_choose_kernels() or the environment variable
  // EXECUTORCH_MLX_KERNELS, without a trial.
  const char* verdict;
  int is_used;
  // The largest difference from the reference, as a part of the largest magnitude. 0: equal results.
  double error;
  double microseconds; // with the kernel
  double microseconds_without; // with the operations that it replaces
  const char* reason; // of a failure, or ""
} executorch_mlx_kernel;

// Stores the kernels of the GPU, at most `capacity` of them, and their number in `count`: 0 if there is no GPU, or no
// kernel for it. The first call holds the trials, if no program of the GPU has been loaded. The strings are static.
// Returns 0, or the number of an ExecuTorch Error.
int executorch_mlx_kernels(executorch_mlx_kernel* kernels, size_t capacity, size_t* count);

// Chooses kernels that are used or not used without a trial, such as "sample=off,attention=on" or "all=off". Takes
// precedence over the environment variable EXECUTORCH_MLX_KERNELS, which has the same form. Returns 0, or the number of
// an ExecuTorch Error: InvalidState if a program of the GPU has been loaded in this process, or the trials were held.
int executorch_mlx_choose_kernels(const char* choices);

#ifdef __cplusplus
} // extern "C"
#endif
