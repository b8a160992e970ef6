// Helpers for kernels that take over operations of the lazy graph. Only the sources of this folder include this file.
#pragma once

#include <mlx/mlx.h>
#include <mlx/primitives.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

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

// An operation that a kernel for several operations usually takes over. Its array costs the host less than those of
// MLX's functions and of CudaKernel. If something else needs the result, compute() is called and then evaluated.
class DeferredOperation : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + ": runs on GPU streams only");
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array y = compute(inputs);
    y.primitive().eval_gpu(y.inputs(), outputs);
  }

 private:
  // Returns the lazy result of one operation of MLX with these inputs.
  virtual mx::array compute(const std::vector<mx::array>& inputs) = 0;
};

// rms_norm(x, weight, eps) of inputs x and weight.
class DeferredNorm : public DeferredOperation {
 public:
  DeferredNorm(mx::Stream stream, float eps) : DeferredOperation(stream), eps(eps) {}

  const char* name() const override {
    return kName;
  }

  static constexpr char kName[] = "DeferredNorm";
  const float eps;

 private:
  mx::array compute(const std::vector<mx::array>& inputs) override {
    return mx::fast::rms_norm(inputs[0], inputs[1], eps, stream());
  }
};

// The primitive of x if x is the lazy result of an RMSNorm over vectors of `size` elements, else null.
inline const DeferredNorm* norm_of(const mx::array& x, int size) {
  const bool is_norm = is_lazy(x, DeferredNorm::kName) && x.shape(-1) == size;
  return is_norm ? static_cast<const DeferredNorm*>(&x.primitive()) : nullptr;
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
