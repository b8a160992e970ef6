// The memory of MLX arrays in this process. Part of the C API of libmlx_delegate; thread-safe.
//
// The numbers count everything that MLX has allocated, also for arrays that the application made with MLX itself, and
// the weights that programs use in place. A process that uses mlx.core shares them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define EXECUTORCH_MLX_NO_MEMORY_LIMIT SIZE_MAX

#ifdef __cplusplus
extern "C" {
#endif

// Bytes in use now.
size_t executorch_mlx_get_active_memory(void);

// The most bytes in use since the start of the process or the last reset.
size_t executorch_mlx_get_peak_memory(void);
void executorch_mlx_reset_peak_memory(void);

// Bytes of freed memory that MLX keeps for later arrays.
size_t executorch_mlx_get_cache_memory(void);
void executorch_mlx_clear_cache(void);

// Sets how many freed bytes MLX may keep, and returns the previous number.
size_t executorch_mlx_set_cache_limit(size_t bytes);

// The limit of the active memory, or EXECUTORCH_MLX_NO_MEMORY_LIMIT, which is the default.
size_t executorch_mlx_get_memory_limit(void);

// Sets the limit and returns the previous one.
//
// Loading a method, or executing one, that would pass the limit fails with ExecuTorch's Error::MemoryAllocationFailed
// and a line in the log with the sizes. The mutable buffers of the program, such as KV caches, then have their values of
// before the call: execute it again after raising the limit, or with smaller inputs. docs/cpp-api.md says what the limit
// does not cover.
size_t executorch_mlx_set_memory_limit(size_t bytes);

// Sets how many bytes stay resident for an Apple GPU (macOS 15 or later), and stores the previous number in `previous`
// if that is not null. Has no effect on other devices. Returns 0, or the number of an ExecuTorch Error if `bytes` is
// more than the system permits.
int executorch_mlx_set_wired_limit(size_t bytes, size_t* previous);

// The log line of the last load or call on this thread that failed with Error::MemoryAllocationFailed, or "". Valid
// until the next such failure.
const char* executorch_mlx_memory_error(void);

#ifdef __cplusplus
} // extern "C"
#endif
