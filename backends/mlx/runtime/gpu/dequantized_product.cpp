// Products of many vectors with quantized matrices: a kernel makes numbers of the integers, and MLX multiplies them.
#include <mlx/primitives.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../call/evaluation.h"
#include "../checks.h"
#include "cuda_kernel.h"
#include "fused.h"
#include "kernel_source.h"
#include "lazy.h"
#include "mlx_internals/arrays.h"
#include "mlx_internals/cuda.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

// A thread loads several units before it waits for the first one.
constexpr int kUnit = 8;
constexpr int kUnitsOfThread = 4;
constexpr size_t kMaxUnits = size_t{kMaxBlocks} * kThreads;
constexpr size_t kMaxWorkspace = 256 << 20; // bytes

// A unit is eight integers. The units of a thread lie kThreads units apart.
constexpr char kText[] = R"(
  constexpr int kWords = kUnit * kBits / 32;  // of a unit
  const uint32_t first = blockIdx.x * kThreads * kUnitsOfThread + threadIdx.x;
  uint32_t words[kUnitsOfThread][kWords];
  float scale[kUnitsOfThread], bias[kUnitsOfThread];
  #pragma unroll
  for (int i = 0; i < kUnitsOfThread; ++i) {
    const uint64_t unit = min(first + i * kThreads, uint32_t(units - 1));
    #pragma unroll
    for (int j = 0; j < kWords; ++j) {
      words[i][j] = w[unit * kWords + j];
    }
    scale[i] = static_cast<float>(scales[unit / (kGroupSize / kUnit)]);
    bias[i] = static_cast<float>(biases[unit / (kGroupSize / kUnit)]);
  }
  #pragma unroll
  for (int i = 0; i < kUnitsOfThread; ++i) {
    const uint32_t unit = first + i * kThreads;
    uint4 numbers;
    #pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      const uint32_t integer = words[i][j * kBits / 32] >> j * kBits % 32 & ((1 << kBits) - 1);
      reinterpret_cast<T*>(&numbers)[j] = static_cast<T>(scale[i] * static_cast<float>(integer) + bias[i]);
    }
    if (unit < units) {
      reinterpret_cast<uint4*>(y)[unit] = numbers;
    }
  }
)";

size_t units_of(const Matrix& matrix) { return matrix.scales->size() * matrix.group_size / kUnit; }

// The shape of the numbers.
mx::Shape shape_of(const Matrix& matrix) {
  auto shape = matrix.w.shape();
  shape.back() = matrix.scales->shape(-1) * matrix.group_size;
  return shape;
}

Constants constants_of(const Matrix& matrix) {
  return {{"kThreads", kThreads}, {"kUnit", kUnit}, {"kUnitsOfThread", kUnitsOfThread}, {"kBits", matrix.bits},
      {"kGroupSize", matrix.group_size}};
}

bool can_dequantize(const Matrix& matrix, mx::Stream stream) {
  const auto& [w, scales, biases, group_size, bits] = matrix;
  const auto is_valid = [&](const mx::array& x) {
    return x.dtype() == scales->dtype() && x.shape() == scales->shape();
  };
  const size_t units = units_of(matrix);
  return is_used(Kernel::dequantize, stream) && is_half(scales->dtype()) && is_valid(*biases) &&
      w.dtype() == mx::uint32 && units > 0 && units <= kMaxUnits && (bits == 4 || bits == 8) &&
      group_size % kUnit == 0 && w.size() == units * kUnit * bits / 32;
}

// Memory for the numbers of one matrix. The products of a stream share it, one product after the other.
struct Workspace {
  mx::array memory;
  std::optional<mx::array> read_by = std::nullopt; // the latest product that reads it
};

std::shared_ptr<Workspace> workspace_of(mx::Stream stream, size_t bytes) {
  static std::mutex mutex;
  // Never destroyed: at the end of the process, MLX may be gone before.
  static auto& all = *new std::map<int, std::shared_ptr<Workspace>>;
  std::lock_guard lock(mutex);
  auto& workspace = all[stream.index];
  if (workspace == nullptr || workspace->memory.nbytes() < bytes) {
    mx::array memory = mx::zeros({static_cast<int>(bytes)}, mx::uint8, stream);
    evaluate({memory}, stream);
    workspace = std::make_shared<Workspace>(std::move(memory));
  }
  return workspace;
}

// x @ numbers.T of inputs x [rows, depth], scales, biases and w.
class DequantizedProduct : public mx::Primitive {
 public:
  DequantizedProduct(
      mx::Stream stream, CUfunc_st* kernel, mx::Shape shape, size_t units, std::shared_ptr<Workspace> workspace)
      : Primitive(stream), kernel_(kernel), shape_(std::move(shape)), units_(units), workspace_(std::move(workspace)) {}

  const char* name() const override { return "DequantizedProduct"; }

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("DequantizedProduct: runs on GPU streams only");
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array& x = inputs[0];
    const mx::array numbers = internals::array_in(workspace_->memory, shape_, x.dtype());
    KernelRun run{kernel_, blocks_of(units_, kThreads * kUnitsOfThread), kThreads, {}, /*starts_early=*/false};
    const auto graph = KernelGraph::make(stream());
    const auto add_address = [&](const mx::array& y) {
      run.arguments.push_back(reinterpret_cast<uintptr_t>(address_on_gpu(y)));
    };
    for (size_t i = 1; i < inputs.size(); ++i) {
      graph->keeps(inputs[i]);
      add_address(inputs[i]);
    }
    add_address(numbers);
    run.arguments.push_back(units_);
    if (workspace_->read_by) { // MLX knows which kernels wrote the memory, and not which ones read it
      graph->reads(*workspace_->read_by);
    }
    graph->writes(workspace_->memory);
    graph->add(run);
    graph->submit();
    const mx::array transposed = internals::view(numbers, {shape_[1], shape_[0]}, {1, shape_[1]}, 0);
    const mx::array y = mx::matmul(x, transposed, stream());
    y.primitive().eval_gpu(y.inputs(), outputs);
    workspace_->read_by = internals::array_in(outputs[0], outputs[0].shape(), outputs[0].dtype());
  }

 private:
  CUfunc_st* const kernel_;
  const mx::Shape shape_; // of the numbers
  const size_t units_;
  const std::shared_ptr<Workspace> workspace_;
};

CUfunc_st* kernel_for(const Matrix& matrix, mx::Stream stream) {
  static std::mutex mutex;
  static std::map<std::vector<int>, CUfunc_st*> functions;
  const mx::Dtype dtype = matrix.scales->dtype();
  std::lock_guard lock(mutex);
  CUfunc_st*& function =
      functions[{stream.device.index, static_cast<int>(dtype.val()), matrix.group_size, matrix.bits}];
  if (function == nullptr) {
    const std::string name = "dequantize_to_workspace";
    const std::string source = kernel_source(name, dtype, constants_of(matrix),
        {input_parameter(dtype, "scales"), input_parameter(dtype, "biases"), input_parameter(mx::uint32, "w"),
            output_parameter(dtype, "y"), number_parameter("units")},
        kText);
    function = load(name, compile(name, source, stream), stream);
  }
  return function;
}

} // namespace

std::optional<mx::array> dequantize(const Matrix& matrix, mx::Stream stream) {
  static const CudaKernel kernel("dequantize", {"scales", "biases", "w"}, {"y"}, {"units"}, kText);
  if (!can_dequantize(matrix, stream)) {
    return std::nullopt;
  }
  const size_t units = units_of(matrix);
  return kernel({.inputs = {*matrix.scales, *matrix.biases, matrix.w},
                    .shapes = {shape_of(matrix)},
                    .numbers = {static_cast<int>(units)},
                    .blocks = blocks_of(units, kThreads * kUnitsOfThread),
                    .threads = kThreads},
      constants_of(matrix), stream)[0];
}

std::optional<mx::array> dequantized_product(const mx::array& x, const Matrix& matrix, mx::Stream stream) {
  if (matrix.w.ndim() != 2 || x.ndim() == 0 || x.size() == 0 || x.dtype() != matrix.scales->dtype() ||
      !can_dequantize(matrix, stream)) {
    return std::nullopt;
  }
  const auto is_ready = [](const mx::array& y) { return y.is_available() && y.flags().row_contiguous; };
  const auto shape = shape_of(matrix);
  const size_t bytes = units_of(matrix) * kUnit * x.itemsize();
  if (!is_ready(matrix.w) || !is_ready(*matrix.scales) || !is_ready(*matrix.biases) || x.shape(-1) != shape[1] ||
      bytes > kMaxWorkspace) {
    return std::nullopt;
  }
  auto rows = x.shape();
  rows.back() = shape[0];
  const mx::array flat = mx::reshape(x, {-1, shape[1]}, stream);
  const mx::array y(mx::Shape{flat.shape(0), shape[0]}, x.dtype(),
      std::make_shared<DequantizedProduct>(
          stream, kernel_for(matrix, stream), shape, units_of(matrix), workspace_of(stream, bytes)),
      {flat, *matrix.scales, *matrix.biases, matrix.w});
  return mx::reshape(y, rows, stream);
}

} // namespace executorch_mlx::gpu
