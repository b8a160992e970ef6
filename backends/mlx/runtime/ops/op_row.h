// Each file in this folder has the functions that run a family of IR nodes, and at its end their op rows. In each
// function, `n` is the FlatBuffer table of the IR node, and `c` has the slots and the stream.
//
// MLX_ROW(Op, function) makes an op row: one entry of the dispatch table. `Op` is the name of an IR node, and the
// function takes the FlatBuffer table of this IR node. The macro finds the C++ type of the table in the schema, so a
// function that takes another table does not compile.
#pragma once

#include <type_traits>
#include <utility>

#include "call/context.h"
#include "program/dispatch_table.h"

namespace executorch_mlx {

// Calls `Run`, the function of an op. call<Node, Run> has the type OpFunction.
template <typename Node, void (*Run)(const Node&, Context&)>
void call(const void* node, Context& context) {
  Run(*static_cast<const Node*>(node), context);
}

} // namespace executorch_mlx

#define MLX_ROW(Op, ...)                                                                                     \
  ::executorch_mlx::OpRow {                                                                                  \
    ::mlx_delegate::OpNode::Op, #Op,                                                                         \
        &::executorch_mlx::call<                                                                             \
            std::remove_cvref_t<decltype(*std::declval<const ::mlx_delegate::Instruction&>().op_as_##Op())>, \
            __VA_ARGS__>                                                                                     \
  }
