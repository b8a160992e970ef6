// What a program declares about the shape, dtype and memory order of a tensor.
#pragma once

#include <mlx/mlx.h>

#include <string>
#include <vector>

#include "program/program.h"

namespace executorch_mlx {

namespace mx = mlx::core;

// Verifies the metadata of all tensors except temporaries. Constants and buffers must have no dynamic dimensions.
// Throws Failure.
void check_tensor_meta(const fb::MLXGraph& graph, const Layout& layout);

// The shape of a tensor, which must have no dynamic dimensions.
mx::Shape static_shape(const fb::TensorMeta& meta);

// The axes of a tensor, from the outermost to the innermost in memory.
std::vector<int> memory_order(const fb::TensorMeta& meta);

// Whether a memory order is row-major.
bool is_row_major(const std::vector<int>& order);

// Formats the dtype and shape for messages, for example as "float32[2,1..8]", where "1..8" are the bounds of a
// dynamic dimension.
std::string describe(const fb::TensorMeta& meta);

} // namespace executorch_mlx
