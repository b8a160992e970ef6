// Matrix products with weights in float32, in half precision, and quantized.
#include "accelerate.h"
#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

namespace {

// With more rows, the kernel itself copies columns to contiguous memory.
constexpr int64_t kMaxPackedRows = 16;

// Whether the rows of the matrix b have no gaps.
bool is_in_rows(const mx::array& b) {
  return (b.strides(1) == 1 || b.shape(1) == 1) && b.strides(0) >= b.shape(1);
}

} // namespace

std::optional<mx::array> matmul(
    const mx::array& x, const mx::array& b, const std::optional<mx::array>& c, float alpha, float beta,
    mx::Stream stream, const mx::array* packed) {
  const bool fits = is_supported_operand(x, stream) && x.dtype() == mx::float32 && b.dtype() == mx::float32 &&
      b.ndim() == 2 && b.size() > 0 && b.shape(0) == x.shape(-1) && are_available({x, b});
  if (!fits) {
    return std::nullopt;
  }
  const int k = b.shape(0);
  const int n = b.shape(1);
  auto shape = x.shape();
  shape.back() = n;
  const auto is_row = [&] {
    return c->ndim() > 0 && c->ndim() <= shape.size() && c->size() == static_cast<size_t>(n) && c->shape(-1) == n;
  };
  if (c && (c->dtype() != mx::float32 || !c->is_available() || !(c->shape() == shape || is_row()))) {
    return std::nullopt;
  }
  const bool in_rows = is_in_rows(b);
  const bool in_columns = (b.strides(0) == 1 || k == 1) && b.strides(1) >= k;
  if (!in_rows && !in_columns) {
    return std::nullopt;
  }
  const auto dense_x = contiguous(x, stream);
  const auto addend = c && !row_stride(*c) ? contiguous(*c, stream) : c;
  auto y = allocate_result(shape, mx::float32);
  const ExecutorchMlxMatmul product{
      .x = dense_x.data<float>(),
      .b = b.data<float>(),
      .b_row_stride = in_rows ? b.strides(0) : 1,
      .b_column_stride = in_rows ? 1 : b.strides(1),
      .packed_b = packed != nullptr ? packed->data<float>() : nullptr,
      .c = addend ? addend->data<float>() : nullptr,
      .c_stride = addend && addend->size() == y.size() ? *row_stride(*addend) : 0,
      .m = static_cast<int>(y.size() / n),
      .n = n,
      .k = k,
      .alpha = alpha,
      .beta = beta,
      .y = y.data<float>()};
  executorch_mlx_matmul(&product);
  return y;
}

std::optional<mx::array> pack_matrix(const mx::array& b, int64_t rows, mx::Stream stream) {
  const bool fits = computes_at_once(stream) && b.dtype() == mx::float32 && b.ndim() == 2 && b.size() > 0 &&
      b.shape(1) > 1 && b.is_available() && is_in_rows(b) && rows > 0 && rows <= kMaxPackedRows;
  if (!fits) {
    return std::nullopt;
  }
  auto packed = allocate_result(b.shape(), mx::float32);
  executorch_mlx_pack_columns(
      b.data<float>(), b.strides(0), b.shape(0), b.shape(1), static_cast<int>(rows), packed.data<float>());
  return packed;
}

std::optional<mx::array> matmul_half(const mx::array& x, const mx::array& b, mx::Dtype dtype, mx::Stream stream) {
  // The kernel converts columns of b to float32. A column has as many elements as b has rows. This limit on the number
  // of rows bounds the memory of the converted columns.
  constexpr int kMaxDepth = 1 << 20;
  const auto type = float_type(b.dtype());
  const bool is_half = type && *type != FloatType::float32;
  if (!is_supported_operand(x, stream) || !is_half || b.ndim() != 2 || b.size() == 0 || b.shape(0) != x.shape(-1) ||
      b.shape(0) > kMaxDepth) {
    return std::nullopt;
  }
  auto shape = x.shape();
  shape.back() = b.shape(1);
  const auto make_task = [type](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto& x = inputs[0];
    const auto& b = inputs[1];
    const int k = b.shape(0);
    const ExecutorchMlxHalfMatmul matmul{
        .x = x.data<void>(),
        .w = b.data<uint16_t>(),  // w is b transposed
        .type = *type,
        .row_stride = b.strides(1),
        .column_stride = b.strides(0),
        .m = static_cast<int>(x.size() / k),
        .n = b.shape(1),
        .k = k,
        .y = out.data<void>(),
        .x_type = *float_type(x.dtype()),
        .y_type = *float_type(out.dtype())};
    return [matmul] { executorch_mlx_half_matmul(&matmul); };
  };
  return kernel_result("MatmulHalf", std::move(shape), dtype, {contiguous(x, stream), b}, stream, make_task);
}

namespace {

// A product with a matrix in MLX's affine packing, which `multiply` computes. nullopt if `supports` is false for the bits,
// the group size and K.
std::optional<mx::array> packed_matmul(
    const char* name,
    bool (*supports)(int, int, int),
    void (*multiply)(const ExecutorchMlxQuantizedMatmul*),
    const mx::array& x,
    const mx::array& w,
    const mx::array& scales,
    const mx::array& biases,
    int group_size,
    int bits,
    mx::Stream stream) {
  const auto scale_type = float_type(scales.dtype());
  if (!is_supported_operand(x, stream) || !supports(bits, group_size, x.shape(-1)) || w.ndim() != 2 ||
      w.size() == 0 || !scale_type || scales.dtype() != biases.dtype() || int64_t{w.shape(1)} * 32 != int64_t{x.shape(-1)} * bits) {
    return std::nullopt;
  }
  auto shape = x.shape();
  shape.back() = w.shape(0);
  const auto make_task = [=](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto& x = inputs[0];
    const int k = x.shape(-1);
    const ExecutorchMlxQuantizedMatmul matmul{
        .x = x.data<void>(),
        .w = inputs[1].data<uint32_t>(),
        .scales = inputs[2].data<void>(),
        .biases = inputs[3].data<void>(),
        .scale_type = *scale_type,
        .bits = bits,
        .group_size = group_size,
        .m = static_cast<int>(x.size() / k),
        .n = out.shape(-1),
        .k = k,
        .y = out.data<void>(),
        .type = *float_type(x.dtype())};
    return [matmul, multiply] { multiply(&matmul); };
  };
  std::vector<mx::array> inputs;
  for (const auto& input : {x, w, scales, biases}) {
    inputs.push_back(contiguous(input, stream));
  }
  return kernel_result(name, std::move(shape), x.dtype(), std::move(inputs), stream, make_task);
}

} // namespace

std::optional<mx::array> quantized_matmul(
    const mx::array& x,
    const mx::array& w,
    const mx::array& scales,
    const mx::array& biases,
    int group_size,
    int bits,
    mx::Stream stream) {
  return packed_matmul(
      "QuantizedMatmul", executorch_mlx_supports_quantized, executorch_mlx_quantized_matmul, x, w, scales, biases,
      group_size, bits, stream);
}

std::optional<mx::array> int8_quantized_matmul(
    const mx::array& x,
    const mx::array& w,
    const mx::array& scales,
    const mx::array& biases,
    int group_size,
    int bits,
    mx::Stream stream) {
  return packed_matmul(
      "Int8QuantizedMatmul", executorch_mlx_supports_int8, executorch_mlx_int8_matmul, x, w, scales, biases, group_size,
      bits, stream);
}

} // namespace executorch_mlx::cpu
