// An array of numbers, as the C APIs pass it. Fields are only appended.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The dtypes, numbered as ExecuTorch's ScalarType.
enum {
  EXECUTORCH_MLX_UINT8 = 0,
  EXECUTORCH_MLX_INT8 = 1,
  EXECUTORCH_MLX_INT16 = 2,
  EXECUTORCH_MLX_INT32 = 3,
  EXECUTORCH_MLX_INT64 = 4,
  EXECUTORCH_MLX_FLOAT16 = 5,
  EXECUTORCH_MLX_FLOAT32 = 6,
  EXECUTORCH_MLX_FLOAT64 = 7,
  EXECUTORCH_MLX_BOOL = 11,
  EXECUTORCH_MLX_BFLOAT16 = 15,
  EXECUTORCH_MLX_MAX_RANK = 8,
};

// A row-major array.
typedef struct {
  size_t size; // of this struct
  int32_t dtype;
  int32_t rank;
  int64_t shape[8];
  const void* data;
} executorch_mlx_array;

#ifdef __cplusplus
}
#endif
