// The memory of MLX arrays in this process. Part of the C API of libmlx_delegate; thread-safe.
//
// All sizes count the memory that MLX has allocated, including that of arrays that the application creates with MLX,
// and the weights that programs use in place. If Python's mlx.core is loaded in the same process, it shares this MLX:
// its arrays are counted, and these limits apply to them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define EXECUTORCH_MLX_NO_MEMORY_LIMIT SIZE_MAX

#ifdef __cplusplus
extern "C" {
#endif

// Returns the number of bytes in use: the active memory.
size_t executorch_mlx_get_active_memory(void);

// Returns the largest number of bytes in use since the start of the process or the last reset. If a program was
// unloaded in that time, or a method was loaded whose packed weights take the place of those of an earlier method, the
// result may be higher than the true peak.
size_t executorch_mlx_get_peak_memory(void);

// Sets the peak to the number of bytes in use now.
void executorch_mlx_reset_peak_memory(void);

// Returns the number of freed bytes that MLX keeps for later arrays. They do not count as active memory.
size_t executorch_mlx_get_cache_memory(void);

// Gives the freed bytes that MLX keeps back to the system.
void executorch_mlx_clear_cache(void);

// Sets how many freed bytes MLX may keep, and returns the previous number.
size_t executorch_mlx_set_cache_limit(size_t bytes);

// Returns the limit of the active memory, or EXECUTORCH_MLX_NO_MEMORY_LIMIT, which is the default.
size_t executorch_mlx_get_memory_limit(void);

// Sets the limit of the active memory and returns the previous one.
//
// A load or a call that would exceed the limit fails with ExecuTorch's Error::MemoryAllocationFailed, and the log has a
// line with the sizes. The log also says if the mutable buffers of the program, such as KV caches, are undefined now:
// see executorch_mlx_reset() in buffers.h. Otherwise they have the contents from before the call, which can be repeated
// after the limit is raised, or with smaller inputs. docs/cpp-api.md says what the limit does not cover.
size_t executorch_mlx_set_memory_limit(size_t bytes);

// Sets how many bytes stay resident for an Apple GPU (macOS 15 or later), and stores the previous number in `previous`
// if that is not null. Has no effect on other devices. Returns 0, or the number of an ExecuTorch Error if `bytes` is
// more than the system permits.
int executorch_mlx_set_wired_limit(size_t bytes, size_t* previous);

// Returns the log line of the last load or call on this thread that failed with Error::MemoryAllocationFailed, or "" if
// there was none. The string is valid until the next such failure on this thread.
const char* executorch_mlx_memory_error(void);

#ifdef __cplusplus
} // extern "C"
#endif
