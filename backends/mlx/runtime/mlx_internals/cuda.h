// What kernels need of CUDA's driver, of its run-time compiler and of MLX's backend for CUDA.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct CUfunc_st;

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// Whether the stream is one of an NVIDIA GPU, and the functions below can be called. They need functions of MLX, of
// CUDA's driver and of its compiler. If one is missing, the log says so once.
bool is_cuda(mx::Stream stream);

// The version of the architecture of the GPU of a stream, such as 90 for 9.0.
int architecture(mx::Stream stream);

// Compiles a CUDA source that includes no header for the GPU of the stream, and returns the binary. Throws
// std::runtime_error with the compiler's messages if the source is invalid.
std::string compile(const std::string& name, const std::string& source, mx::Stream stream);

// The function `name` of a binary, on the GPU of the stream.
CUfunc_st* load(const std::string& name, const std::string& binary, mx::Stream stream);

// The address of the memory of x on the GPU. x is evaluated.
void* address_on_gpu(const mx::array& x);

// A kernel with its arguments: addresses of memory on the GPU, and integers.
struct KernelRun {
  CUfunc_st* function;
  int blocks, threads;
  std::vector<uint64_t> arguments;
  // Blocks of the kernel start when all blocks of the kernel in front have permitted it or ended, if the GPU supports
  // this.
  bool starts_early;

  bool operator==(const KernelRun&) const = default;
};

// Kernels that run one after the other, as a CUDA graph.
class KernelGraph {
 public:
  static std::unique_ptr<KernelGraph> make(mx::Stream stream);

  virtual ~KernelGraph() = default;

  virtual void add(const KernelRun& run) = 0;

  // Say which memory the kernels use. The graph waits for kernels of MLX that write what it reads, and later kernels
  // of MLX that read what it writes wait for the graph. keeps() is for memory that no kernel of MLX writes in the same
  // evaluation. All this memory stays in use until the graph has run.
  virtual void reads(const mx::array& x) = 0;
  virtual void writes(const mx::array& x) = 0;
  virtual void keeps(const mx::array& x) = 0;

  // Adds the graph to the work of the stream.
  virtual void submit() = 0;
};

// Kernels that run one after the other, again and again. Each time, only their blocks and arguments may differ.
class KernelReplay {
 public:
  static std::unique_ptr<KernelReplay> make(const std::vector<KernelRun>& runs, mx::Stream stream);

  virtual ~KernelReplay() = default;

  // Starts the kernels on the stream, on which MLX has submitted all its work.
  virtual void start(const std::vector<KernelRun>& runs) = 0;
};

// The work of one evaluation of MLX, again and again, on the same memory.
class WorkReplay {
 public:
  // Evaluates arrays and waits for them. All of them are computed on the stream, on which nothing else is under way.
  // Returns a recording of the work, or null if MLX has submitted a part of it by itself. The recording keeps the
  // memory of all intermediate results, so that nothing else gets it; the caller keeps that of all other arrays.
  static std::unique_ptr<WorkReplay> evaluate(const std::vector<mx::array>& arrays, mx::Stream stream);

  virtual ~WorkReplay() = default;

  // Starts the work on the stream, on which MLX has submitted all its work.
  virtual void start() = 0;

  // The memory of the intermediate results.
  virtual size_t bytes() const = 0;
};

// Copies the elements of an array to the memory of another one, on the stream, on which MLX has submitted all its work.
// Both are row-major, and have as many elements.
void copy_on_gpu(const mx::array& from, const mx::array& to, mx::Stream stream);

// The bytes of memory that the GPU of the stream has.
size_t memory_of_gpu(mx::Stream stream);

// Keeps the memory of arrays until the work that is now on the stream, or is submitted with the next evaluation, has
// ended.
void keep_until_done(const std::vector<mx::array>& arrays, mx::Stream stream);

} // namespace executorch_mlx::gpu
