// The C API of libmlx_delegate.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Returns the version of this library, such as "0.1.0". The string is static.
const char* executorch_mlx_version(void);

// Registers the backend MLXBackend with the ExecuTorch runtime of this process. May be called repeatedly.
// Returns 0 if this backend is registered, 1 if another library registered an MLXBackend first, which then stays in
// use, and otherwise the number of an ExecuTorch Error.
int executorch_mlx_register(void);

// Returns 1 if this process was forked after the library was loaded, else 0. Such a process lacks the threads of MLX,
// for which a call would wait forever: loading or executing a program returns the Error InvalidState.
int executorch_mlx_is_forked(void);

// Sets a default load option for all programs loaded from now on. The options of a single load have the same names
// and take precedence.
//
//   "device"            "cpu" or "gpu"
//   "metal_kernels"     "true" or "false"
//   "priority"          "normal" or "low": whether the program yields the processors to other threads
//   "kv_windows"        positions to keep per layer, such as "512,512,0"
//   "max_instructions"  instructions of a call, counting each iteration of a loop; at most 2^24, the default
//   "max_operations"    elements and multiplications of a call; at most 2^50, the default
//
// Returns 0, or the number of an ExecuTorch Error; the log then has the details.
int executorch_mlx_set_option(const char* key, const char* value);

// Returns "cpu" or "gpu": the device on which a program runs if it is loaded with the option "device" = `device`. Null
// or "" stands for a program that is loaded without this option. Returns null if the device is unknown or not
// available; the log then has the reason.
const char* executorch_mlx_device(const char* device);

// Returns the instruction set of the CPU kernels, such as "avx2", or "" if there are no such kernels. The string is
// static.
const char* executorch_mlx_cpu_kernels(void);

// Returns the name of the BLAS library that multiplies MLX's float64 and complex matrices on a CPU: the name that
// OpenBLAS reports about itself; "mlx" for the BLAS library in the mlx wheel, which is used if OpenBLAS is not found;
// or "mlx, loaded first" if libmlx was loaded before libmlx_cpu_kernels. In the last case, MLX uses the BLAS library in
// the mlx wheel for float32 matrices too. The string is static.
const char* executorch_mlx_blas(void);

// Starts to collect, in each thread, the error lines that ExecuTorch and this library log. The lines are written to the
// log as before. To be called after the program has registered its platform layer (PAL) with ExecuTorch, if it has one.
void executorch_mlx_collect_errors(void);

// Returns the error lines that were collected in the calling thread since the last call of this function in this
// thread, at most 4 KiB of them, separated by newlines. The string is valid until the next call in this thread.
const char* executorch_mlx_take_errors(void);

// Called with each line that ExecuTorch and this library log, on the thread that logs it. `level` is 'D' (debug), 'I'
// (info), 'E' (error), 'F' (fatal) or '?'. Must not call functions of ExecuTorch or of this library.
typedef void (*executorch_mlx_on_log)(void* user_data, char level, const char* message, size_t length);

// Passes the lines of the log to `callback` in place of stderr; NULL: to stderr again. When the function returns, the
// earlier callback is not running and is not called any more. To be called like executorch_mlx_collect_errors().
void executorch_mlx_set_log(executorch_mlx_on_log callback, void* user_data);

// Called while a method is loaded, with the bytes of its constants that are loaded so far, and of all. Returning false
// makes the load fail.
typedef bool (*executorch_mlx_on_load)(void* user_data, size_t loaded, size_t total);

// Lets loads on the calling thread call `callback`; NULL: none.
void executorch_mlx_set_on_load(executorch_mlx_on_load callback, void* user_data);

// Stores the axes of an input of a method in `order`, from the outermost to the innermost in memory: 0, 1, 2 for a
// contiguous tensor. `program` is the contents of a `.pte` file, `size` their size in bytes and `capacity` the room in
// `order`. Returns the number of axes, or -1 if the method has no such input or the input is no tensor.
int executorch_mlx_input_order(
    const void* program, size_t size, const char* method, size_t input, uint8_t* order, size_t capacity);

// Lets the calling thread yield the processors to others, as the threads of programs with "priority" = "low". The
// threads that it starts inherit this. It cannot be undone.
void executorch_mlx_lower_thread_priority(void);

// Sets the seed from which the next draws without a seed get their keys, so that they can be repeated.
void executorch_mlx_set_random_seed(uint64_t seed);

#ifdef __cplusplus
} // extern "C"
#endif
