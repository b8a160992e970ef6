// What all headers of the kernels share. The functions in the namespace executorch_mlx::kernel are those that other
// libraries call. ../README.md explains why the kernels are a library of their own.
//
// Matrices are row-major and arrays are contiguous, except where a function takes strides. Strides count elements.
// Kernels compute in float32. All of them use the threads of one pool. A row of a result does not depend on the number
// of rows in the call: see "Order of summation" in ../README.md.
#pragma once

#define EXECUTORCH_MLX_KERNEL_API __attribute__((visibility("default")))
