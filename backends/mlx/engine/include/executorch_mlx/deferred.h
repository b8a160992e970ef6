// Calls that return before the device has computed their results, so that the caller can prepare the next call meanwhile.
// The LLM engine decodes with them.
//
//   executorch_mlx_defer(NULL, NULL, NULL, 0);
//   module.execute("decode", inputs);                  // step 0, with its tokens in the input
//   executorch_mlx_deferred* first = executorch_mlx_deferred_take();
//   executorch_mlx_defer(first, tokens, rows, count);  // `tokens`: the memory of the output of step 0
//   module.execute("decode", inputs);                  // step 1 takes the tokens of step 0 on the device
//   executorch_mlx_deferred* second = executorch_mlx_deferred_take();
//   executorch_mlx_deferred_finish(first);             // now the output has the tokens of step 0
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A call whose results may not be computed yet. It must be freed before its method is unloaded.
typedef struct executorch_mlx_deferred executorch_mlx_deferred;

// Makes the next call on this thread of a method that consists of one MLX program return as soon as its work has been
// submitted. Its outputs keep what they have until executorch_mlx_deferred_finish(). The call computes its results before it
// returns if it is the first one, there is a memory limit, it is profiled, or the KV caches belong to the runtime.
//
// With `source`, an earlier call, the input named "tokens" is not read. Its element i is element elements[i] of the
// output of `source` that has the memory `output`. Both are int64. The call fails if one of them is missing, `count` is not
// the number of elements of the input, or an element is out of range.
void executorch_mlx_defer(
    const executorch_mlx_deferred* source, const void* output, const int64_t* elements, size_t count);

// Returns the call that was made since executorch_mlx_defer(), for the caller to free. Returns NULL if it failed, or if the
// program has no input named "tokens": it was then not deferred. The next call is a usual one.
executorch_mlx_deferred* executorch_mlx_deferred_take(void);

// Waits for the results and writes them to the memory of the outputs. Returns 0, or the number of an ExecuTorch Error; the
// mutable buffers are then lost.
int executorch_mlx_deferred_finish(executorch_mlx_deferred* call);

// Waits for the results and frees them.
void executorch_mlx_deferred_free(executorch_mlx_deferred* call);

#ifdef __cplusplus
} // extern "C"
#endif
