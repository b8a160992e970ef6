// Groups of matrix products with a common operand, which the runtime computes together if this operand has few rows:
// for example, the query, key and value of an attention layer. The threads are started once for all products, and work
// that depends only on the operand is done once.
//
// A single AddmmNode whose matrix is constant is a group, too. A CPU has a kernel for it only if the matrix is packed:
// see packed_weights.h.
//
// Two consecutive RopeNodes with the same positions and frequencies are a group: those of the query and the key
// of a layer. Only a GPU computes them together.
#pragma once

#include <utility>
#include <vector>

#include <mlx/mlx.h>

#include "schema_generated.h"

namespace executorch_mlx {

namespace mx = mlx::core;
namespace fb = mlx_delegate;

class Context;
struct MlxProgram;

// Products of one chain. They multiply the same value, because no instruction between the first and the last one can
// write its slot. The matrices are constants.
struct ProductGroup {
  struct Member {
    const void* node;
    const fb::Tid* matrix; // of an AddmmNode: the constant whose transpose is the second operand
  };

  fb::OpNode op; // of all members: AddmmNode, QuantizedMatmulNode, Int8QuantizedMatmulNode or RopeNode
  bool feeds_silu = false; // whether SiluNode reads a result. gpu::gated_products() computes such products on a GPU.
  std::vector<Member> members;
};

// Finds the groups of all chains of a verified program, and writes them to the chains. A group belongs to the
// instruction of its first member. Also writes only_in_products.
void find_product_groups(MlxProgram& program);

// The results of products, by node.
using Products = std::vector<std::pair<const void*, mx::array>>;

// Computes the products of a group. Returns nothing if they cannot be computed together, for example because an operand
// is invalid: the instructions then run one by one. For an AddmmNode of half precision, the result is the product
// without the bias, in float32 if there is a bias.
//
// On a GPU, only RopeNodes and AddmmNodes of one row without a bias have a kernel.
Products compute_products(const ProductGroup& group, Context& context);

} // namespace executorch_mlx
