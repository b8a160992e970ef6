#include "gathered_product.h"

#if EXECUTORCH_MLX_BLAS

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "blas.h"
#include "contiguous.h"

namespace executorch_mlx {

namespace {

// y [m, n] = x [m, k] times a matrix [k, n].
using Product = std::function<void(uint32_t matrix, const float* x, int m, float* y)>;

// `count` products; x and y have `m` rows each, of `k` and `n` numbers.
struct Batch {
  const float* x;
  const uint32_t* lhs;
  const uint32_t* rhs;
  float* y;
  int count;
  int m;
  int k;
  int n;
};

void multiply(const Batch& b, const Product& product) {
  std::vector<int> order(b.count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return b.rhs[i] < b.rhs[j]; });
  const size_t x_size = size_t(b.m) * b.k, y_size = size_t(b.m) * b.n;
  std::vector<float> xs, ys;
  for (int first = 0, last = 0; first < b.count; first = last) {
    const uint32_t matrix = b.rhs[order[first]];
    while (last < b.count && b.rhs[order[last]] == matrix) {
      ++last;
    }
    const int together = last - first;
    if (together == 1) {
      const int i = order[first];
      product(matrix, b.x + b.lhs[i] * x_size, b.m, b.y + i * y_size);
      continue;
    }
    xs.resize(together * x_size);
    ys.resize(together * y_size);
    for (int i = 0; i < together; ++i) {
      std::memcpy(&xs[i * x_size], b.x + b.lhs[order[first + i]] * x_size, x_size * sizeof(float));
    }
    product(matrix, xs.data(), together * b.m, ys.data());
    for (int i = 0; i < together; ++i) {
      std::memcpy(b.y + order[first + i] * y_size, &ys[i * y_size], y_size * sizeof(float));
    }
  }
}

// Inputs are x, lhs and rhs, contiguous, and all matrices, packed ones with scales and biases, and
// these contiguous too.
class GatheredProduct : public mx::UnaryPrimitive {
 public:
  GatheredProduct(mx::Stream stream, int group_size, int bits)
      : UnaryPrimitive(stream), group_size_(group_size), bits_(bits) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    const auto& x = inputs[0];
    const Batch batch{
        .x = x.data<float>(),
        .lhs = inputs[1].data<uint32_t>(),
        .rhs = inputs[2].data<uint32_t>(),
        .y = out.data<float>(),
        .count = static_cast<int>(inputs[2].size()),
        .m = x.shape(-2),
        .k = x.shape(-1),
        .n = out.shape(-1)};
    auto product = inputs.size() > 4 ? packed(inputs, batch) : plain(inputs, batch);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [batch, product = std::move(product)] { multiply(batch, product); });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("GatheredProduct is for CPUs");
  }

  const char* name() const override {
    return "GatheredProduct";
  }

 private:
  static Product plain(const std::vector<mx::array>& inputs, const Batch& b) {
    const auto& all = inputs[3];
    switch (all.dtype()) {
      case mx::float16:
        return strided(all, all.data<mx::float16_t>(), b);
      case mx::bfloat16:
        return strided(all, all.data<mx::bfloat16_t>(), b);
      default:
        return strided(all, all.data<float>(), b);
    }
  }

  // BLAS takes rows or columns that are float32 and lie together; else the matrix is written so.
  template <typename T>
  static Product strided(const mx::array& all, const T* data, const Batch& b) {
    const int64_t matrix_step = all.strides(0), row = all.strides(1), column = all.strides(2);
    const int k = b.k, n = b.n;
    const bool by_columns = row < column;
    const bool as_it_is = std::is_same_v<T, float> && (by_columns ? row == 1 && column == k : column == 1 && row == n);
    return [=, room = std::vector<float>()](uint32_t matrix, const float* x, int m, float* y) mutable {
      const T* source = data + matrix * matrix_step;
      const float* w = reinterpret_cast<const float*>(source);
      if (!as_it_is) {
        room.resize(size_t(k) * n);
        for (int i = 0; i < (by_columns ? n : k); ++i) {
          for (int j = 0; j < (by_columns ? k : n); ++j) {
            room[size_t(i) * (by_columns ? k : n) + j] =
                static_cast<float>(by_columns ? source[i * column + j * row] : source[i * row + j * column]);
          }
        }
        w = room.data();
      }
      cblas_sgemm(101, 111, by_columns ? 112 : 111, m, n, k, 1, x, k, w, by_columns ? k : n, 0, y, n);
    };
  }

  Product packed(const std::vector<mx::array>& inputs, const Batch& b) const {
    const auto& scales = inputs[4];
    const ExecutorchMlxQuantized one{
        .x = nullptr,
        .w = inputs[3].data<uint32_t>(),
        .scales = scales.data<void>(),
        .biases = inputs[5].data<void>(),
        .scale_type = scales.dtype() == mx::float32 ? 0 : scales.dtype() == mx::float16 ? 1 : 2,
        .bits = bits_,
        .group_size = group_size_,
        .m = 0,
        .n = b.n,
        .k = b.k,
        .y = nullptr};
    const size_t words = size_t(b.n) * (size_t(b.k) * bits_ / 32);
    const size_t octets = size_t(b.n) * (b.k / group_size_) * scales.itemsize();
    return [one, words, octets](uint32_t matrix, const float* x, int m, float* y) {
      auto product = one;
      product.x = x;
      product.w += matrix * words;
      product.scales = static_cast<const char*>(one.scales) + matrix * octets;
      product.biases = static_cast<const char*>(one.biases) + matrix * octets;
      product.m = m;
      product.y = y;
      executorch_mlx_quantized_product(&product);
    };
  }

  int group_size_;
  int bits_;
};

mx::array made(
    const mx::array& x,
    const std::vector<mx::array>& matrices,
    int columns,
    const std::optional<mx::array>& lhs,
    const mx::array& rhs,
    int group_size,
    int bits,
    mx::Stream stream) {
  const mx::Shape batch(x.shape().begin(), x.shape().end() - 2);
  const auto all = [&] {
    const int count = static_cast<int>(x.size() / (int64_t{x.shape(-1)} * x.shape(-2)));
    return mx::reshape(mx::arange(0, count, mx::uint32, stream), batch, stream);
  };
  const auto indices = mx::broadcast_arrays({lhs ? *lhs : all(), rhs}, stream);
  auto shape = indices[0].shape();
  shape.push_back(x.shape(-2));
  shape.push_back(columns);
  std::vector<mx::array> inputs;
  for (const auto& a : {x, indices[0], indices[1]}) {
    inputs.push_back(contiguous(a, stream));
  }
  inputs.insert(inputs.end(), matrices.begin(), matrices.end());
  return mx::array(
      shape, mx::float32, std::make_shared<GatheredProduct>(stream, group_size, bits), std::move(inputs));
}

bool fits(const mx::array& x, const mx::array& matrices, const std::optional<mx::array>& rhs, mx::Stream stream) {
  return stream.device == mx::Device::cpu && x.dtype() == mx::float32 && x.size() > 0 && matrices.ndim() == 3 &&
      matrices.size() > 0 && rhs && rhs->size() > 0;
}

bool has_kernels(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

} // namespace

std::optional<mx::array> gathered_product(
    const mx::array& x,
    const mx::array& b,
    const std::optional<mx::array>& lhs,
    const std::optional<mx::array>& rhs,
    mx::Stream stream) {
  if (!fits(x, b, rhs, stream) || !has_kernels(b.dtype()) || b.shape(1) != x.shape(-1)) {
    return std::nullopt;
  }
  return made(x, {b}, b.shape(2), lhs, *rhs, 0, 0, stream);
}

std::optional<mx::array> gathered_quantized_product(
    const mx::array& x,
    const mx::array& w,
    const mx::array& scales,
    const mx::array& biases,
    const std::optional<mx::array>& lhs,
    const std::optional<mx::array>& rhs,
    int group_size,
    int bits,
    mx::Stream stream) {
  const int k = x.shape(-1);
  if (!fits(x, w, rhs, stream) || int64_t{w.shape(2)} * 32 != int64_t{k} * bits ||
      scales.dtype() != biases.dtype() || !has_kernels(scales.dtype()) ||
      !executorch_mlx_quantized_is_fast(bits, group_size, k)) {
    return std::nullopt;
  }
  const std::vector<mx::array> matrices{
      contiguous(w, stream), contiguous(scales, stream), contiguous(biases, stream)};
  return made(x, matrices, w.shape(1), lhs, *rhs, group_size, bits, stream);
}

} // namespace executorch_mlx

#else

namespace executorch_mlx {

std::optional<mx::array> gathered_product(
    const mx::array&, const mx::array&, const std::optional<mx::array>&, const std::optional<mx::array>&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> gathered_quantized_product(
    const mx::array&, const mx::array&, const mx::array&, const mx::array&, const std::optional<mx::array>&,
    const std::optional<mx::array>&, int, int, mx::Stream) {
  return std::nullopt;
}

} // namespace executorch_mlx

#endif
