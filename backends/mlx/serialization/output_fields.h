// Generated from schema.fbs by generate.py. Do not edit.
#pragma once

#include <string_view>

namespace executorch_mlx {

// Whether an instruction writes the slots in the field `name`. generate.py checks
// that a name means the same in every node.
constexpr bool is_output_field(std::string_view name) {
  return name == "carry" || name == "out" || name == "out_k" || name == "out_q" || name == "out_scales" || name == "out_state" || name == "out_v" || name == "outputs" || name == "outs" || name == "sliced";
}

// Whether an instruction both reads and writes the slots in the field `name`.
constexpr bool is_inout_field(std::string_view name) {
  return name == "carry";
}

} // namespace executorch_mlx
