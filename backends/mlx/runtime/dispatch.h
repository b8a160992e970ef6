// The table of ops: one row for every member of the schema's OpNode.
#pragma once

#include <cstddef>

#include "program.h"

namespace executorch_mlx {

struct Row {
  fb::OpNode op;
  const char* name;
  Handler handler;
};

// Null for what is no op of this runtime.
const Row* find_row(size_t tag);
size_t num_rows();

} // namespace executorch_mlx
