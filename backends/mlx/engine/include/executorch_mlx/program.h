// The C API for programs of any kind: arrays in, arrays out. executorch_mlx.h is the one for language models, and has
// the statuses, the messages of errors and the rules about threads, forks and the ABI that hold here, too.
//
//   executorch_mlx_program* program;
//   executorch_mlx_array input = {sizeof(input), EXECUTORCH_MLX_FLOAT32, 2, {1, 4}, values}, output = {sizeof(output)};
//   executorch_mlx_program_load("model.pte", NULL, &program);
//   executorch_mlx_program_call(program, "forward", &input, 1, &output, 1, NULL);
#pragma once

#include <executorch_mlx/executorch_mlx.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct executorch_mlx_program executorch_mlx_program;

// Loads a program. `device` is "cpu", "gpu", or NULL for the default.
executorch_mlx_status executorch_mlx_program_load(
    const char* path, const char* device, executorch_mlx_program** program);

// Frees a program. No call may run. NULL is allowed.
void executorch_mlx_program_free(executorch_mlx_program* program);

// Returns the names of the methods, sorted and separated by newlines. Valid as long as the program.
const char* executorch_mlx_program_methods(const executorch_mlx_program* program);

// Reads a method without inputs that returns one integer or bool. NOT_FOUND if the program has none.
executorch_mlx_status executorch_mlx_program_get_int(
    const executorch_mlx_program* program, const char* name, int64_t* value);

// Reads a method without inputs that returns one array: its bytes. `data` is valid as long as the program; `size` is in
// bytes.
executorch_mlx_status executorch_mlx_program_get_data(
    const executorch_mlx_program* program, const char* name, const void** data, size_t* size);

// Calls a method. The caller has set `size` of the outputs, as many as the method has. Their data are valid until the
// next call of this method. Calls of one program wait for each other; `seconds`, unless it is NULL, gets the time of
// this call without the wait.
executorch_mlx_status executorch_mlx_program_call(executorch_mlx_program* program, const char* method,
    const executorch_mlx_array* inputs, size_t input_count, executorch_mlx_array* outputs, size_t output_count,
    double* seconds);

#ifdef __cplusplus
}
#endif
