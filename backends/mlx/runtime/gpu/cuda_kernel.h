// A kernel of ours in CUDA, which MLX compiles at run time.
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
  // `body` is the text of the kernel, as for mx::fast::cuda_kernel().
  CudaKernel(
      const char* name, const std::vector<std::string>& inputs, const std::vector<std::string>& outputs,
      const std::string& body);

  // Values of the constants of the text: kName = value.
  using Constants = std::vector<std::pair<std::string, int>>;

  // The results of the kernel, not evaluated, in blocks of `threads` threads. In the text, T is the dtype of the first
  // input, which all results have.
  std::vector<mx::array> operator()(
      std::vector<mx::array> inputs, std::vector<mx::Shape> shapes, int blocks, int threads, const Constants& constants,
      mx::Stream stream) const;

 private:
  mx::fast::CustomKernelFunction make_;
  // MLX writes the source of the kernel anew for each result, which takes longer than the rest. Results that differ only in
  // their inputs share a primitive.
  mutable std::mutex mutex_;
  mutable std::map<std::vector<int>, std::shared_ptr<mx::Primitive>> primitives_;
};

} // namespace executorch_mlx::gpu
