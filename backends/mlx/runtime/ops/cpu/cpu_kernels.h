// CPU kernels for operations where MLX's CPU backend is slow. The rest of the runtime includes no other
// header of this folder. kernels/cpu/README.md describes the kernels.
//
// Each kernel's function returns its result, or nullopt if no kernel applies: `stream` is not a CPU stream, an operand
// has an unsupported dtype or shape, or the platform has no kernels. The caller then uses MLX's own operation. If all
// operands are available, the kernel runs at once, in the calling thread. Otherwise the result is lazy.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "kernels/cpu/elementwise_step.h"
#include "kernels/cpu/float_type.h"
#include "memory/kernel_result.h"

namespace executorch_mlx {

namespace mx = mlx::core;

namespace cpu {

// Throws an error if EXECUTORCH_MLX_CPU_KERNELS, an environment variable, names an instruction set that this processor
// does not support.
void check_instruction_set();

// KERNEL declares a function of a kernel. On a platform without kernels, it defines the function, which then returns
// nullopt or false.
#if EXECUTORCH_MLX_HAS_CPU_KERNELS
#define KERNEL(...) __VA_ARGS__
#else
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define KERNEL(...) \
  inline __VA_ARGS__ { return {}; }

inline void check_instruction_set() {}
#endif

// The instruction set of the kernels, and the name of the BLAS library: see executorch_mlx_cpu_kernels() and
// executorch_mlx_blas() in delegate.h.
KERNEL(std::optional<const char*> instruction_set());
KERNEL(std::optional<const char*> blas_name());

// alpha * x [..., k] @ b [k, n] + beta * c -> [..., n] in float32, for available operands. b is row-major
// or column-major. c has the shape of the result, or is one row of n elements; without it, the second term is missing.
KERNEL(std::optional<mx::array> matmul(const mx::array& x, const mx::array& b, const std::optional<mx::array>& c,
    float alpha, float beta, mx::Stream stream));

// x [..., k] @ b [k, n] -> [..., n]. x is float32, float16 or bfloat16; b is float16 or bfloat16 with any strides. Sums
// are float32. The result has the given dtype, one of these three.
KERNEL(
    std::optional<mx::array> matmul_half(const mx::array& x, const mx::array& b, mx::Dtype dtype, mx::Stream stream));

// A matrix w [n, k] in MLX's affine packing. scales and biases are float32, float16 or bfloat16.
struct PackedMatrix {
  mx::array w;
  mx::array scales;
  mx::array biases;
  std::optional<mx::array> integer_panels = std::nullopt; // from integer_panels(), for products that use it
};

// A packed copy of a matrix, before it is made.
struct Panels {
  size_t size; // in bytes
  std::function<void(mx::array&)> pack; // writes the panels to memory that should begin at a multiple of 64
};

// x [..., k] @ w.T -> [..., n] with the dtype of x: float32, float16 or bfloat16. Sums are float32. Uses the panels of
// the matrix if has_fast_integers().
KERNEL(std::optional<mx::array> quantized_matmul(
    const mx::array& x, const PackedMatrix& matrix, int group_size, int bits, mx::Stream stream));

// Like quantized_matmul, with the activations x rounded to 8 bits: see Int8QuantizedMatmulNode. The matrix has 4 or 8
// bits.
KERNEL(std::optional<mx::array> int8_quantized_matmul(
    const mx::array& x, const PackedMatrix& matrix, int group_size, int bits, mx::Stream stream));

// The matrix [n, k] in float32. nullopt also if an operand is lazy.
KERNEL(std::optional<mx::array> dequantize(const PackedMatrix& matrix, int group_size, int bits, mx::Stream stream));

// Whether quantized_matmul() multiplies integers on this processor. It then packs a matrix without panels in each call.
KERNEL(bool has_fast_integers(int bits, int group_size, int k));

// Packs an available matrix for products that use the panels. The products of few rows get faster, and keep their bits.
// nullopt also if no kernel can use the panels.
KERNEL(std::optional<Panels> integer_panels(const PackedMatrix& matrix, int group_size, int bits, mx::Stream stream));

// The products of x by several matrices, which the threads compute together: one start of the threads for all products.
// Each result has the bits that the function for one matrix gives. nullopt also if an operand is lazy.
KERNEL(std::optional<std::vector<mx::array>> quantized_matmuls(
    const mx::array& x, const std::vector<PackedMatrix>& matrices, int group_size, int bits, mx::Stream stream));
KERNEL(std::optional<std::vector<mx::array>> int8_quantized_matmuls(
    const mx::array& x, const std::vector<PackedMatrix>& matrices, int group_size, int bits, mx::Stream stream));

// The same for activation(x [..., k] @ w.T + bias) + residual in float32, where w [n, k] is row-major.
struct RowMatrix {
  mx::array w;
  std::optional<mx::array> bias; // [n]
  std::optional<mx::array> panels; // from panels()
  Elementwise activation = Elementwise::copy; // one of kernel::Epilogue
  std::optional<mx::array> residual = std::nullopt; // with the shape of the result
};
KERNEL(std::optional<std::vector<mx::array>> matmuls(
    const mx::array& x, const std::vector<RowMatrix>& matrices, mx::Stream stream));

// The same for matmul_half() with w.T in place of b. The matrices w [n, k] are row-major, of the same dtype. Their
// biases are not added. `dtypes` has those of the results.
KERNEL(std::optional<std::vector<mx::array>> matmuls_half(const mx::array& x, const std::vector<RowMatrix>& matrices,
    const std::vector<mx::Dtype>& dtypes, mx::Stream stream));

// Packs an available matrix w [n, k] for the products with RowMatrix, which get faster and keep their bits. Returns
// nullopt also if no kernel can use the panels.
KERNEL(std::optional<Panels> panels(const mx::array& w, mx::Stream stream));

// Like mx::gather_mm: y[i] = x[lhs[i]] @ b[rhs[i]]. x [..., m, k] is float32; b [e, k, n] is float32, float16
// or bfloat16 with any strides. lhs and rhs are uint32, within bounds, and broadcast with each other; lhs indexes
// the flattened batch axes of x. Without lhs, x itself is used instead of x[lhs], and its batch axes broadcast
// with rhs.
//
// MLX multiplies one pair of matrices at a time. These kernels multiply all matrices of x that use the same matrix
// of b together, so that they read each matrix of b only once.
KERNEL(std::optional<mx::array> gather_matmul(const mx::array& x, const mx::array& b,
    const std::optional<mx::array>& lhs, const std::optional<mx::array>& rhs, mx::Stream stream));

// Like gather_matmul, but y[i] = x[lhs[i]] @ w[rhs[i]].T for matrices w [e, n, k] in MLX's affine packing. scales
// and biases are float32, float16 or bfloat16.
KERNEL(std::optional<mx::array> gather_quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
    const mx::array& biases, const std::optional<mx::array>& lhs, const std::optional<mx::array>& rhs, int group_size,
    int bits, mx::Stream stream));

// Elementwise operations that follow each other. Each step has one result. Operands are numbered: the inputs of the
// sequence have the numbers from kMaxSteps on, and a step has its own position.
struct ElementwiseSequence {
  static constexpr size_t kMaxSteps = 32;

  // With Elementwise::copy, a step takes the elements [start, stop) of the last axis of `a`, which the program calls
  // `axis`. As in Python, negative numbers count from the end. If `is_rest`, `stop` must not be before the end of the
  // axis.
  struct Step {
    Elementwise operation;
    uint32_t a = 0;
    uint32_t b = 0;
    int64_t axis = -1;
    int64_t start = 0;
    int64_t stop = 0;
    bool is_rest = false;
    bool is_result = false; // whether the caller gets an array with the result
  };
  std::vector<Step> steps;
};

struct ElementwiseResults {
  std::vector<mx::array> arrays; // of the steps with is_result, in order
  uint64_t operations; // elements that the steps have read, and elements of other results
};

// Computes a sequence at once, without an array for each step. nullopt also if an input is lazy, if the inputs differ
// in their dtype or in more than the last axis, if a row is longer than 16384 elements, or if a slice of more than
// 16384 elements is a result.
KERNEL(std::optional<ElementwiseResults> elementwise_sequence(
    const ElementwiseSequence& sequence, const std::vector<mx::array>& inputs, mx::Stream stream));

// The body of a loop over the time steps of a recurrent layer: the product of a carry `hidden` and a matrix, an addend,
// and a sequence of elementwise operations.
struct RecurrentCell {
  enum class Source : uint8_t { product, carry, sliced, fixed }; // `fixed`: the same in all time steps
  struct Operand {
    Source source;
    uint32_t index; // among the carries, the originals or the fixed operands
  };

  const ElementwiseSequence* sequence;
  std::vector<Operand> inputs; // of the sequence
  std::optional<Operand> addend; // sliced or fixed
  uint32_t hidden;
  std::vector<uint32_t> carry_steps; // the steps that compute the carries for the next time step
  std::vector<uint32_t> output_steps; // the steps whose results the loop stacks
  std::vector<uint32_t> last_steps; // the steps whose results of the last time step are read after the loop
};

struct RecurrentLoopOperands {
  std::vector<mx::array> originals; // the arrays that the time steps read slices of, at least one
  int axis; // of the slices
  std::vector<mx::array> carries;
  std::vector<mx::array> fixed;
};

struct RecurrentLoopResults {
  std::vector<mx::array> carries;
  std::vector<mx::array> outputs;
  std::vector<mx::array> last; // of `last_steps`
  mx::array product; // of the last time step, with the addend
};

// Packs the matrix of a recurrent cell for any number of rows, if can_pack_recurrent().
KERNEL(bool can_pack_recurrent(const mx::array& b, mx::Stream stream));
KERNEL(std::optional<mx::array> pack_recurrent(const mx::array& b));

// Computes all time steps at once, with the same bits as one after the other. nullopt also if an operand is lazy or not
// float32, or if the widths of the values are not multiples of the width of the state. The originals have the same
// size, which is not 0, on `axis`.
KERNEL(std::optional<RecurrentLoopResults> recurrent_loop(
    const RecurrentCell& cell, const RecurrentLoopOperands& operands, const mx::array& packed));

#undef KERNEL

} // namespace cpu

} // namespace executorch_mlx
