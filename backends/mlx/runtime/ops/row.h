// MLX_ROW(Op, function) makes an op row. The function takes the node's FlatBuffer table. Its type comes
// from the schema, so a function for another table does not compile.
#pragma once

#include <type_traits>
#include <utility>

#include "context.h"
#include "dispatch_table.h"

namespace executorch_mlx {

template <typename Payload, void (*Run)(const Payload&, Context&)>
void call(const void* payload, Context& context) {
  Run(*static_cast<const Payload*>(payload), context);
}

} // namespace executorch_mlx

#define MLX_ROW(Op, ...)                                                                          \
  ::executorch_mlx::OpRow {                                                                       \
    ::mlx_delegate::OpNode::Op, #Op,                                                              \
        &::executorch_mlx::call<                                                                  \
            std::remove_cvref_t<                                                                  \
                decltype(*std::declval<const ::mlx_delegate::Instruction&>().op_as_##Op())>,      \
            __VA_ARGS__>                                                                          \
  }
