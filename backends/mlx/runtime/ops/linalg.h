// Products of matrices, and helpers for all operations with products. See op_row.h.
#pragma once

#include "ops/cpu/cpu_kernels.h"
#include "memory/views.h"
#include "ops/index.h"
#include "ops/op_row.h"

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

inline void check_min_rank(const mx::array& x, const char* argument, size_t lowest) {
  check_argument(x.ndim() >= lowest, argument, ": got ", x.ndim(), " axes, expected at least ", lowest);
}

// Computes addmm for operands of half precision on the CPU, in float32. The result is float32 or has the dtype of a.
inline mx::array addmm_in_float32(const fb::AddmmParams& n, const mx::array& a, const mx::array& b, Context& c) {
  const bool is_product = n.alpha() == 1.0f && n.bias() == nullptr;
  auto product = c.take_early();
  if (!product) {
    product = cpu::matmul_half(a, b, is_product ? a.dtype() : mx::float32, c.stream);
  }
  auto y = product ? *product : mx::matmul(to_float32(a, c), to_float32(b, c), c.stream);
  y = n.alpha() == 1.0f ? y : mx::multiply(y, scalar_like(n.alpha(), y), c.stream);
  if (n.bias() == nullptr) {
    return y;
  }
  const auto bias = to_float32(c.in(n.bias()), c);
  return mx::add(y, n.beta() == 1.0f ? bias : mx::multiply(bias, scalar_like(n.beta(), y), c.stream), c.stream);
}

// The number of rows of x [..., columns].
inline int64_t rows_of(const mx::array& x) { return x.size() == 0 ? 0 : static_cast<int64_t>(x.size()) / x.shape(-1); }

// mx::matmul(a, b). On a GPU, if a has leading axes of size 1 and b is a matrix, gives b such axes, too. Otherwise MLX
// would reshape a and the result. Each of these two operations costs the host about as much as a small kernel.
inline mx::array matmul(const mx::array& a, const mx::array& b, mx::Stream stream) {
  const bool is_matrix = a.ndim() > 2 && b.ndim() == 2 && batch_size(a) == 1;
  if (stream.device != mx::Device::gpu || !is_matrix || !b.is_available()) {
    return mx::matmul(a, b, stream);
  }
  mx::Shape shape(a.ndim() - 2, 1);
  shape.insert(shape.end(), b.shape().begin(), b.shape().end());
  return mx::matmul(a, views::reshape(b, shape, stream), stream);
}

inline void addmm(const fb::AddmmParams& n, Context& c) {
  c.make_available({n.mat1(), n.mat2()});
  const auto& a = c.in(n.mat1());
  const auto& b = c.in(n.mat2());
  check_min_rank(a, "mat1", 1);
  check_min_rank(b, "mat2", 1);
  check_argument(a.shape(-1) == b.shape(b.ndim() == 1 ? 0 : -2), "got mat1 ", describe(a), " and mat2 ", describe(b),
      ", expected the same number of columns in mat1 as rows in mat2");
  c.expect_product(product_shape(a, batch_shape(b), b.ndim() == 1 ? 1 : b.shape(-1)), a.dtype(), a.shape(-1));
  const bool same_dtype = b.dtype() == a.dtype() && (n.bias() == nullptr || c.in(n.bias()).dtype() == a.dtype());
  if (computes_in_float32(a, c) && same_dtype) {
    return c.set(n.out(), mx::astype(addmm_in_float32(n, a, b, c), a.dtype(), c.stream));
  }
  if (auto y = c.take_early()) {
    return c.set(n.out(), std::move(*y));
  }
  const bool is_plain = n.alpha() == 1.0f && (n.bias() == nullptr || n.beta() == 1.0f);
  const auto* packed = is_plain ? c.packed(b, rows_of(a)) : nullptr;
  if (const auto y = cpu::matmul(a, b, c.optional(n.bias()), n.alpha(), n.beta(), c.stream, packed)) {
    return c.set(n.out(), *y);
  }
  if (n.bias() != nullptr) {
    return c.set(n.out(), mx::addmm(c.in(n.bias()), a, b, n.alpha(), n.beta(), c.stream));
  }
  auto y = matmul(a, b, c.stream);
  c.set(n.out(), n.alpha() == 1.0f ? y : mx::multiply(y, scalar_like(n.alpha(), y), c.stream));
}

// Returns the tensor in slot `tid` as uint32 indices of the matrices of an operand [..., rows, columns]. The matrices
// are counted as if the axes before `rows` were flattened. bounded_indices() says what happens to an index that is out
// of bounds. Returns nullopt if `tid` is null.
inline std::optional<mx::array> batch_indices(const fb::Tid* tid, const mx::array& operand, Context& c) {
  if (tid == nullptr) {
    return std::nullopt;
  }
  const auto indices = bounded_indices(c.in(tid), batch_size(operand), c, /*from_end=*/false);
  return mx::astype(indices, mx::uint32, c.stream);
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

// mx::gather_mm. If the length of the sums is a multiple of 8, MLX's kernels for CUDA read 8 elements at once along the
// contiguous axis of an operand, and fail unless the length of this axis is a multiple of 8, too.
inline mx::array gather_mm(mx::array a, mx::array b, const std::optional<mx::array>& lhs,
    const std::optional<mx::array>& rhs, bool sorted, mx::Stream stream) {
  constexpr int kMultiple = 8;
  const int columns = b.shape(-1);
  if (stream.device == mx::Device::gpu && mx::cu::is_available() && a.shape(-1) % kMultiple == 0) {
    if (a.shape(-2) > 1 && a.shape(-2) % kMultiple != 0) {
      a = mx::contiguous(a, /*allow_col_major=*/false, stream); // its contiguous axis is then that of the sums
    }
    const bool sums_are_contiguous = b.is_available() && b.strides(-2) == 1;
    if (columns % kMultiple != 0 && !sums_are_contiguous) {
      const int missing = kMultiple - columns % kMultiple;
      b = mx::pad(b, {-1}, {0}, {missing}, mx::array(0, b.dtype()), "constant", stream);
    }
  }
  const auto y = mx::gather_mm(a, b, lhs, rhs, sorted, stream);
  auto stop = y.shape();
  stop.back() = columns;
  return y.shape() == stop ? y : mx::slice(y, mx::Shape(y.ndim(), 0), stop, stream);
}

inline void gather_mm(const fb::GatherMmParams& n, Context& c) {
  c.make_available({n.a(), n.b(), n.lhs_indices(), n.rhs_indices()});
  auto a = c.in(n.a());
  auto b = c.in(n.b());
  check_min_rank(a, "a", 2);
  check_min_rank(b, "b", 2);
  const auto dtype = a.dtype();
  const auto lhs = batch_indices(n.lhs_indices(), a, c);
  const auto rhs = batch_indices(n.rhs_indices(), b, c);
  c.expect_product(gathered_shape(a, b, lhs, rhs, b.shape(-1)), dtype, a.shape(-1));
  const bool in_float32 = computes_in_float32(a, c) || computes_in_float32(b, c);
  if (in_float32) {
    a = to_float32(a, c);
  }
  if (const auto y = cpu::gather_matmul(a, b, lhs, rhs, c.stream)) {
    return c.set(n.out(), mx::astype(*y, dtype, c.stream));
  }
  if (in_float32) {
    b = to_float32(b, c);
  }
  auto y = gather_mm(a, b, lhs, rhs, sorted_indices(n, c), c.stream);
  if (a.shape(-1) == 0) {
    y = mx::zeros(y.shape(), y.dtype(), c.stream);
  }
  c.set(n.out(), mx::astype(y, dtype, c.stream));
}

constexpr OpRow kLinalgRows[] = {
    MLX_ROW(AddmmNode, addmm),
    MLX_ROW(GatherMmNode, gather_mm),
};

} // namespace executorch_mlx
