#include "metal_products.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "../error.h"
#include "decode_kernels_text.h"
#include "lazy.h"
#include "metal_kernel.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

constexpr int kThreadsOfProduct = 128;
constexpr int kRowsOfWarp = 4; // they share the loads of the vector
constexpr int kRowsOfGroup = kThreadsOfProduct / kWarp * kRowsOfWarp;
constexpr size_t kMaxVectorBytes = 24 << 10; // of the 32 KiB that a threadgroup shares
constexpr size_t kMinSize = 8; // of arrays in the address space `device`
constexpr int kStep = 8; // elements that a thread multiplies at a time

// Computes the products of the vector with the rows of the warp, for each matrix.
constexpr char kBody[] = R"(
  using namespace executorch_mlx_decode;
  GPU_GROUP_MEMORY T vector[kDepth];
  GPU_GROUP_MEMORY float sums[kThreads / kWarp];
  read_vector(x, norm, kNorm, gpu_float(kEps), kDepth, vector, sums, own_thread, kThreads);
  const uint32_t lane = own_thread % kWarp;
  const uint32_t first = (group * (kThreads / kWarp) + own_thread / kWarp) * kRowsOfWarp;
  const uint32_t rows = kRows;
)";

// Writes the result of each row.
constexpr char kProduct[] = R"(
  for (uint32_t r = 0; lane == 0 && r < kRowsOfWarp && first + r < rows; ++r) {
    y[first + r] = static_cast<T>(products0[r]);
  }
)";
constexpr char kSum[] = R"(
  for (uint32_t r = 0; lane == 0 && r < kRowsOfWarp && first + r < rows; ++r) {
    y[first + r] = static_cast<T>(products0[r] + static_cast<float>(added[first + r]));
  }
)";
constexpr char kGated[] = R"(
  for (uint32_t r = 0; lane == 0 && r < kRowsOfWarp && first + r < rows; ++r) {
    const float gate = products0[r];
    const float silu = static_cast<float>(static_cast<T>(gate / (1.0f + gpu_exp(-gate))));
    y[first + r] = static_cast<T>(silu * products1[r]);
  }
)";

// The kernel of an operation with `matrices` matrices, which are quantized or not.
MetalKernel make_kernel(const char* operation, int matrices, bool is_quantized, bool has_sum, const char* finish) {
  std::vector<std::string> inputs{"x", "norm"};
  std::string body = kBody;
  for (int m = 0; m < matrices; ++m) {
    inputs.push_back(str("w", m));
    if (is_quantized) {
      inputs.insert(inputs.end(), {str("scales", m), str("biases", m)});
    }
    const std::string operands =
        is_quantized ? str("w", m, ", scales", m, ", biases", m, ", kDepth, kGroupSize") : str("w", m, ", kDepth");
    body += str("  const ", is_quantized ? "QuantizedRows<T, kBits>" : "FloatRows<T>", " matrix", m, " = {", operands,
        "};\n  float products", m, "[kRowsOfWarp];\n  multiply_rows<kRowsOfWarp, T>(matrix", m,
        ", first, rows, vector, lane, products", m, ");\n");
  }
  if (has_sum) {
    inputs.push_back("added");
  }
  return {str(is_quantized ? "quantized_" : "", operation), inputs, {"y"}, body + finish, kDecodeKernelsText};
}

// The kernels of an operation: for matrices of floats, and for quantized ones.
struct Kernels {
  Kernels(const char* operation, int matrices, bool has_sum, const char* finish)
      : floats(make_kernel(operation, matrices, false, has_sum, finish)),
        quantized(make_kernel(operation, matrices, true, has_sum, finish)) {}

  MetalKernel floats, quantized;
};

mx::array run(const Kernels& kernels, const Vectors& vectors, const std::vector<Matrix>& matrices,
    const std::optional<mx::array>& added, const mx::Shape& shape, mx::Stream stream) {
  const auto& first = matrices[0];
  const int rows = first.w.shape(0), depth = vectors.x.shape(-1);
  std::vector<mx::array> inputs{vectors.x, vectors.norm.value_or(vectors.x)};
  for (const auto& matrix : matrices) {
    inputs.push_back(matrix.w);
    if (matrix.scales) {
      inputs.insert(inputs.end(), {*matrix.scales, *matrix.biases});
    }
  }
  if (added) {
    inputs.push_back(*added);
  }
  Constants constants{{"kThreads", kThreadsOfProduct}, {"kRowsOfWarp", kRowsOfWarp}, {"kRows", rows}, {"kDepth", depth},
      {"kNorm", vectors.norm.has_value()}, {"kEps", std::bit_cast<int>(vectors.eps)}};
  if (first.scales) {
    constants.insert(constants.end(), {{"kBits", first.bits}, {"kGroupSize", first.group_size}});
  }
  return (first.scales ? kernels.quantized : kernels.floats)(
      inputs, {shape}, {vectors.x.dtype()}, blocks_of(rows, kRowsOfGroup), kThreadsOfProduct, constants, stream)[0];
}

// Whether the kernels take the matrix with the vector x.
bool is_valid(const Matrix& matrix, const mx::array& x) {
  const auto is_ready = [](const mx::array& array, mx::Dtype dtype) {
    return array.dtype() == dtype && array.ndim() == 2 && array.size() >= kMinSize && array.is_available() &&
        array.flags().row_contiguous;
  };
  if (!matrix.scales) {
    return is_ready(matrix.w, x.dtype()) && matrix.w.shape(1) == x.shape(-1);
  }
  const auto& [w, scales, biases, group_size, bits] = matrix;
  return (bits == 4 || bits == 8) && group_size % kStep == 0 && is_ready(w, mx::uint32) &&
      is_ready(*scales, x.dtype()) && is_ready(*biases, x.dtype()) && w.shape(1) * 32 / bits == x.shape(-1) &&
      scales->shape() == mx::Shape{w.shape(0), x.shape(-1) / group_size} && biases->shape() == scales->shape();
}

} // namespace

bool can_multiply_on_metal(const Vectors& vectors, const std::vector<Matrix>& matrices, mx::Stream stream) {
  const auto& [x, norm, eps] = vectors;
  const bool is_vector = x.ndim() > 0 && is_float(x.dtype()) && x.size() == static_cast<size_t>(x.shape(-1)) &&
      x.size() > 0 && x.size() % kStep == 0 && x.nbytes() <= kMaxVectorBytes;
  const bool has_norm = !norm || (norm->dtype() == x.dtype() && norm->shape() == mx::Shape{x.shape(-1)});
  return is_vector && has_norm && std::all_of(matrices.begin(), matrices.end(), [&](const Matrix& matrix) {
    const auto kernel = matrix.scales ? Kernel::quantized_products : Kernel::products;
    const bool has_same_format = matrix.bits == matrices[0].bits && matrix.group_size == matrices[0].group_size;
    return is_used(kernel, stream) && has_same_format && is_valid(matrix, x);
  });
}

mx::array product_on_metal(const Vectors& vectors, const Matrix& w, const mx::Shape& shape, mx::Stream stream) {
  static const Kernels kernels("product", 1, /*has_sum=*/false, kProduct);
  return run(kernels, vectors, {w}, std::nullopt, shape, stream);
}

mx::array gated_products_on_metal(
    const Vectors& vectors, const Matrix& gate, const Matrix& up, const mx::Shape& shape, mx::Stream stream) {
  static const Kernels kernels("gated_products", 2, /*has_sum=*/false, kGated);
  return run(kernels, vectors, {gate, up}, std::nullopt, shape, stream);
}

mx::array product_and_sum_on_metal(
    const Vectors& vectors, const Matrix& w, const mx::array& added, const mx::Shape& shape, mx::Stream stream) {
  static const Kernels kernels("product_and_sum", 1, /*has_sum=*/true, kSum);
  return run(kernels, vectors, {w}, added, shape, stream);
}

} // namespace executorch_mlx::gpu
