// Products of matrices, and helpers for all operations with products. See op.h.
#include "ops/linalg.h"

#include "memory/views.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/index.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace {

// The result that is computed with those of other products, or with packed weights: see products_by_constants().
std::optional<mx::array> addmm_by_constant(Context& c) {
  auto result = c.take_early();
  if (!result && c.packed_weights()) {
    auto results = products_by_constants({&c.instruction()}, c);
    result = results ? std::optional(std::move((*results)[0])) : std::nullopt;
  }
  return result;
}

// Computes addmm for operands of half precision on the CPU, in float32. The result is float32 or has the dtype of a.
mx::array addmm_in_float32(const fb::AddmmParams& n, const mx::array& a, const mx::array& b, Context& c) {
  const bool is_product = n.alpha() == 1.0f && n.bias() == nullptr;
  auto product = addmm_by_constant(c);
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

// mx::matmul(a, b). On a GPU, if a has leading axes of size 1 and b is a matrix, gives b such axes, too. Otherwise MLX
// would reshape a and the result. Each of these two operations costs the host about as much as a small kernel.
mx::array matmul(const mx::array& a, const mx::array& b, mx::Stream stream) {
  const bool is_matrix = a.ndim() > 2 && b.ndim() == 2 && batch_size(a) == 1;
  if (stream.device != mx::Device::gpu || !is_matrix || !b.is_available()) {
    return mx::matmul(a, b, stream);
  }
  mx::Shape shape(a.ndim() - 2, 1);
  shape.insert(shape.end(), b.shape().begin(), b.shape().end());
  return mx::matmul(a, views::reshape(b, shape, stream), stream);
}

void addmm(const fb::AddmmParams& n, Context& c) {
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
  if (auto y = addmm_by_constant(c)) {
    return c.set(n.out(), std::move(*y));
  }
  if (const auto y = cpu::matmul(a, b, c.optional(n.bias()), n.alpha(), n.beta(), c.stream)) {
    return c.set(n.out(), *y);
  }
  if (n.bias() != nullptr) {
    return c.set(n.out(), mx::addmm(c.in(n.bias()), a, b, n.alpha(), n.beta(), c.stream));
  }
  auto y = matmul(a, b, c.stream);
  c.set(n.out(), n.alpha() == 1.0f ? y : mx::multiply(y, scalar_like(n.alpha(), y), c.stream));
}

// mx::gather_mm. If the length of the sums is a multiple of 8, MLX's kernels for CUDA read 8 elements at once along the
// contiguous axis of an operand, and fail unless the length of this axis is a multiple of 8, too.
mx::array gather_mm(mx::array a, mx::array b, const std::optional<mx::array>& lhs, const std::optional<mx::array>& rhs,
    bool sorted, mx::Stream stream) {
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

void gather_mm(const fb::GatherMmParams& n, Context& c) {
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

} // namespace

std::optional<std::vector<mx::array>> products_by_constants(
    const std::vector<const DecodedInstruction*>& products, Context& c) {
  const auto table_of = [](const auto* product) { return static_cast<const fb::AddmmParams*>(product->node); };
  const auto x = c.in(table_of(products[0])->mat1());
  if (x.ndim() == 0 || x.size() == 0) {
    return std::nullopt;
  }
  std::vector<cpu::RowMatrix> matrices;
  std::vector<mx::Dtype> dtypes;
  for (const auto* product : products) {
    matrices.push_back({c.in(product->matrix), c.optional(table_of(product)->bias()), c.packed_weights(*product)});
    const auto& [w, bias, panels, activation, residual] = matrices.back();
    if (w.dtype() != x.dtype() || (bias && bias->dtype() != x.dtype())) {
      return std::nullopt;
    }
    check_transposed_product(x, w, c);
    dtypes.push_back(bias ? mx::float32 : x.dtype());
  }
  return is_half(x.dtype()) ? cpu::matmuls_half(x, matrices, dtypes, c.stream) : cpu::matmuls(x, matrices, c.stream);
}

MLX_OP(AddmmNode, addmm)
MLX_OP(GatherMmNode, gather_mm)

} // namespace executorch_mlx
