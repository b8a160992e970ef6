// A CUDA kernel that runs as one operation of MLX's graph. Its source is in this library and is compiled at run time.
// See sequence_kernel.h for kernels that run one after the other.
#pragma once

#include <mlx/mlx.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mlx_internals/cuda.h"
#include "kernel_source.h"

namespace executorch_mlx::gpu {

class CudaKernel {
 public:
  // `body` is the source of the body of a function. Its parameters are pointers with the names in `inputs` and
  // `outputs`, and int32 numbers with the names in `numbers`. T is the dtype of the first input. `header` precedes the
  // function.
  CudaKernel(std::string name, std::vector<std::string> inputs, std::vector<std::string> outputs,
      std::vector<std::string> numbers, std::string body, std::string header = "");

  struct Call {
    std::vector<mx::array> inputs;
    std::vector<mx::Shape> shapes; // of the results
    std::vector<int> numbers;
    int blocks;
    int threads;
    std::vector<mx::Dtype> dtypes = {}; // of the results; if empty, that of the first input
  };

  // Returns the results, as lazy arrays. Inputs that are not contiguous are copied.
  std::vector<mx::array> operator()(Call call, const Constants& constants, mx::Stream stream) const;

 private:
  std::string source(const Call& call, const Constants& constants) const;

  std::string name_;
  std::vector<std::string> inputs_, outputs_, numbers_;
  std::string body_, header_;
  mutable std::mutex mutex_;
  mutable std::map<std::vector<int>, std::string> binaries_; // by all that the source depends on
  // The primitives of earlier calls, by the properties of these. To make one takes longer than all other work of a
  // call.
  mutable std::map<std::vector<int>, std::shared_ptr<mx::Primitive>> primitives_;
};

} // namespace executorch_mlx::gpu
