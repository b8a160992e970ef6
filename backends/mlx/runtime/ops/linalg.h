// Products of matrices, and helpers for all operations with products.
#pragma once

#include "ops/cpu/cpu_kernels.h"
#include "memory/views.h"
#include "ops/index.h"
#include "call/context.h"

namespace executorch_mlx {

// Whether an operation on x should be computed in float32 and its result cast back to the dtype of x. This is so for
// half precision on the CPU, where MLX has either no kernels or slow and inaccurate ones.
inline bool computes_in_float32(const mx::array& x, const Context& c) {
  return c.stream.device == mx::Device::cpu && is_half(x.dtype());
}

// Casts float dtypes to float32. Returns arrays of other dtypes, such as bool masks, unchanged.
inline mx::array to_float32(const mx::array& x, const Context& c) {
  return is_float(x.dtype()) ? mx::astype(x, mx::float32, c.stream) : x;
}

// The axes before the last two of an operand [..., rows, columns]. None if it is a vector.
inline mx::Shape batch_shape(const mx::array& x) {
  mx::Shape shape = x.shape();
  shape.resize(x.ndim() < 2 ? 0 : x.ndim() - 2);
  return shape;
}

// The shape of the product of x, a vector or [..., rows, K], with matrices of `columns` columns. `batch` is the shape
// of these matrices without their last two axes.
inline mx::Shape product_shape(const mx::array& x, const mx::Shape& batch, int columns) {
  mx::Shape shape = mx::broadcast_shapes(batch_shape(x), batch);
  if (x.ndim() > 1) {
    shape.push_back(x.shape(-2));
  }
  shape.push_back(columns);
  return shape;
}

// The number of matrices in an operand [..., rows, columns], which may have no elements. Throws Failure if an int
// cannot hold the number.
inline int batch_size(const mx::array& x) {
  const auto shape = batch_shape(x);
  int size = std::find(shape.begin(), shape.end(), 0) == shape.end() ? 1 : 0;
  for (const int length : shape) {
    const bool overflows = size != 0 && __builtin_mul_overflow(size, length, &size);
    check_argument(!overflows, "got ", describe(x), ", expected at most 2^31 - 1 matrices");
  }
  return size;
}

// Checks the product of x with the transposed matrix w, before a kernel computes it.
inline void check_transposed_product(const mx::array& x, const mx::array& w, const Context& c) {
  c.check_product(product_shape(x, batch_shape(w), w.shape(-2)), x.dtype(), x.shape(-1));
}

// The results of AddmmNodes that multiply the same available value by constants (DecodedInstruction::matrix), computed
// together on a CPU. In half precision, they are the products without the biases: in float32 if there is a bias, else
// in the dtype of the value. nullopt if no kernel computes them.
std::optional<std::vector<mx::array>> products_by_constants(
    const std::vector<const DecodedInstruction*>& products, Context& c);

inline void check_min_rank(const mx::array& x, const char* argument, size_t lowest) {
  check_argument(x.ndim() >= lowest, argument, ": got ", x.ndim(), " axes, expected at least ", lowest);
}

// The number of rows of x [..., columns].
inline int64_t rows_of(const mx::array& x) { return x.size() == 0 ? 0 : static_cast<int64_t>(x.size()) / x.shape(-1); }

// Returns the tensor in slot `tid` as uint32 indices of the matrices of an operand [..., rows, columns]. The matrices
// are counted as if the axes before `rows` were flattened. bounded_indices() says what happens to an index that is out
// of bounds. Returns nullopt if `tid` is null.
inline std::optional<mx::array> batch_indices(const fb::Tid* tid, const mx::array& operand, Context& c) {
  if (tid == nullptr) {
    return std::nullopt;
  }
  const auto indices = bounded_indices(c.in(tid), batch_size(operand), c, /*from_end=*/false);
  if (!is_on_host(indices)) {
    return mx::astype(indices, mx::uint32, c.stream);
  }
  std::vector<uint32_t> values; // at once: a cast would be lazy, and so would be the product
  for_each_integer(indices, [&](int64_t index) { values.push_back(static_cast<uint32_t>(index)); });
  return mx::array(values.begin(), indices.shape());
}

// The shape of the products of matrices that the indices choose, with `columns` columns. Without indices, all matrices
// of an operand are chosen.
inline mx::Shape gathered_shape(const mx::array& a, const mx::array& b, const std::optional<mx::array>& lhs,
    const std::optional<mx::array>& rhs, int columns) {
  mx::Shape shape = mx::broadcast_shapes(lhs ? lhs->shape() : batch_shape(a), rhs ? rhs->shape() : batch_shape(b));
  shape.push_back(a.shape(-2));
  shape.push_back(columns);
  return shape;
}

// Whether the program promises that the indices are in ascending order.
template <typename Node>
bool sorted_indices(const Node& n, Context& c) {
  return n.sorted_indices_flag() == nullptr ? n.sorted_indices() : c.integer(n.sorted_indices_flag()) != 0;
}

} // namespace executorch_mlx
