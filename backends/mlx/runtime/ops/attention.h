// Attention, and the operands of rotary embeddings, for several families of operations.
#pragma once

#include <optional>

#include "call/context.h"

namespace executorch_mlx {

// The checked operands of a RopeNode.
struct RopeOperands {
  mx::array x;
  mx::array offset;
  std::optional<mx::array> freqs;
};

RopeOperands rope_operands(const fb::RopeParams& n, Context& c);

// Returns scaled dot-product attention in the dtype of q. `is_causal`: the last query attends to all keys, the query
// before it to all but the last key, and so on. k and v are read in their own dtype or cast to that of q. For half
// precision on the CPU, computes in float32.
mx::array attend(const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool is_causal,
    const std::optional<mx::array>& mask, const Context& c);

// The result of an SdpaNode with a bool mask, with zeros for queries that see no key. Returns nullopt if there is no
// kernel, or if the operands are invalid or lazy.
std::optional<mx::array> attention_or_zeros(const fb::SdpaParams& n, Context& c);

} // namespace executorch_mlx
