// Products of a few vectors with a constant matrix, for kernels of a GPU that compute the operations around it, too:
// the RMSNorm of the vectors, and what follows.
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

// The operands of a product with a constant matrix.
struct ProductOperands {
  const fb::Tid* x;
  const fb::Tid* matrix; // of an AddmmNode, or null
  const fb::QuantizedMatmulParams* quantized; // the node itself, or null

  // The operands of an AddmmNode whose matrix is the transpose of a constant, or of a QuantizedMatmulNode in MLX's
  // affine format. Else nullopt.
  static std::optional<ProductOperands> of(const MlxProgram& program, const DecodedInstruction& instruction);

  // Throws Failure if the quantized weights are invalid.
  gpu::Matrix weights(Context& c) const;
};

// A product that leaves its vectors to a later instruction, the only one that reads its result, if gpu::can_multiply().
// It belongs to the instruction of the product.
class LeftProduct : public FusedInstruction {
 public:
  LeftProduct(const ProductOperands& operands, uint32_t held) : operands_(operands), held_(held) {}

  bool run(Context& c) const override;

 private:
  ProductOperands operands_;
  uint32_t held_;
};

// The same product, for the later instruction.
struct RowProduct {
  uint32_t vectors; // the value that the product reads
  uint32_t held; // State::held[held] are the vectors, if the product is left
  std::optional<VectorNorm> norm;
  ProductOperands operands;

  // Makes the product that an instruction reads from a slot a LeftProduct, if it has ProductOperands, and nothing else
  // reads its result.
  static std::optional<RowProduct> leave(
      MlxProgram& program, const Dataflow& flow, size_t chain, size_t reader, const fb::Tid* slot);

  bool is_left(const Context& c) const;
  std::optional<gpu::Vectors> take_vectors(Context& c) const;

  // The product by itself. The vectors are those of take_vectors().
  mx::array product_of(const gpu::Vectors& vectors, Context& c) const;
};

} // namespace executorch_mlx
