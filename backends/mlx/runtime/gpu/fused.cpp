#include "fused.h"

#include <mlx/fast_primitives.h>
#include <mlx/primitives.h>

#include <bit>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "../dtype.h"
#include "../error.h"
#include "../views.h"
#include "cuda_kernel.h"

namespace executorch_mlx::gpu {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kMaxBlocks = 1 << 22;  // kMaxBlocks * kThreads fits in 32 bits

int blocks_of(size_t rows, int per_block) {
  return static_cast<int>((rows + per_block - 1) / per_block);
}

// Whether x is the result of the operation `name` that is not evaluated yet.
bool is_lazy(const mx::array& x, std::string_view name) {
  return x.status() == mx::array::Status::unscheduled && x.has_primitive() && x.primitive().name() == name;
}

// Whether x has the dtype `dtype`, and the kernels can read it: it must be a float dtype.
bool has_float_dtype(const mx::array& x, mx::Dtype dtype) {
  return x.dtype() == dtype && is_float(dtype);
}

// The operand x if y is the lazy result of silu(x) = x * sigmoid(x), else null.
const mx::array* operand_of_silu(const mx::array& y) {
  if (!is_lazy(y, "Multiply") || !is_lazy(y.inputs()[1], "Sigmoid")) {
    return nullptr;
  }
  const mx::array& x = y.inputs()[0];
  return y.inputs()[1].inputs()[0].id() == x.id() ? &x : nullptr;
}

const CudaKernel& silu_kernel() {
  static const CudaKernel kernel("silu_multiply", {"gate", "up"}, {"y"}, R"(
  uint32_t size = 1;
  for (int axis = 0; axis < gate_ndim; ++axis) {
    size *= gate_shape[axis];
  }
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) {
    const float x = static_cast<float>(gate[i]);
    const float silu = static_cast<float>(static_cast<T>(x / (1.0f + expf(-x))));
    y[i] = static_cast<T>(silu * static_cast<float>(up[i]));
  }
)");
  return kernel;
}

// A warp computes silu(x . gate[row]) * (x . up[row]) for one row of the weights [rows, kDepth].
const CudaKernel& gated_products_kernel() {
  static const CudaKernel kernel("gated_products", {"x", "gate", "up"}, {"y"}, R"(
  constexpr int kWide = 16 / sizeof(T);
  const uint32_t row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  if (row >= kRows) {
    return;
  }
  const uint64_t begin = uint64_t(row) * kDepth;
  float a = 0.0f, b = 0.0f;
  for (int i = lane * kWide; i < kDepth; i += 32 * kWide) {
    const uint4 gates = *reinterpret_cast<const uint4*>(gate + begin + i);
    const uint4 ups = *reinterpret_cast<const uint4*>(up + begin + i);
    for (int j = 0; j < kWide; ++j) {
      const float value = static_cast<float>(x[i + j]);
      a += value * static_cast<float>(reinterpret_cast<const T*>(&gates)[j]);
      b += value * static_cast<float>(reinterpret_cast<const T*>(&ups)[j]);
    }
  }
  for (int other = 16; other > 0; other /= 2) {
    a += __shfl_xor_sync(0xFFFFFFFFu, a, other);
    b += __shfl_xor_sync(0xFFFFFFFFu, b, other);
  }
  if (lane == 0) {
    a = static_cast<float>(static_cast<T>(a));
    b = static_cast<float>(static_cast<T>(b));
    const float silu = static_cast<float>(static_cast<T>(a / (1.0f + expf(-a))));
    y[row] = static_cast<T>(silu * b);
  }
)");
  return kernel;
}

constexpr size_t kMaxMatrices = 4;

// A warp computes x . w[row] for one row of the matrices w0 [kRows0, kDepth], w1, ...
std::string products_of_row_text(size_t matrices) {
  std::string text = R"(
  constexpr int kWide = 16 / sizeof(T);
  uint32_t row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const T* w = nullptr;
  T* y = nullptr;
)";
  for (size_t i = 0; i < matrices; ++i) {
    text += str("  if (w == nullptr && row < kRows", i, ") { w = w", i, "; y = y", i, "; }\n");
    text += str("  if (w == nullptr) { row -= kRows", i, "; }\n");
  }
  return text + R"(
  if (w == nullptr) {
    return;
  }
  w += uint64_t(row) * kDepth;
  float sum = 0.0f;
  for (int i = lane * kWide; i < kDepth; i += 32 * kWide) {
    const uint4 weights = *reinterpret_cast<const uint4*>(w + i);
    for (int j = 0; j < kWide; ++j) {
      sum += static_cast<float>(x[i + j]) * static_cast<float>(reinterpret_cast<const T*>(&weights)[j]);
    }
  }
  for (int other = 16; other > 0; other /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, other);
  }
  if (lane == 0) {
    y[row] = static_cast<T>(sum);
  }
)";
}

const CudaKernel& products_of_row_kernel(size_t matrices) {
  const auto make = [](size_t count) {
    std::vector<std::string> inputs{"x"}, outputs;
    for (size_t i = 0; i < count; ++i) {
      inputs.push_back(str("w", i));
      outputs.push_back(str("y", i));
    }
    return CudaKernel(str("products_of_row_", count).c_str(), inputs, outputs, products_of_row_text(count));
  };
  static const CudaKernel two = make(2), three = make(3), four = make(4);
  return matrices == 2 ? two : matrices == 3 ? three : four;
}

const CudaKernel& add_rms_norm_kernel() {
  static const CudaKernel kernel("add_rms_norm", {"a", "b", "weight"}, {"sum", "y"}, R"(
  const uint32_t size = weight_shape[0];
  const uint64_t row = uint64_t(blockIdx.x) * size;
  float squares = 0.0f;
  for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
    const T x = static_cast<T>(static_cast<float>(a[row + i]) + static_cast<float>(b[row + i]));
    sum[row + i] = x;
    squares += static_cast<float>(x) * static_cast<float>(x);
  }
  __shared__ float of_warp[kThreads / 32];
  for (int other = 16; other > 0; other /= 2) {
    squares += __shfl_xor_sync(0xFFFFFFFFu, squares, other);
  }
  if (threadIdx.x % 32 == 0) {
    of_warp[threadIdx.x / 32] = squares;
  }
  __syncthreads();
  squares = 0.0f;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    squares += of_warp[warp];
  }
  const float scale = rsqrtf(squares / size + __int_as_float(kEps));
  for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
    const T x = static_cast<T>(static_cast<float>(sum[row + i]) * scale);
    y[row + i] = static_cast<T>(static_cast<float>(weight[i]) * static_cast<float>(x));
  }
)");
  return kernel;
}

// A warp computes a row of D elements. x is [B, S, H * D], y is [B, H, S, D].
const CudaKernel& rms_norm_rope_kernel() {
  static const CudaKernel kernel("rms_norm_rope", {"x", "weight", "offset", "freqs"}, {"y"}, R"(
  constexpr int kHalf = kDim / 2;
  constexpr int kPairs = (kHalf + 31) / 32;  // of a thread
  const uint32_t length = x_shape[1];
  const uint64_t row = uint64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t head = row % kHeads;
  const uint32_t position = row / kHeads % length;
  const uint32_t batch = row / kHeads / length;
  if (batch >= x_shape[0]) {
    return;
  }
  float first[kPairs], second[kPairs];
  float squares = 0.0f;
  for (int pair = 0; pair < kPairs; ++pair) {
    const int i = pair * 32 + lane;
    first[pair] = i < kHalf ? static_cast<float>(x[row * kDim + i]) : 0.0f;
    second[pair] = i < kHalf ? static_cast<float>(x[row * kDim + kHalf + i]) : 0.0f;
    squares += first[pair] * first[pair] + second[pair] * second[pair];
  }
  for (int other = 16; other > 0; other /= 2) {
    squares += __shfl_xor_sync(0xFFFFFFFFu, squares, other);
  }
  const float norm = rsqrtf(squares / kDim + __int_as_float(kEps));
  const float angle = __int_as_float(kScale) * static_cast<float>(position + offset[kPerRow ? batch : 0]);
  T* const out = y + ((uint64_t(batch) * kHeads + head) * length + position) * kDim;
  for (int pair = 0; pair < kPairs; ++pair) {
    const int i = pair * 32 + lane;
    if (i < kHalf) {
      const auto normalized = [&](float value, int at) {
        const T rounded = static_cast<T>(value * norm);
        return static_cast<float>(static_cast<T>(static_cast<float>(weight[at]) * static_cast<float>(rounded)));
      };
      const float theta = angle * (1.0f / static_cast<float>(freqs[i]));
      const float sine = sinf(theta);
      const float cosine = cosf(theta);
      const float a = normalized(first[pair], i);
      const float b = normalized(second[pair], kHalf + i);
      out[i] = static_cast<T>(a * cosine - b * sine);
      out[kHalf + i] = static_cast<T>(a * sine + b * cosine);
    }
  }
)");
  return kernel;
}

// The operand if y is the lazy result of a transposition [B, S, H, D] -> [B, H, S, D], else null. A reshape does the
// same if S or H is 1.
const mx::array* operand_of_transposition(const mx::array& y) {
  const bool is_transpose = is_lazy(y, "Transpose");
  if (y.ndim() != 4 || !(is_transpose || is_lazy(y, "Reshape"))) {
    return nullptr;
  }
  const mx::array& x = y.inputs()[0];
  const bool has_shape =
      x.shape() == mx::Shape{y.shape(0), y.shape(2), y.shape(1), y.shape(3)};
  if (!has_shape) {
    return nullptr;
  }
  if (is_transpose) {
    const auto axes = static_cast<const mx::Transpose&>(y.primitive()).state();
    return axes == std::vector<int>{0, 2, 1, 3} ? &x : nullptr;
  }
  return y.shape(1) == 1 || y.shape(2) == 1 ? &x : nullptr;
}

// The weights [..., rows, depth] if y is a lazy product x @ weights.T, x is one row vector, and a kernel can read the
// rows of the weights in blocks of 16 bytes. Otherwise nullopt.
std::optional<mx::array> weights_of_product(const mx::array& y, mx::Stream stream) {
  if (!is_lazy(y, "Matmul") || y.size() != static_cast<size_t>(y.shape(-1))) {
    return std::nullopt;
  }
  const mx::array& b = y.inputs()[1];
  if (!b.is_available() || b.offset() != 0 || b.size() != b.data_size() || b.ndim() < 2 ||
      b.shape(-2) * b.itemsize() % 16 != 0) {
    return std::nullopt;
  }
  std::vector<int> axes(b.ndim());
  std::iota(axes.begin(), axes.end(), 0);
  std::swap(axes[b.ndim() - 2], axes[b.ndim() - 1]);
  const auto weights = views::transpose(b, axes, stream);
  return weights.flags().row_contiguous ? std::optional(weights) : std::nullopt;
}

// Computes silu(gate) * up, and the products that compute gate and up, in one kernel. Returns nullopt unless both are
// lazy products of the same row vector.
std::optional<mx::array> gated_products(const mx::array& gate, const mx::array& up, mx::Stream stream) {
  const auto gates = weights_of_product(gate, stream);
  const auto ups = gates ? weights_of_product(up, stream) : std::nullopt;
  if (!ups || gate.inputs()[0].id() != up.inputs()[0].id()) {
    return std::nullopt;
  }
  const int rows = gates->shape(-2), depth = gates->shape(-1);
  return gated_products_kernel()(
      {gate.inputs()[0], *gates, *ups}, {gate.shape()}, blocks_of(rows, kThreads / kWarp), kThreads,
      {{"kThreads", kThreads}, {"kRows", rows}, {"kDepth", depth}}, stream)[0];
}

} // namespace

std::optional<std::vector<mx::array>> products_of_row(
    const mx::array& x, const std::vector<mx::array>& matrices, mx::Stream stream) {
  const bool is_row = is_cuda(stream) && x.ndim() > 0 && x.size() > 0 && x.size() == static_cast<size_t>(x.shape(-1));
  if (!is_row || !is_float(x.dtype()) || x.size() * x.itemsize() % 16 != 0 || matrices.size() > kMaxMatrices ||
      matrices.size() < 2) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{x};
  std::vector<mx::Shape> shapes;
  CudaKernel::Constants constants{{"kThreads", kThreads}, {"kDepth", x.shape(-1)}};
  int64_t rows = 0;
  for (const auto& w : matrices) {
    if (w.dtype() != x.dtype() || w.ndim() != 2 || w.shape(1) != x.shape(-1) || !w.is_available() || w.offset() != 0 ||
        !w.flags().row_contiguous) {
      return std::nullopt;
    }
    constants.push_back({str("kRows", shapes.size()), w.shape(0)});
    rows += w.shape(0);
    shapes.push_back(x.shape());
    shapes.back().back() = w.shape(0);
    inputs.push_back(w);
  }
  if (rows / (kThreads / kWarp) >= kMaxBlocks) {
    return std::nullopt;
  }
  return products_of_row_kernel(matrices.size())(
      std::move(inputs), std::move(shapes), blocks_of(rows, kThreads / kWarp), kThreads, constants, stream);
}

std::optional<mx::array> multiply_silu(const mx::array& a, const mx::array& b, mx::Stream stream) {
  if (!is_cuda(stream) || a.shape() != b.shape() || a.ndim() == 0 || !has_float_dtype(a, b.dtype()) ||
      a.size() / kThreads >= kMaxBlocks) {
    return std::nullopt;
  }
  const mx::array* gate = operand_of_silu(a);
  const mx::array& up = gate != nullptr ? b : a;
  gate = gate != nullptr ? gate : operand_of_silu(b);
  if (gate == nullptr || a.size() == 0) {
    return std::nullopt;
  }
  if (const auto y = gated_products(*gate, up, stream)) {
    return y;
  }
  return silu_kernel()({*gate, up}, {a.shape()}, blocks_of(a.size(), kThreads), kThreads, {}, stream)[0];
}

std::optional<std::pair<mx::array, mx::array>> add_rms_norm(
    const mx::array& x, const mx::array& weight, float eps, mx::Stream stream) {
  if (!is_cuda(stream) || !is_lazy(x, "Add") || !has_float_dtype(weight, x.dtype()) || x.size() == 0) {
    return std::nullopt;
  }
  const mx::array& a = x.inputs()[0];
  const mx::array& b = x.inputs()[1];
  const size_t rows = x.size() / x.shape(-1);
  if (a.shape() != x.shape() || b.shape() != x.shape() || rows >= kMaxBlocks) {
    return std::nullopt;
  }
  auto results = add_rms_norm_kernel()(
      {a, b, weight}, {x.shape(), x.shape()}, static_cast<int>(rows), kThreads,
      {{"kThreads", kThreads}, {"kEps", std::bit_cast<int>(eps)}}, stream);
  return std::pair(std::move(results[0]), std::move(results[1]));
}

std::optional<mx::array> rms_norm_rope(
    const mx::array& x, float scale, const mx::array& offset, const mx::array& freqs, mx::Stream stream) {
  const mx::array* const norm = is_cuda(stream) ? operand_of_transposition(x) : nullptr;
  if (norm == nullptr || !is_lazy(*norm, "RMSNorm") || x.size() == 0) {
    return std::nullopt;
  }
  const mx::array& weight = norm->inputs()[1];
  const float eps = static_cast<const mx::fast::RMSNorm&>(norm->primitive()).state().second;
  const int heads = x.shape(1), dim = x.shape(3);
  if (!has_float_dtype(x, weight.dtype()) || weight.shape() != mx::Shape{dim} || dim % 2 != 0 || dim > 1024 ||
      !is_float(freqs.dtype()) || x.size() / dim >= kMaxBlocks) {
    return std::nullopt;
  }
  // [B, S, H, D], or what it was reshaped from.
  const mx::array* in = &norm->inputs()[0];
  if (is_lazy(*in, "Reshape") && in->inputs()[0].shape() == mx::Shape{x.shape(0), x.shape(2), heads * dim}) {
    in = &in->inputs()[0];
  }
  return rms_norm_rope_kernel()(
      {*in, weight, offset, freqs}, {x.shape()}, blocks_of(x.size() / dim, kThreads / kWarp), kThreads,
      {{"kThreads", kThreads}, {"kDim", dim}, {"kHeads", heads}, {"kEps", std::bit_cast<int>(eps)},
       {"kScale", std::bit_cast<int>(scale)}, {"kPerRow", offset.size() > 1}},
      stream)[0];
}

} // namespace executorch_mlx::gpu
