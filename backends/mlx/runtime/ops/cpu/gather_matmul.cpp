// Products with matrices that indices select, such as the experts of a mixture-of-experts layer.
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <type_traits>
#include <vector>

#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/cblas.h"
#include "kernels/cpu/matmul.h"
#include "memory/kernel_result.h"

namespace executorch_mlx::cpu {

namespace {

// Computes y [m, n] = x [m, k] @ w [k, n], where w is the matrix with the index `matrix`.
using MultiplyOne = std::function<void(uint32_t matrix, const float* x, int m, float* y)>;

// `count` products y[i] [m, n] = x[lhs[i]] [m, k] @ w [k, n], where w is the matrix with the index rhs[i].
struct Products {
  const float* x;
  const uint32_t* lhs;
  const uint32_t* rhs;
  float* y;
  int count;
  int m;
  int k;
  int n;
};

// Calls `multiply_one` once for each matrix in use, with all x[lhs[i]] that are multiplied by this matrix.
void multiply_all(const Products& p, const MultiplyOne& multiply_one) {
  std::vector<int> by_matrix(p.count);
  std::iota(by_matrix.begin(), by_matrix.end(), 0);
  std::stable_sort(by_matrix.begin(), by_matrix.end(), [&](int i, int j) { return p.rhs[i] < p.rhs[j]; });
  const size_t x_size = size_t(p.m) * p.k, y_size = size_t(p.m) * p.n;
  std::vector<float> xs, ys;
  for (int first = 0, last = 0; first < p.count; first = last) {
    const uint32_t matrix = p.rhs[by_matrix[first]];
    while (last < p.count && p.rhs[by_matrix[last]] == matrix) {
      ++last;
    }
    const int count = last - first;
    if (count == 1) {
      const int i = by_matrix[first];
      multiply_one(matrix, p.x + p.lhs[i] * x_size, p.m, p.y + i * y_size);
      continue;
    }
    xs.resize(count * x_size);
    ys.resize(count * y_size);
    for (int i = 0; i < count; ++i) {
      std::memcpy(&xs[i * x_size], p.x + p.lhs[by_matrix[first + i]] * x_size, x_size * sizeof(float));
    }
    multiply_one(matrix, xs.data(), count * p.m, ys.data());
    for (int i = 0; i < count; ++i) {
      std::memcpy(p.y + by_matrix[first + i] * y_size, &ys[i * y_size], y_size * sizeof(float));
    }
  }
}

// Returns a function that multiplies by one of `matrices` [e, k, n], which have elements of type T and any strides.
// BLAS needs contiguous float32 matrices, row-major or column-major. All other matrices are first copied to one of
// these two orders, whichever is closer to their own.
template <typename T>
MultiplyOne dense_multiplier(const mx::array& matrices, int k, int n) {
  const T* data = matrices.data<T>();
  const int64_t matrix_stride = matrices.strides(0), row_stride = matrices.strides(1),
                column_stride = matrices.strides(2);
  const bool column_major = row_stride < column_stride;
  const int64_t outer_stride = std::max(row_stride, column_stride), inner_stride = std::min(row_stride, column_stride);
  const int outer = column_major ? n : k, inner = column_major ? k : n;
  const bool suits_blas = std::is_same_v<T, float> && inner_stride == 1 && outer_stride == inner;
  return [=, copy = std::vector<float>()](uint32_t matrix, const float* x, int m, float* y) mutable {
    const T* source = data + matrix * matrix_stride;
    const float* w = reinterpret_cast<const float*>(source);
    if (!suits_blas) {
      copy.resize(size_t(k) * n);
      for (int i = 0; i < outer; ++i) {
        for (int j = 0; j < inner; ++j) {
          copy[size_t(i) * inner + j] = static_cast<float>(source[i * outer_stride + j * inner_stride]);
        }
      }
      w = copy.data();
    }
    cblas_sgemm(kRowMajor, kNoTranspose, column_major ? kTranspose : kNoTranspose, m, n, k, 1, x, k, w, inner, 0, y, n);
  };
}

MultiplyOne dense_multiplier(const mx::array& matrices, int k, int n) {
  switch (matrices.dtype()) {
    case mx::float16:
      return dense_multiplier<mx::float16_t>(matrices, k, n);
    case mx::bfloat16:
      return dense_multiplier<mx::bfloat16_t>(matrices, k, n);
    default:
      return dense_multiplier<float>(matrices, k, n);
  }
}

// Returns a function that multiplies by the transpose of one of the matrices w [e, n, k] in MLX's affine packing. w,
// scales and biases must be contiguous.
MultiplyOne quantized_multiplier(
    const mx::array& w, const mx::array& scales, const mx::array& biases, int k, int n, int group_size, int bits) {
  const kernel::QuantizedMatmul first{.w = w.data<uint32_t>(),
      .scales = scales.data<void>(),
      .biases = biases.data<void>(),
      .scale_type = float_type(scales.dtype()).value(),
      .bits = bits,
      .group_size = group_size,
      .n = n,
      .k = k};
  const size_t matrix_words = size_t(n) * (size_t(k) * bits / 32);
  const size_t scale_bytes = size_t(n) * (k / group_size) * scales.itemsize();
  return [=](uint32_t matrix, const float* x, int m, float* y) {
    auto matmul = first;
    matmul.x = x;
    matmul.w += matrix * matrix_words;
    matmul.scales = static_cast<const char*>(first.scales) + matrix * scale_bytes;
    matmul.biases = static_cast<const char*>(first.biases) + matrix * scale_bytes;
    matmul.m = m;
    matmul.y = y;
    kernel::quantized_matmul(&matmul, 1);
  };
}

// Returns the products of x with matrices of n columns. `matrices` contains either one dense array [e, k, n], or the
// packed weights, the scales and the biases.
mx::array gather(const mx::array& x, const std::vector<mx::array>& matrices, int n, const std::optional<mx::array>& lhs,
    const mx::array& rhs, int group_size, int bits, mx::Stream stream) {
  const auto all_indices = [&] { // 0, 1, 2, ... for the matrices of x, used if there is no lhs
    std::vector<uint32_t> indices(x.size() / (int64_t{x.shape(-1)} * x.shape(-2)));
    std::iota(indices.begin(), indices.end(), 0u);
    return mx::array(indices.begin(), mx::Shape(x.shape().begin(), x.shape().end() - 2));
  };
  std::vector<mx::array> indices = {lhs ? *lhs : all_indices(), rhs};
  if (indices[0].shape() != indices[1].shape()) {
    indices = mx::broadcast_arrays(indices, stream);
  }
  auto shape = indices[0].shape();
  shape.push_back(x.shape(-2));
  shape.push_back(n);
  std::vector<mx::array> inputs;
  for (const auto& input : {x, indices[0], indices[1]}) {
    inputs.push_back(contiguous(input, stream));
  }
  inputs.insert(inputs.end(), matrices.begin(), matrices.end());
  const auto make_task = [=](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto& x = inputs[0];
    const int k = x.shape(-1);
    const Products products{.x = x.data<float>(),
        .lhs = inputs[1].data<uint32_t>(),
        .rhs = inputs[2].data<uint32_t>(),
        .y = out.data<float>(),
        .count = static_cast<int>(inputs[2].size()),
        .m = x.shape(-2),
        .k = k,
        .n = n};
    auto multiply_one = inputs.size() == 4
        ? dense_multiplier(inputs[3], k, n)
        : quantized_multiplier(inputs[3], inputs[4], inputs[5], k, n, group_size, bits);
    return [products, multiply_one = std::move(multiply_one)] { multiply_all(products, multiply_one); };
  };
  return kernel_result("GatherMatmul", std::move(shape), mx::float32, std::move(inputs), stream, make_task);
}

bool is_supported_gather(
    const mx::array& x, const mx::array& matrices, const std::optional<mx::array>& rhs, mx::Stream stream) {
  return is_supported_operand(x, stream) && x.dtype() == mx::float32 && matrices.ndim() == 3 && matrices.size() > 0 &&
      rhs && rhs->size() > 0;
}

} // namespace

std::optional<mx::array> gather_matmul(const mx::array& x, const mx::array& b, const std::optional<mx::array>& lhs,
    const std::optional<mx::array>& rhs, mx::Stream stream) {
  if (!is_supported_gather(x, b, rhs, stream) || !float_type(b.dtype()) || b.shape(1) != x.shape(-1)) {
    return std::nullopt;
  }
  return gather(x, {b}, b.shape(2), lhs, *rhs, /*group_size=*/0, /*bits=*/0, stream);
}

std::optional<mx::array> gather_quantized_matmul(const mx::array& x, const mx::array& w, const mx::array& scales,
    const mx::array& biases, const std::optional<mx::array>& lhs, const std::optional<mx::array>& rhs, int group_size,
    int bits, mx::Stream stream) {
  const int k = x.shape(-1);
  if (!is_supported_gather(x, w, rhs, stream) || int64_t{w.shape(2)} * 32 != int64_t{k} * bits ||
      scales.dtype() != biases.dtype() || !float_type(scales.dtype()) ||
      !kernel::supports_quantized(bits, group_size, k)) {
    return std::nullopt;
  }
  const std::vector<mx::array> packed{contiguous(w, stream), contiguous(scales, stream), contiguous(biases, stream)};
  return gather(x, packed, w.shape(1), lhs, *rhs, group_size, bits, stream);
}

} // namespace executorch_mlx::cpu
