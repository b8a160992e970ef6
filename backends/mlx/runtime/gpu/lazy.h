// Helpers for kernels that take over operations of the lazy graph. Only the sources of this folder include this file.
#pragma once

#include <mlx/mlx.h>

#include <string_view>

#include "../dtype.h"

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

constexpr int kThreads = 256;  // of a block
constexpr int kWarp = 32;
constexpr int kMaxBlocks = 1 << 22;  // kMaxBlocks * kThreads fits in 32 bits

inline int blocks_of(size_t rows, int per_block) {
  return static_cast<int>((rows + per_block - 1) / per_block);
}

// Whether x is the result of the operation `name` that is not evaluated yet.
inline bool is_lazy(const mx::array& x, std::string_view name) {
  return x.status() == mx::array::Status::unscheduled && x.has_primitive() && x.primitive().name() == name;
}

// Whether x has the dtype `dtype`, and the kernels can read it: it must be a float dtype.
inline bool has_float_dtype(const mx::array& x, mx::Dtype dtype) {
  return x.dtype() == dtype && is_float(dtype);
}

// Source code that adds up `squares` of all threads of a block. Each thread gets the sum.
constexpr char kSumSquares[] = R"(
  __shared__ float of_warp[kThreads / 32];
  for (int other = 16; other > 0; other /= 2) {
    squares += __shfl_xor_sync(0xFFFFFFFFu, squares, other);
  }
  if (threadIdx.x % 32 == 0) {
    of_warp[threadIdx.x / 32] = squares;
  }
  __syncthreads();
  squares = 0.0f;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    squares += of_warp[warp];
  }
)";

} // namespace executorch_mlx::gpu
