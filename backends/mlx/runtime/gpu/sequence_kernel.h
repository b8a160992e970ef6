// CUDA kernels for one token. A token passes through many short kernels, each of which reads what the kernel in front
// of it writes. If MLX ran them, the host would need longer to submit them than the GPU to run them, and the GPU would
// be idle from the end of a kernel to the start of the next one.
//
// These kernels therefore form sequences. When MLX evaluates the result of a kernel, all kernels that it depends on and
// that have not run yet are submitted together, as one CUDA graph. In this graph, the blocks of a kernel start as soon
// as the GPU has room for them, although the kernel in front still runs. They load the beginning of their weights, and
// then wait until the kernel in front has ended.
#pragma once

#include <mlx/mlx.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mlx_internals/cuda.h"
#include "kernel_source.h"

namespace executorch_mlx::gpu {

class SequenceKernel {
 public:
  // `body` is the source of the body of a function. Its parameters are pointers with the names in `inputs`, `weights`
  // and `outputs`, and int32 numbers with the names in `numbers`. T is the dtype of the first input.
  // Every thread that reads an input or writes to memory calls wait_for_inputs() before. It may read weights earlier,
  // and those inputs that Call::early lists. `attributes` are those of the kernel in CUDA.
  SequenceKernel(std::string name, std::vector<std::string> inputs, std::vector<std::string> weights,
      std::vector<std::string> outputs, std::vector<std::string> numbers, std::string body,
      std::string attributes = "");

  struct Call {
    std::vector<mx::array> inputs;
    std::vector<mx::array> weights; // evaluated, and not written by a kernel of the sequence
    std::vector<mx::Shape> shapes; // of the results
    mx::Dtype dtype; // of the results
    std::vector<int> numbers;
    int blocks;
    int threads;
    std::vector<int> early = {}; // the numbers of the inputs that the kernel reads before wait_for_inputs()
    std::vector<mx::array> written = {}; // the inputs that the kernel also writes
    bool leaves_gpu_idle = false; // so that the L2 cache can load the beginning of the next kernel's weights
  };

  // Returns the results, as lazy arrays. Inputs that are not contiguous are copied.
  std::vector<mx::array> operator()(Call call, Constants constants, mx::Stream stream) const;

  // Replaces each lazy result of a kernel by the latest result of its sequence, with which the whole sequence runs.
  static void replace_by_ends(const std::vector<mx::array*>& arrays);

 private:
  struct Launch;
  class Result;

  CUfunc_st* function(const Launch& launch, mx::Stream stream) const;
  std::string source(const Launch& launch) const;

  std::string name_;
  std::vector<std::string> inputs_, weights_, outputs_, numbers_;
  std::string body_, attributes_;
  mutable std::mutex mutex_;
  mutable std::map<std::vector<int>, CUfunc_st*> functions_; // by all that the source depends on
};

} // namespace executorch_mlx::gpu
