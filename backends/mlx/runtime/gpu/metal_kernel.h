// A Metal kernel. Its source is in this library, and MLX compiles it at run time. It is written with the macros and
// functions below, as for CUDA and C++.
#pragma once

#include <mlx/mlx.h>

#include <string>
#include <vector>

#include "kernel_source.h"

namespace executorch_mlx::gpu {

class MetalKernel {
 public:
  // `text` has the functions that `body` calls. The parameters of the body are pointers with the names in `inputs` and
  // `outputs`, `group` and `own_thread`, the numbers of a threadgroup and of a thread in it. T is the dtype of the
  // first input. An input of fewer than 8 elements is in the address space `constant`, others are in `device`.
  MetalKernel(const std::string& name, const std::vector<std::string>& inputs, const std::vector<std::string>& outputs,
      const std::string& body, const std::string& text);

  // Returns the results, as lazy arrays. Inputs that are not contiguous are copied.
  std::vector<mx::array> operator()(const std::vector<mx::array>& inputs, const std::vector<mx::Shape>& shapes,
      const std::vector<mx::Dtype>& dtypes, int groups, int threads, const Constants& constants,
      mx::Stream stream) const;

 private:
  mx::fast::CustomKernelFunction function_;
};

} // namespace executorch_mlx::gpu
