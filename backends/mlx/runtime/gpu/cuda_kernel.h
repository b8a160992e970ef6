// A CUDA kernel whose source is in this library. MLX compiles it at run time.
#pragma once

#include <mlx/mlx.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// Whether the stream is one of an NVIDIA GPU.
bool is_cuda(mx::Stream stream);

class CudaKernel {
 public:
  // `body` is the source of the kernel, and `header` precedes it, as for mx::fast::cuda_kernel().
  CudaKernel(
      const char* name, const std::vector<std::string>& inputs, const std::vector<std::string>& outputs,
      const std::string& body, const std::string& header = "");

  // The names and values of the compile-time constants of the source, such as {"kDim", 128}. A float is passed as an
  // int with the same bits.
  using Constants = std::vector<std::pair<std::string, int>>;

  // Returns the results of the kernel, as lazy arrays. The kernel runs in `blocks` blocks of `threads` threads. The
  // dtype of the first input is T in the source. It is also the dtype of all results, unless `dtypes` lists theirs.
  std::vector<mx::array> operator()(
      std::vector<mx::array> inputs, std::vector<mx::Shape> shapes, int blocks, int threads, const Constants& constants,
      mx::Stream stream, std::vector<mx::Dtype> dtypes = {}) const;

 private:
  mx::fast::CustomKernelFunction make_;
  // The primitives of earlier calls, by the properties that the source depends on. Each call of make_() writes the
  // source anew, which takes longer than all other work of a call. A call that finds its primitive here skips this.
  mutable std::mutex mutex_;
  mutable std::map<std::vector<int>, std::shared_ptr<mx::Primitive>> primitives_;
};

} // namespace executorch_mlx::gpu
