// Products of a few vectors with a constant matrix, for kernels of an NVIDIA GPU that compute the operations around it,
// too: the RMSNorm of the vectors, and what follows.
#pragma once

#include <cstdint>
#include <optional>

#include "fusion/dataflow.h"
#include "gpu/fused.h"
#include "program/program.h"

namespace executorch_mlx {

class Context;

// The kernels multiply up to so many vectors: see gpu::products_of_row().
constexpr int64_t kMaxRowsOnGpu = 32;

// The RMSNorm that computes the vectors of a product.
struct VectorNorm {
  uint32_t operands; // where the RMSNormNode leaves x and its weight: see HeldOperands
  float eps;

  // Returns the norm of vectors if the instruction that reads `value` reads the result of one.
  static std::optional<VectorNorm> find(MlxProgram& program, const Dataflow& flow, size_t chain, uint32_t value);
};

// Returns the vectors x, or what `norm` normalizes to x.
gpu::Vectors vectors_of(const mx::array& x, const std::optional<VectorNorm>& norm, const Context& c);

struct RowProduct {
  uint32_t vectors; // the value that the product reads
  uint32_t operand; // where the AddmmNode leaves it: see HeldOperands
  std::optional<VectorNorm> norm;
  const fb::Tid* matrix;

  // Returns the product that an instruction computes if it is an AddmmNode without a bias whose matrix is the transpose
  // of a constant. `instruction` may be Dataflow::kNone.
  static std::optional<RowProduct> find(MlxProgram& program, const Dataflow& flow, size_t chain, size_t instruction);

  // The vectors, if they are few.
  std::optional<gpu::Vectors> take_vectors(Context& c) const;
};

} // namespace executorch_mlx
