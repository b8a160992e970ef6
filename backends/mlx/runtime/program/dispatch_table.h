// The dispatch table: from an IR node to the function that runs it.
#pragma once

#include <cstddef>

#include "program/program.h"

namespace executorch_mlx {

// An entry of the dispatch table.
struct OpRow {
  fb::OpNode op;
  const char* name;
  OpFunction function; // MLX_OP in ops/op.h defines it
};

// Returns the entry of the IR node with this tag in the union OpNode, or nullptr if there is none.
const OpRow* find_row(size_t tag);

// Whether an IR node is one of earlier versions, which this runtime refuses.
bool is_retired(fb::OpNode op);

} // namespace executorch_mlx
