// Matrix products with weights in float32, in half precision, and quantized.
#include <algorithm>
#include <limits>

#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/matmul.h"
#include "memory/kernel_result.h"

namespace executorch_mlx::cpu {

namespace {

// The kernel for half precision converts columns of b to float32. A column has as many elements as b has rows. This
// limit on the number of rows bounds the memory of the converted columns.
constexpr int kMaxDepth = 1 << 20;

// Whether the rows of the matrix b have no gaps.
bool is_in_rows(const mx::array& b) { return (b.strides(1) == 1 || b.shape(1) == 1) && b.strides(0) >= b.shape(1); }

} // namespace

std::optional<mx::array> matmul(const mx::array& x, const mx::array& b, const std::optional<mx::array>& c, float alpha,
    float beta, mx::Stream stream) {
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
  const kernel::Matmul product{.x = dense_x.data<float>(),
      .b = b.data<float>(),
      .b_row_stride = in_rows ? b.strides(0) : 1,
      .b_column_stride = in_rows ? 1 : b.strides(1),
      .c = addend ? addend->data<float>() : nullptr,
      .c_stride = addend && addend->size() == y.size() ? *row_stride(*addend) : 0,
      .m = static_cast<int>(y.size() / n),
      .n = n,
      .k = k,
      .alpha = alpha,
      .beta = beta,
      .y = y.data<float>(),
      .panels = nullptr,
      .epilogue = nullptr};
  kernel::matmul(product);
  return y;
}

std::optional<mx::array> matmul_half(const mx::array& x, const mx::array& b, mx::Dtype dtype, mx::Stream stream) {
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
    const kernel::HalfMatmul matmul{.x = x.data<void>(),
        .w = b.data<uint16_t>(), // w is b transposed
        .type = *type,
        .row_stride = b.strides(1),
        .column_stride = b.strides(0),
        .m = static_cast<int>(x.size() / k),
        .n = b.shape(1),
        .k = k,
        .y = out.data<void>(),
        .x_type = *float_type(x.dtype()),
        .y_type = *float_type(out.dtype()),
        .panels = nullptr};
    return [matmul] { kernel::half_matmul(&matmul, 1); };
  };
  return kernel_result("MatmulHalf", std::move(shape), dtype, {contiguous(x, stream), b}, stream, make_task);
}

namespace {

// A kind of product with matrices in MLX's affine packing.
struct PackedProduct {
  const char* name;
  bool (*supports)(int bits, int group_size, int k);
  void (*multiply)(const kernel::QuantizedMatmul* products, int count);
};

constexpr PackedProduct kQuantizedMatmul{"QuantizedMatmul", kernel::supports_quantized, kernel::quantized_matmul};
constexpr PackedProduct kInt8QuantizedMatmul{"Int8QuantizedMatmul", kernel::supports_int8, kernel::int8_matmul};
constexpr PackedProduct kIntegerMatmul{"IntegerMatmul", kernel::has_fast_integers, kernel::integer_matmul};

// The kind of product with float activations.
const PackedProduct& float_product(int bits, int group_size, int k) {
  return kIntegerMatmul.supports(bits, group_size, k) ? kIntegerMatmul : kQuantizedMatmul;
}

// Whether the kernels support products of m with vectors of k elements.
bool is_supported(const PackedProduct& kind, const PackedMatrix& m, int group_size, int bits, int k) {
  return kind.supports(bits, group_size, k) && m.w.ndim() == 2 && m.w.size() > 0 && float_type(m.scales.dtype()) &&
      m.scales.dtype() == m.biases.dtype() && int64_t{m.w.shape(1)} * 32 == int64_t{k} * bits;
}

bool is_supported(
    const PackedProduct& kind, const mx::array& x, const PackedMatrix& m, int group_size, int bits, mx::Stream stream) {
  return is_supported_operand(x, stream) && is_supported(kind, m, group_size, bits, x.shape(-1));
}

// The arguments of a kernel that describe the matrix. All arrays have memory and are contiguous.
kernel::QuantizedMatmul matrix_arguments(const PackedMatrix& m, int group_size, int bits) {
  return {.w = m.w.data<uint32_t>(),
      .scales = m.scales.data<void>(),
      .biases = m.biases.data<void>(),
      .scale_type = *float_type(m.scales.dtype()),
      .bits = bits,
      .group_size = group_size,
      .n = m.w.shape(0),
      .k = static_cast<int>(int64_t{m.w.shape(1)} * 32 / bits),
      .integer_panels = m.integer_panels ? m.integer_panels->data<void>() : nullptr};
}

// The arguments of a kernel. All arrays have memory, and all but y are contiguous.
kernel::QuantizedMatmul kernel_arguments(
    const mx::array& x, const PackedMatrix& m, int group_size, int bits, mx::array& y) {
  auto product = matrix_arguments(m, group_size, bits);
  product.x = x.data<void>();
  product.m = static_cast<int>(x.size() / product.k);
  product.y = y.data<void>();
  product.type = *float_type(x.dtype());
  return product;
}

mx::Shape result_shape(const mx::array& x, int columns) {
  auto shape = x.shape();
  shape.back() = columns;
  return shape;
}

PackedMatrix in_contiguous_memory(const PackedMatrix& m, mx::Stream stream) {
  return {contiguous(m.w, stream), contiguous(m.scales, stream), contiguous(m.biases, stream), m.integer_panels};
}

std::optional<mx::array> packed_matmul(const PackedProduct& kind, const mx::array& x, const PackedMatrix& matrix,
    int group_size, int bits, mx::Stream stream) {
  if (!is_supported(kind, x, matrix, group_size, bits, stream)) {
    return std::nullopt;
  }
  const auto make_task = [=, multiply = kind.multiply](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    PackedMatrix matrix{inputs[1], inputs[2], inputs[3]};
    if (inputs.size() > 4) {
      matrix.integer_panels = inputs[4];
    }
    const auto product = kernel_arguments(inputs[0], matrix, group_size, bits, out);
    return [product, multiply] { multiply(&product, 1); };
  };
  const auto [w, scales, biases, integer_panels] = in_contiguous_memory(matrix, stream);
  std::vector<mx::array> inputs{contiguous(x, stream), w, scales, biases};
  if (integer_panels) {
    inputs.push_back(*integer_panels);
  }
  return kernel_result(kind.name, result_shape(x, w.shape(0)), x.dtype(), std::move(inputs), stream, make_task);
}

std::optional<std::vector<mx::array>> packed_matmuls(const PackedProduct& kind, const mx::array& x,
    const std::vector<PackedMatrix>& matrices, int group_size, int bits, mx::Stream stream) {
  for (const auto& m : matrices) {
    if (!is_supported(kind, x, m, group_size, bits, stream) || !are_available({x, m.w, m.scales, m.biases})) {
      return std::nullopt;
    }
  }
  const auto dense_x = contiguous(x, stream);
  std::vector<PackedMatrix> dense; // holds the memory of copies
  std::vector<mx::array> results;
  std::vector<kernel::QuantizedMatmul> products;
  for (const auto& m : matrices) {
    dense.push_back(in_contiguous_memory(m, stream));
    results.push_back(allocate_result(result_shape(x, m.w.shape(0)), x.dtype()));
    products.push_back(kernel_arguments(dense_x, dense.back(), group_size, bits, results.back()));
  }
  kind.multiply(products.data(), static_cast<int>(products.size()));
  return results;
}

const float* data_of(const std::optional<mx::array>& panels) { return panels ? panels->data<float>() : nullptr; }

// Whether the rows of w [n, k] follow each other without gaps, and x [..., k] can be multiplied by w.T.
bool has_matching_rows(const mx::array& w, const mx::array& x) {
  return w.ndim() == 2 && w.size() > 0 && w.flags().row_contiguous && w.shape(1) == x.shape(-1);
}

} // namespace

std::optional<mx::array> quantized_matmul(
    const mx::array& x, const PackedMatrix& matrix, int group_size, int bits, mx::Stream stream) {
  if (x.ndim() == 0) {
    return std::nullopt;
  }
  return packed_matmul(float_product(bits, group_size, x.shape(-1)), x, matrix, group_size, bits, stream);
}

std::optional<mx::array> int8_quantized_matmul(
    const mx::array& x, const PackedMatrix& matrix, int group_size, int bits, mx::Stream stream) {
  return packed_matmul(kInt8QuantizedMatmul, x, matrix, group_size, bits, stream);
}

std::optional<mx::array> dequantize(const PackedMatrix& matrix, int group_size, int bits, mx::Stream stream) {
  const int64_t k = matrix.w.ndim() == 2 ? int64_t{matrix.w.shape(1)} * 32 / bits : 0;
  if (!computes_at_once(stream) || k > std::numeric_limits<int>::max() ||
      !is_supported(kQuantizedMatmul, matrix, group_size, bits, static_cast<int>(k)) ||
      !are_available({matrix.w, matrix.scales, matrix.biases})) {
    return std::nullopt;
  }
  auto out = allocate_result({matrix.w.shape(0), static_cast<int>(k)}, mx::float32);
  const auto dense = in_contiguous_memory(matrix, stream);
  auto arguments = matrix_arguments(dense, group_size, bits);
  arguments.y = out.data<void>();
  kernel::dequantize(arguments);
  return out;
}

bool has_fast_integers(int bits, int group_size, int k) { return kernel::has_fast_integers(bits, group_size, k); }

std::optional<Panels> integer_panels(const PackedMatrix& matrix, int group_size, int bits, mx::Stream stream) {
  const int64_t k = int64_t{matrix.w.shape(-1)} * 32 / bits;
  const bool fits = computes_at_once(stream) && k <= std::numeric_limits<int>::max() &&
      is_supported(kInt8QuantizedMatmul, matrix, group_size, bits, static_cast<int>(k)) &&
      are_available({matrix.w, matrix.scales, matrix.biases});
  if (!fits) {
    return std::nullopt;
  }
  const auto arguments = matrix_arguments(matrix, group_size, bits);
  return Panels{kernel::integer_panels_size(arguments), [=](mx::array& panels) {
                  const auto arguments = matrix_arguments(matrix, group_size, bits);
                  kernel::pack_integer_panels(arguments, panels.data<void>());
                }};
}

std::optional<std::vector<mx::array>> quantized_matmuls(
    const mx::array& x, const std::vector<PackedMatrix>& matrices, int group_size, int bits, mx::Stream stream) {
  return packed_matmuls(float_product(bits, group_size, x.shape(-1)), x, matrices, group_size, bits, stream);
}

std::optional<std::vector<mx::array>> int8_quantized_matmuls(
    const mx::array& x, const std::vector<PackedMatrix>& matrices, int group_size, int bits, mx::Stream stream) {
  return packed_matmuls(kInt8QuantizedMatmul, x, matrices, group_size, bits, stream);
}

namespace {

// Whether the kernel multiplies x by the matrix.
bool is_supported(const RowMatrix& matrix, const mx::array& x) {
  const auto& [w, bias, panels, activation, residual] = matrix;
  return w.dtype() == mx::float32 && has_matching_rows(w, x) &&
      (!bias || (bias->dtype() == mx::float32 && bias->shape() == mx::Shape{w.shape(0)})) &&
      (!residual || (residual->dtype() == mx::float32 && residual->shape() == result_shape(x, w.shape(0)))) &&
      are_available({w, bias.value_or(w), residual.value_or(w)});
}

} // namespace

std::optional<std::vector<mx::array>> matmuls(
    const mx::array& x, const std::vector<RowMatrix>& matrices, mx::Stream stream) {
  const bool fits = is_supported_operand(x, stream) && x.dtype() == mx::float32 && x.is_available() &&
      std::all_of(matrices.begin(), matrices.end(), [&](const auto& matrix) { return is_supported(matrix, x); });
  if (!fits) {
    return std::nullopt;
  }
  const auto dense_x = contiguous(x, stream);
  const int k = x.shape(-1);
  std::vector<mx::array> copies; // holds their memory
  const auto data = [&](const std::optional<mx::array>& operand) {
    return operand ? copies.emplace_back(contiguous(*operand, stream)).data<float>() : nullptr;
  };
  std::vector<mx::array> results;
  std::vector<kernel::Epilogue> epilogues;
  std::vector<kernel::Matmul> products;
  epilogues.reserve(matrices.size());
  for (const auto& [w, bias, panels, activation, residual] : matrices) {
    results.push_back(allocate_result(result_shape(x, w.shape(0)), mx::float32));
    epilogues.push_back({.activation = activation, .residual = data(residual)});
    products.push_back({.x = dense_x.data<float>(),
        .b = w.data<float>(),
        .b_row_stride = 1,
        .b_column_stride = k,
        .c = data(bias),
        .c_stride = 0,
        .m = static_cast<int>(x.size() / k),
        .n = w.shape(0),
        .k = k,
        .alpha = 1,
        .beta = 1,
        .y = results.back().data<float>(),
        .panels = data_of(panels),
        .epilogue = &epilogues.back()});
  }
  kernel::matmuls(products.data(), static_cast<int>(products.size()));
  return results;
}

std::optional<std::vector<mx::array>> matmuls_half(const mx::array& x, const std::vector<RowMatrix>& matrices,
    const std::vector<mx::Dtype>& dtypes, mx::Stream stream) {
  const auto dtype = matrices[0].w.dtype();
  const auto type = float_type(dtype);
  if (!is_supported_operand(x, stream) || !type || *type == FloatType::float32 || !x.is_available() ||
      x.shape(-1) > kMaxDepth) {
    return std::nullopt;
  }
  for (const auto& matrix : matrices) {
    const auto& w = matrix.w;
    if (w.dtype() != dtype || !w.is_available() || !has_matching_rows(w, x)) {
      return std::nullopt;
    }
  }
  const auto dense_x = contiguous(x, stream);
  const int k = x.shape(-1);
  std::vector<mx::array> results;
  std::vector<kernel::HalfMatmul> products;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const auto& w = matrices[i].w;
    results.push_back(allocate_result(result_shape(x, w.shape(0)), dtypes[i]));
    products.push_back({.x = dense_x.data<void>(),
        .w = w.data<uint16_t>(),
        .type = *type,
        .row_stride = k,
        .column_stride = 1,
        .m = static_cast<int>(x.size() / k),
        .n = w.shape(0),
        .k = k,
        .y = results.back().data<void>(),
        .x_type = *float_type(x.dtype()),
        .y_type = *float_type(dtypes[i]),
        .panels = data_of(matrices[i].panels)});
  }
  kernel::half_matmul(products.data(), static_cast<int>(products.size()));
  return results;
}

std::optional<Panels> panels(const mx::array& w, mx::Stream stream) {
  const auto type = float_type(w.dtype());
  if (!computes_at_once(stream) || !type || !w.is_available() || w.ndim() != 2 || w.size() == 0 ||
      !w.flags().row_contiguous) {
    return std::nullopt;
  }
  const size_t size = kernel::panels_size(*type, w.shape(0), w.shape(1));
  if (size == 0) {
    return std::nullopt;
  }
  return Panels{size, [w, type = *type](mx::array& panels) {
                  kernel::pack_panels(w.data<void>(), type, w.shape(0), w.shape(1), panels.data<float>());
                }};
}

} // namespace executorch_mlx::cpu
