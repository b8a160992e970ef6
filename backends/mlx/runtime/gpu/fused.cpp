#include "fused.h"

#include <mlx/primitives.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../checks.h"
#include "../error.h"
#include "cuda_kernel.h"
#include "lazy.h"
#include "metal.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

constexpr int kMaxHeadDim = 1024;
constexpr int kMinHeadDimOnMetal = 16; // so that no array but the offset is in the address space `constant`

const CudaKernel& silu_kernel() {
  static const CudaKernel kernel("silu_multiply", {"gate", "up"}, {"y"}, {"size"}, R"(
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) {
    const float x = static_cast<float>(gate[i]);
    const float silu = static_cast<float>(static_cast<T>(x / (1.0f + expf(-x))));
    y[i] = static_cast<T>(silu * static_cast<float>(up[i]));
  }
)");
  return kernel;
}

const CudaKernel& add_rms_norm_kernel() {
  static const CudaKernel kernel("add_rms_norm", {"a", "b", "weight"}, {"sum", "y"}, {"size"},
      str(R"(
  const uint64_t row = uint64_t(blockIdx.x) * size;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const T x = static_cast<T>(static_cast<float>(a[row + i]) + static_cast<float>(b[row + i]));
    sum[row + i] = x;
    squares += static_cast<float>(x) * static_cast<float>(x);
  }
)",
          kSumSquares, R"(
  const float scale = rsqrtf(squares / size + __int_as_float(kEps));
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const T x = static_cast<T>(static_cast<float>(sum[row + i]) * scale);
    y[row + i] = static_cast<T>(static_cast<float>(weight[i]) * static_cast<float>(x));
  }
)"));
  return kernel;
}

// A warp computes a row of kDim elements. x0 is [batches, length, kHeads0 * kDim], y0 is [batches, kHeads0, length,
// kDim]; likewise x1 and y1, which only the kernel for two arrays has. The host passes an offset that it knows: MLX
// keeps single numbers in the memory of the host, and reading them from there takes each warp a microsecond.
std::string norm_rope_text(int arrays) {
  std::string text = str(kNormRope, R"(
  uint64_t row = uint64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const T* x = x0;
  const T* weight = weight0;
  T* y = y0;
  uint32_t heads = kHeads0;
)");
  if (arrays == 2) {
    text += R"(
  if (row >= uint64_t(batches) * length * heads) {
    row -= uint64_t(batches) * length * heads;
    x = x1;
    weight = weight1;
    y = y1;
    heads = kHeads1;
  }
)";
  }
  return text + R"(
  const uint32_t head = row % heads;
  const uint32_t position = row / heads % length;
  const uint32_t batch = row / heads / length;
  if (batch >= batches) {
    return;
  }
  const int first = kHasOffset ? known_offset : static_cast<int>(offset[kPerRow ? batch : 0]);
  const float angle = __int_as_float(kScale) * static_cast<float>(position + first);
  set_rotation(angle);
  norm_rope(x + row * kDim, weight, y + ((uint64_t(batch) * heads + head) * length + position) * kDim);
)";
}

// The operand of RoPE, before operations that the kernel takes over.
struct RopeOperand {
  mx::array x; // the elements in the order [B, S, H, D]
  std::optional<mx::array> weight; // of an RMSNorm
  float eps = 0.0f;
  int heads = 1;
};

// Returns nullopt if x [B, H, S, D] is not the lazy result of a transposition.
std::optional<RopeOperand> rope_operand(const mx::array& x) {
  const mx::array* in = operand_of_transposition(x);
  const int heads = x.shape(1), dim = x.shape(3);
  if (in == nullptr || !is_float(x.dtype()) || x.size() == 0 || dim % 2 != 0 || dim > kMaxHeadDim ||
      x.size() / dim >= kMaxBlocks) {
    return std::nullopt;
  }
  RopeOperand operand{*in, std::nullopt, 0.0f, heads};
  if (const FusibleNorm* const norm = norm_of(*in, dim)) {
    operand.weight = in->inputs()[1];
    operand.eps = norm->eps;
    in = &in->inputs()[0];
  }
  operand.x = before_reshapes(*in);
  return operand;
}

// Whether the elements of y, the lazy result of a transposition, have the same order as before.
bool keeps_order(const mx::array& y) {
  auto axes = static_cast<const mx::Transpose&>(y.primitive()).state();
  std::erase_if(axes, [&](int axis) { return y.inputs()[0].shape(axis) == 1; });
  return std::is_sorted(axes.begin(), axes.end());
}

// The elements of x if the host can read them, and an axis of an array can have each of these sizes. Else empty.
std::vector<int> sizes_on_host(const mx::array& x) {
  std::vector<int> result;
  if (x.size() <= kMaxSpans && is_on_host(x)) {
    for_each_integer(x, [&](int64_t value) {
      if (value >= 0 && std::in_range<int>(value)) {
        result.push_back(static_cast<int>(value));
      }
    });
  }
  return result.size() == x.size() ? result : std::vector<int>{};
}

} // namespace

const mx::array& before_reshapes(const mx::array& x) {
  constexpr std::string_view kReshapes[] = {"Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"};
  if (x.status() != mx::array::Status::unscheduled || !x.has_primitive()) {
    return x;
  }
  const std::string_view name = x.primitive().name();
  const bool is_reshape = std::find(std::begin(kReshapes), std::end(kReshapes), name) != std::end(kReshapes);
  return is_reshape || (name == "Transpose" && keeps_order(x)) ? before_reshapes(x.inputs()[0]) : x;
}

const mx::array* operand_of_transposition(const mx::array& y) {
  const bool is_transpose = is_lazy(y, "Transpose");
  if (y.ndim() != 4 || !(is_transpose || is_lazy(y, "Reshape"))) {
    return nullptr;
  }
  const mx::array& x = y.inputs()[0];
  const bool has_order = y.shape(1) == 1 || y.shape(2) == 1; // y has the elements in the order [B, S, H, D]
  if (is_transpose) {
    const auto axes = static_cast<const mx::Transpose&>(y.primitive()).state();
    return axes == std::vector<int>{0, 2, 1, 3} || (has_order && keeps_order(y)) ? &x : nullptr;
  }
  return has_order ? &x : nullptr;
}

std::optional<mx::array> silu_product(const mx::array& gate, const mx::array& up, mx::Stream stream) {
  if (!is_used(Kernel::silu_product, stream) || gate.shape() != up.shape() || gate.size() == 0 ||
      !has_float_dtype(gate, up.dtype()) || gate.size() / kThreads >= kMaxBlocks) {
    return std::nullopt;
  }
  return silu_kernel()({.inputs = {gate, up},
                           .shapes = {gate.shape()},
                           .numbers = {static_cast<int>(gate.size())},
                           .blocks = blocks_of(gate.size(), kThreads),
                           .threads = kThreads},
      {}, stream)[0];
}

std::optional<std::pair<mx::array, mx::array>> add_rms_norm(
    const mx::array& a, const mx::array& b, const mx::array& weight, float eps, mx::Stream stream) {
  const bool fits = is_used(Kernel::add_rms_norm, stream) && a.shape() == b.shape() && has_float_dtype(a, b.dtype()) &&
      weight.dtype() == a.dtype() && a.size() > 0 && weight.shape() == mx::Shape{a.shape(-1)};
  const size_t rows = fits ? a.size() / a.shape(-1) : 0;
  if (!fits || rows >= kMaxBlocks) {
    return std::nullopt;
  }
  auto results = add_rms_norm_kernel()({.inputs = {a, b, weight},
                                           .shapes = {a.shape(), a.shape()},
                                           .numbers = {a.shape(-1)},
                                           .blocks = static_cast<int>(rows),
                                           .threads = kThreads},
      {{"kThreads", kThreads}, {"kEps", std::bit_cast<int>(eps)}}, stream);
  return std::pair(std::move(results[0]), std::move(results[1]));
}

std::optional<mx::array> rms_norm(const mx::array& x, const mx::array& weight, float eps, mx::Stream stream) {
  if (!is_used(Kernel::norm_rope, stream) || !has_float_dtype(weight, x.dtype()) || x.size() == 0) {
    return std::nullopt;
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<FusibleNorm>(stream, eps), {x, weight});
}

mx::array FusibleRope::compute(const std::vector<mx::array>& inputs) {
  if (is_metal(stream())) {
    return compute_on_metal(inputs);
  }
  static const CudaKernel one("norm_rope_1", {"x0", "weight0", "offset", "freqs"}, {"y0"},
      {"batches", "length", "known_offset"}, norm_rope_text(1));
  static const CudaKernel two("norm_rope_2", {"x0", "weight0", "x1", "weight1", "offset", "freqs"}, {"y0", "y1"},
      {"batches", "length", "known_offset"}, norm_rope_text(2));
  const bool has_offset = options.offsets.size() == 1;
  std::vector<mx::Shape> shapes;
  size_t rows = 0;
  for (const int heads : options.heads) {
    shapes.push_back({options.batches, heads, options.length, options.dim});
    rows += static_cast<size_t>(options.batches) * heads * options.length;
  }
  return (shapes.size() == 1 ? one : two)(
      {.inputs = inputs,
          .shapes = std::move(shapes),
          .numbers = {options.batches, options.length, has_offset ? options.offsets[0] : 0},
          .blocks = blocks_of(rows, kThreads / kWarp),
          .threads = kThreads},
      {{"kThreads", kThreads}, {"kDim", options.dim}, {"kHeads0", options.heads.front()},
          {"kHeads1", options.heads.back()}, {"kNorm", options.has_norm}, {"kEps", std::bit_cast<int>(options.eps)},
          {"kScale", std::bit_cast<int>(options.scale)}, {"kPerRow", offset_of(inputs).size() > 1},
          {"kHasOffset", has_offset}},
      stream())[0];
}

std::optional<std::vector<mx::array>> norm_rope(const std::vector<mx::array>& arrays, float scale,
    const mx::array& offset, const mx::array& freqs, mx::Stream stream) {
  if (!is_used(Kernel::norm_rope, stream) || arrays.empty() || arrays.size() > 2 || arrays[0].ndim() != 4 ||
      !is_float(freqs.dtype())) {
    return std::nullopt;
  }
  const int dim = arrays[0].shape(3);
  if (is_metal(stream) && dim < kMinHeadDimOnMetal) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs;
  std::vector<mx::Shape> shapes;
  std::vector<RopeOperand> operands;
  const int batches = arrays[0].shape(0), length = arrays[0].shape(2);
  FusibleRope::Options options{{}, dim, batches, length, false, 0.0f, scale, sizes_on_host(offset)};
  for (const auto& x : arrays) {
    const bool matches = x.ndim() == 4 && x.dtype() == arrays[0].dtype() && x.shape(0) == batches &&
        x.shape(2) == length && x.shape(3) == dim;
    const auto operand = matches ? rope_operand(x) : std::nullopt;
    if (!operand ||
        (!operands.empty() &&
            (operand->weight.has_value() != operands[0].weight.has_value() || operand->eps != operands[0].eps))) {
      return std::nullopt;
    }
    operands.push_back(*operand);
    inputs.insert(inputs.end(), {operand->x, operand->weight.value_or(operand->x)});
    shapes.push_back(x.shape());
    options.heads.push_back(operand->heads);
  }
  options.has_norm = operands[0].weight.has_value();
  options.eps = operands[0].eps;
  if (arrays.size() == 1 && !options.has_norm && length > 1) {
    return std::nullopt; // MLX has a kernel for this, and that of attention does not compute it
  }
  inputs.insert(inputs.end(), {offset, freqs});
  const std::vector<mx::Dtype> dtypes(arrays.size(), arrays[0].dtype());
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<FusibleRope>(stream, std::move(options)), inputs);
}

} // namespace executorch_mlx::gpu
