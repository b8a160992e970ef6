// Products with quantized matrices. See op.h.
#include "ops/quant.h"

#include "gpu/fused.h"
#include "memory/views.h"
#include "mlx_internals/cuda.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/linalg.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace {

// The matrices w [..., N, K] in float32, computed with a CPU kernel if there is one for them.
std::optional<mx::array> dequantize_on_cpu(const fb::DequantizeParams& n, const Quantized& q, const Context& c) {
  if (!q.biases || q.w.size() == 0 || n.mode()->string_view() != "affine" || n.global_scale() != nullptr) {
    return std::nullopt;
  }
  const auto rows = [&](const mx::array& x) {
    const int columns = x.shape(-1);
    return views::reshape(x, {static_cast<int>(x.size() / columns), columns}, c.stream);
  };
  const auto y = cpu::dequantize({rows(q.w), rows(q.scales), rows(*q.biases)}, n.group_size(), n.bits(), c.stream);
  auto shape = q.w.shape();
  shape.back() = y ? y->shape(1) : 0;
  return y ? std::optional(views::reshape(*y, shape, c.stream)) : std::nullopt;
}

void dequantize(const fb::DequantizeParams& n, Context& c) {
  c.make_available({n.w(), n.scales(), n.biases()});
  const auto q = read_weights(n, c);
  auto shape = q.w.shape();
  shape.back() = c.checked_int("columns of w", unpacked_columns(q.w, n.bits()));
  check_size(shape, mx::float32);
  const auto dtype = n.dtype() ? std::optional(dtype_of(*n.dtype())) : std::nullopt;
  if (dtype.value_or(q.scales.dtype()) == mx::float32 && q.scales.dtype() == mx::float32) {
    if (const auto y = dequantize_on_cpu(n, q, c)) {
      return c.set(n.out(), *y);
    }
  }
  c.set(n.out(),
      mx::dequantize(q.w, q.scales, q.biases, n.group_size(), n.bits(), n.mode()->str(), c.optional(n.global_scale()),
          dtype, c.stream));
}

// The number of columns of a product with w, which the product transposes if the node says so.
template <typename Node>
int result_columns(const Node& n, const mx::array& w, const Context& c) {
  return n.transpose() ? w.shape(-2) : c.checked_int("columns of w", unpacked_columns(w, n.bits()));
}

// From this number of rows on, an NVIDIA GPU is faster if it makes numbers of the weights first: MLX's kernels for
// quantized weights do not reach the speed of a product of half precision.
constexpr int64_t kMinRowsToDequantize = 64;

// The product of many rows x with the weights in half precision, if the device is faster with them.
std::optional<mx::array> dequantized_matmul(
    const fb::QuantizedMatmulParams& n, const mx::array& x, const Quantized& q, const Context& c) {
  if (!gpu::is_cuda(c.stream) || !n.transpose() || q.w.ndim() != 2 || !is_half(x.dtype()) ||
      rows_of(x) < kMinRowsToDequantize) {
    return std::nullopt;
  }
  if (q.biases && q.scales.dtype() == x.dtype() && n.mode()->string_view() == "affine") {
    const gpu::Matrix matrix{q.w, q.scales, *q.biases, n.group_size(), n.bits()};
    if (auto y = gpu::dequantized_product(x, matrix, c.stream)) {
      return y;
    }
    if (const auto numbers = gpu::dequantize(matrix, c.stream)) {
      return mx::matmul(x, mx::transpose(*numbers, c.stream), c.stream);
    }
  }
  const auto w = mx::dequantize(q.w, q.scales, q.biases, n.group_size(), n.bits(), n.mode()->str(),
      /*global_scale=*/std::nullopt, x.dtype(), c.stream);
  return mx::matmul(x, mx::transpose(w, c.stream), c.stream);
}

// The product x @ w of several rows, as in the gradient of x @ w.T. MLX's kernel for CPUs is many times slower than a
// product of floats.
std::optional<mx::array> untransposed_on_cpu(
    const fb::QuantizedMatmulParams& n, const mx::array& x, const Quantized& q, const Context& c) {
  if (n.transpose() || !q.biases || q.w.ndim() != 2 || n.mode()->string_view() != "affine" || rows_of(x) < 2) {
    return std::nullopt;
  }
  const auto numbers = cpu::dequantize({q.w, q.scales, *q.biases}, n.group_size(), n.bits(), c.stream);
  return numbers ? std::optional(mx::matmul(to_float32(x, c), *numbers, c.stream)) : std::nullopt;
}

void quantized_matmul(const fb::QuantizedMatmulParams& n, Context& c) {
  c.make_available({n.x()});
  auto x = c.in(n.x());
  if (auto y = c.take_early()) {
    c.expect_product(y->shape(), y->dtype(), x.shape(-1));
    return c.set(n.out(), std::move(*y));
  }
  auto q = read_weights(n, c);
  check_min_rank(x, "x", 1);
  const auto dtype = x.dtype();
  c.expect_product(product_shape(x, batch_shape(q.w), result_columns(n, q.w, c)), dtype, x.shape(-1));
  // MLX's CUDA backend does not support a vector x, so x becomes a matrix of one row.
  const bool is_vector = x.ndim() == 1;
  if (is_vector) {
    x = mx::expand_dims(x, 0, c.stream);
  }
  const auto set = [&](const mx::array& y) {
    c.set(n.out(), mx::astype(is_vector ? mx::squeeze(y, 0, c.stream) : y, dtype, c.stream));
  };
  if (n.transpose() && q.biases && n.mode()->string_view() == "affine") {
    const cpu::PackedMatrix matrix{q.w, q.scales, *q.biases, c.packed_weights()};
    if (const auto y = cpu::quantized_matmul(x, matrix, n.group_size(), n.bits(), c.stream)) {
      return set(*y);
    }
  }
  if (const auto y = untransposed_on_cpu(n, x, q, c)) {
    return set(*y);
  }
  if (const auto y = dequantized_matmul(n, x, q, c)) {
    return set(*y);
  }
  if (computes_in_float32(x, c)) {
    x = to_float32(x, c);
  }
  if (dtype != x.dtype()) {
    q = to_float32(std::move(q), c);
  }
  set(mx::quantized_matmul(
      x, q.w, q.scales, q.biases, n.transpose(), n.group_size(), n.bits(), n.mode()->str(), c.stream));
}

// Rounds each group of `size` values of x [..., K] to integers in [-127, 127] with a scale of its own. Returns the
// products of the integers and the scale, in float32.
mx::array rounded_to_int8(const mx::array& x, int size, const Context& c) {
  auto shape = x.shape();
  shape.back() /= size;
  shape.push_back(size);
  const auto groups = mx::reshape(to_float32(x, c), shape, c.stream);
  const auto largest = mx::max(mx::abs(groups, c.stream), -1, /*keepdims=*/true, c.stream);
  const auto zero = mx::array(0.0f);
  const auto is_zero = mx::less(largest, mx::array(kSmallestGroupMaximum), c.stream);
  const auto inverse = mx::where(is_zero, zero, mx::divide(mx::array(127.0f), largest, c.stream), c.stream);
  const auto integers = mx::round(mx::multiply(groups, inverse, c.stream), c.stream);
  const auto scale = mx::where(is_zero, zero, mx::divide(largest, mx::array(127.0f), c.stream), c.stream);
  return mx::reshape(mx::multiply(integers, scale, c.stream), x.shape(), c.stream);
}

void int8_quantized_matmul(const fb::Int8QuantizedMatmulParams& n, Context& c) {
  c.make_available({n.x()});
  const auto& x = c.in(n.x());
  if (auto y = c.take_early()) {
    c.expect_product(y->shape(), y->dtype(), x.shape(-1));
    return c.set(n.out(), std::move(*y));
  }
  const auto q = read_weights(n, c);
  check_min_rank(x, "x", 1);
  const int64_t columns = unpacked_columns(q.w, n.bits());
  check_argument(is_float(x.dtype()) && q.w.ndim() == 2 && x.shape(-1) == columns, "x: got ", describe(x),
      ", expected float32, float16 or bfloat16 of shape [..., ", columns, "] for w ", describe(q.w));
  c.expect_product(product_shape(x, {}, q.w.shape(0)), x.dtype(), columns);
  const cpu::PackedMatrix matrix{q.w, q.scales, *q.biases, c.packed_weights()};
  if (const auto y = cpu::int8_quantized_matmul(x, matrix, n.group_size(), n.bits(), c.stream)) {
    return c.set(n.out(), *y);
  }
  c.count_operations(x.size(), 4); // about what rounding a value takes
  // MLX's CUDA backend does not support a vector x, so x becomes a matrix of one row.
  auto rounded = rounded_to_int8(x, n.group_size(), c);
  if (x.ndim() == 1) {
    rounded = mx::expand_dims(rounded, 0, c.stream);
  }
  const auto w = to_float32(q, c);
  const auto y = mx::quantized_matmul(
      rounded, w.w, w.scales, w.biases, /*transpose=*/true, n.group_size(), n.bits(), "affine", c.stream);
  c.set(n.out(), mx::astype(x.ndim() == 1 ? mx::squeeze(y, 0, c.stream) : y, x.dtype(), c.stream));
}

void gather_qmm(const fb::GatherQmmParams& n, Context& c) {
  c.make_available({n.x(), n.lhs_indices(), n.rhs_indices()});
  auto x = c.in(n.x());
  auto q = read_weights(n, c);
  check_min_rank(x, "x", 2);
  const auto dtype = x.dtype();
  if (computes_in_float32(x, c)) {
    x = to_float32(x, c);
  }
  const auto lhs = batch_indices(n.lhs_indices(), x, c);
  const auto rhs = batch_indices(n.rhs_indices(), q.w, c);
  c.expect_product(gathered_shape(x, q.w, lhs, rhs, result_columns(n, q.w, c)), dtype, x.shape(-1));
  if (n.transpose() && q.biases && n.mode()->string_view() == "affine") {
    if (const auto y =
            cpu::gather_quantized_matmul(x, q.w, q.scales, *q.biases, lhs, rhs, n.group_size(), n.bits(), c.stream)) {
      return c.set(n.out(), mx::astype(*y, dtype, c.stream));
    }
  }
  if (dtype != x.dtype()) {
    q = to_float32(std::move(q), c);
  }
  const auto y =
      mx::gather_qmm(x, q.w, q.scales, q.biases, lhs, rhs, n.transpose(), n.group_size(), n.bits(), n.mode()->str(),
          /*global_scale=*/std::nullopt, sorted_indices(n, c), c.stream);
  c.set(n.out(), mx::astype(y, dtype, c.stream));
}

} // namespace

MLX_OP(DequantizeNode, dequantize)
MLX_OP(GatherQmmNode, gather_qmm)
MLX_OP(Int8QuantizedMatmulNode, int8_quantized_matmul)
MLX_OP(QuantizedMatmulNode, quantized_matmul)

} // namespace executorch_mlx
