// ExecuTorch's Module in C, for the stand-in of ExecuTorch's Swift module.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct shim_module shim_module;

typedef struct {
  int8_t dtype; // ScalarType, as ExecuTorch numbers them; -1: `integer` is the value
  int64_t integer;
  int32_t rank;
  const int32_t* sizes;
  const void* data;
} shim_value;

shim_module* shim_open(const char* path);
void shim_close(shim_module* module);
// The names of the methods, separated by newlines. Valid until the next call.
const char* shim_method_names(shim_module* module);
// Returns the number of outputs, or -1. The outputs are valid until the next call.
int shim_execute(shim_module* module, const char* method, const shim_value* inputs, size_t count);
shim_value shim_output(const shim_module* module, size_t index);
size_t shim_bytes(shim_value value);

#ifdef __cplusplus
}
#endif
