// Products of one vector with matrices on an Apple GPU. products.cpp decides when the kernels run.
#pragma once

#include "fused.h"

namespace executorch_mlx::gpu {

// Whether the kernels take the operands: see can_multiply().
bool can_multiply_on_metal(const Vectors& vectors, const std::vector<Matrix>& matrices, mx::Stream stream);

// x @ w.T, silu(x @ gate.T) * (x @ up.T) and x @ w.T + added, if can_multiply_on_metal(). The results have the shape
// `shape`.
mx::array product_on_metal(const Vectors& vectors, const Matrix& w, const mx::Shape& shape, mx::Stream stream);
mx::array gated_products_on_metal(
    const Vectors& vectors, const Matrix& gate, const Matrix& up, const mx::Shape& shape, mx::Stream stream);
mx::array product_and_sum_on_metal(
    const Vectors& vectors, const Matrix& w, const mx::array& added, const mx::Shape& shape, mx::Stream stream);

} // namespace executorch_mlx::gpu
