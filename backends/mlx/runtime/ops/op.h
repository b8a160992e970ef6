// Each .cpp file in this folder has the functions that run a family of IR nodes, and at its end a line for each node.
// In each function, `n` is the FlatBuffer table of the IR node, and `c` has the slots and the stream.
//
// MLX_OP(Op, function) says which function runs the instructions of an op. `Op` is the name of an IR node, and the
// function takes the FlatBuffer table of this IR node. The macro finds the C++ type of the table in the schema, so a
// function that takes another table does not compile. It defines run_##Op(), which program/dispatch_table.cpp declares
// for each op of the schema: an op without such a line is an error of the linker, and so is an op with two.
#pragma once

#include <type_traits>
#include <utility>

#include "call/context.h"

#define MLX_OP(Op, ...)                                                                                \
  void run_##Op(const void* node, Context& context) {                                                  \
    using Table = std::remove_cvref_t<decltype(*std::declval<const fb::Instruction&>().op_as_##Op())>; \
    constexpr void (*run)(const Table&, Context&) = __VA_ARGS__;                                       \
    run(*static_cast<const Table*>(node), context);                                                    \
  }
