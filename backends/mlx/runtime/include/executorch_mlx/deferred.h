// Calls that return before the device has computed their results, so that the caller can prepare the next call
// meanwhile. The LLM engine decodes with them.
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

// Defers the next call on this thread, which must be of a method that consists of one MLX program. The call returns as
// soon as its work has been submitted. The memory of its outputs does not change until
// executorch_mlx_deferred_finish(). If there is a memory limit or a profile, or if the KV caches belong to the runtime,
// the call still computes its results before it returns.
//
// With `source`, an earlier deferred call, the next call does not read its input named "tokens". In its place, it takes
// elements of an output of `source` on the device: element i of the input is element elements[i] of the output whose
// memory is `output`. Input and output are int64. The call fails if there is no such input or output, if `count` is not
// the number of elements of the input, if an element of `elements` is out of range, or if it is null.
void executorch_mlx_defer(
    const executorch_mlx_deferred* source, const void* output, const int64_t* elements, size_t count);

// Returns the call that was made since executorch_mlx_defer(). The caller frees it. Returns NULL if the call failed, or
// if it was not deferred: with a profile, or if the program has no input named "tokens". Later calls are not deferred.
executorch_mlx_deferred* executorch_mlx_deferred_take(void);

// Waits for the results and writes them to the memory of the outputs. Returns 0, or the number of an ExecuTorch Error.
// After an error, the mutable buffers are undefined: see executorch_mlx_reset() in buffers.h. Other pending calls of
// the program then fail, too.
int executorch_mlx_deferred_finish(executorch_mlx_deferred* call);

// Waits for the results and frees them.
void executorch_mlx_deferred_free(executorch_mlx_deferred* call);

#ifdef __cplusplus
} // extern "C"
#endif
