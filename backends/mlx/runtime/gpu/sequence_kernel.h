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

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../span.h"
#include "mlx_internals/cuda.h"
#include "kernel_source.h"

namespace executorch_mlx::gpu {

class SequenceKernel {
 public:
  // What depends on where the tokens are.
  struct Work {
    std::vector<int> numbers;
    int blocks;
  };

  // `body` is the source of the body of a function. Its parameters are pointers with the names in `inputs`, `weights`
  // and `outputs`, and int32 numbers with the names in `numbers`. T is the dtype of the first input.
  // Every thread that reads an input or writes to memory calls wait_for_inputs() before. It may read weights earlier,
  // and those inputs that Call::early lists. `attributes` are those of the kernel in CUDA, and
  // `header` precedes the function.
  SequenceKernel(std::string name, std::vector<std::string> inputs, std::vector<std::string> weights,
      std::vector<std::string> outputs, std::vector<std::string> numbers, std::string body, std::string attributes = "",
      std::string header = "");

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
    std::vector<mx::Dtype> dtypes = {}; // of the results, if they differ
    bool leaves_gaps = false; // whether the kernel may leave elements of its results unwritten

    // For a sequence that runs again for other tokens: of a kernel that reads a KV cache, where the token of each row
    // is, and the work for others. Without them, the kernel cannot run again.
    std::vector<TokenPlace> places = {};
    std::function<Work(const std::vector<TokenPlace>& places)> at = nullptr;
    std::optional<mx::array> workspace = std::nullopt; // an input that only kernels of this kind use

    mx::Dtype dtype_of(size_t result) const { return dtypes.empty() ? dtype : dtypes[result]; }
  };

  // Returns the results, as lazy arrays. Inputs that are not contiguous are copied.
  std::vector<mx::array> operator()(Call call, Constants constants, mx::Stream stream) const;

  // Replaces each lazy result of a kernel by the latest result of its sequence, with which the whole sequence runs.
  static void replace_by_ends(const std::vector<mx::array*>& arrays);

  // A kernel as it has run.
  struct Record {
    KernelRun run;
    Call call;
    std::vector<std::optional<mx::array>> inputs; // nullopt: a result of the sequence
    std::vector<std::pair<size_t, size_t>> results; // in the memory of the sequence: where each begins, and its size
  };

  // A sequence as it has run.
  struct Recording {
    std::vector<Record> kernels;
    std::optional<mx::array> memory; // of all results
    int runs = 0; // parts of the sequence that have run: 1 if it has run as a whole
  };

  // If `results` are lazy results of one sequence, perhaps reshaped, which depends on no other lazy operation and has
  // not run: a recording, which the evaluation of its end fills. Else null.
  static std::shared_ptr<Recording> record(const std::vector<mx::array>& results);

 private:
  struct Launch;
  class Result;

  CUfunc_st* function(const Launch& launch, mx::Stream stream) const;
  std::string source(const Launch& launch) const;

  std::string name_;
  std::vector<std::string> inputs_, weights_, outputs_, numbers_;
  std::string body_, attributes_, header_;
  mutable std::mutex mutex_;
  mutable std::map<std::vector<int>, CUfunc_st*> functions_; // by all that the source depends on
};

// A recording of all kernels that compute these lazy arrays: results of kernels, and updates of KV caches that a kernel
// has taken over. Null if anything else computes a part of them.
std::shared_ptr<SequenceKernel::Recording> record(const std::vector<mx::array>& arrays);

// x, or what lazy reshapes make x of, if it is in memory, perhaps not computed yet, and row-major.
std::optional<mx::array> operand_in_memory(const mx::array& x);

} // namespace executorch_mlx::gpu
