#include "sample.h"

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "../checks.h"
#include "../dtype.h"
#include "../error.h"
#include "../memory/host_memory.h"
#include "lazy.h"
#include "metal.h"
#include "metal_kernel.h"
#include "sequence_kernel.h"
#include "verdicts.h"
#include "kernels/sampling/host.h"
//
#include "kernels/sampling/definition.inc"
#include "sample_kernel.inc"
#include "sample_kernel_text.h"

namespace executorch_mlx::gpu {

namespace {

namespace kernel = executorch_mlx_sample;

// A group is a CUDA block or a Metal threadgroup. sample_kernel.inc describes the two kernels.
constexpr int kPartThreads = 128; // threads of a group of the kernel sample_parts
constexpr int kRowThreads = 512; // threads of a group of the kernel sample_rows
constexpr int kSharedKeys = 2048; // sort keys of sample_rows that fit in the memory that a group shares

// The macros and functions that the source code of the kernels uses, for CUDA. metal_kernel.cpp defines them for Metal,
// and kernels/sampling/host.h for C++.
constexpr char kCudaHeader[] = R"(
#define GPU_FUNCTION __device__ inline
#define GPU_CONSTANT
#define GPU_DEVICE
#define GPU_SHARED
#define GPU_ATOMIC_UINT uint32_t
#define GPU_BARRIER() __syncthreads()
__device__ inline uint32_t gpu_bits(float x) { return __float_as_uint(x); }
__device__ inline float gpu_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ inline float gpu_add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float gpu_subtract(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float gpu_multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float gpu_divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline float gpu_abs(float x) { return fabsf(x); }
__device__ inline float gpu_log(float x) { return logf(x); }
__device__ inline float gpu_exp2(float x) { return exp2f(x); }
__device__ inline void gpu_store(uint32_t* counter, uint32_t value) { *counter = value; }
__device__ inline uint32_t gpu_load(uint32_t* counter) { return *counter; }
__device__ inline uint32_t gpu_increment(uint32_t* counter) { return atomicAdd(counter, 1u); }
)";
constexpr char kCudaPrologue[] = R"(
  wait_for_inputs();
  const uint32_t group = blockIdx.x;
  const uint32_t own_thread = threadIdx.x;
#define GPU_GROUP_MEMORY __shared__
)";
// The sizes of the logits, which MLX passes to Metal kernels.
constexpr char kMetalPrologue[] = R"(
  const uint32_t rows = logits_shape[0];
  const uint32_t vocabulary = logits_shape[1];
)";

constexpr char kPartsBody[] = R"(
  using namespace executorch_mlx_sample;
  GPU_GROUP_MEMORY float values[kThreads];
  GPU_GROUP_MEMORY uint32_t indices[kThreads];
  const Parameters p = read_parameters(
      temperature, top_p, seed, top_k, min_p, kPerRow, group / parts_of(vocabulary), rows, vocabulary);
  sample_parts_group(
      logits, p, group, values, indices, own_thread, kThreads, part_maximum, part_argmax, part_weight, part_winner);
)";
constexpr char kRowsBody[] = R"(
  using namespace executorch_mlx_sample;
  GPU_GROUP_MEMORY float values[kThreads];
  GPU_GROUP_MEMORY uint32_t indices[kThreads];
  GPU_GROUP_MEMORY uint64_t keys[kSharedKeys];
  GPU_GROUP_MEMORY GPU_ATOMIC_UINT counter[2];
  const Parameters p =
      read_parameters(temperature, top_p, seed, top_k, min_p, kPerRow, group, rows, vocabulary);
  sample_rows_group(
      logits, p, group, part_maximum, part_argmax, part_weight, part_winner, values, indices, keys, kSharedKeys,
      counter, own_thread, kThreads, all_keys, tokens);
)";

// The names of the inputs of both kernels, and of the outputs of sample_parts.
const std::vector<std::string> kInputNames = {"logits", "temperature", "top_p", "seed", "top_k", "min_p"};
const std::vector<std::string> kNumberNames = {"rows", "vocabulary"};
const std::vector<std::string> kPartNames = {"part_maximum", "part_argmax", "part_weight", "part_winner"};

// Runs one of the kernels in `groups` groups of `threads` threads.
class SampleKernel {
 public:
  SampleKernel(const char* name, const std::vector<std::string>& inputs, const std::vector<std::string>& outputs,
      const char* body, mx::Stream stream) {
    if (is_metal(stream)) {
      metal_.emplace(name, inputs, outputs, std::string(kMetalPrologue) + body, kSampleKernelText);
    } else {
      cuda_.emplace(name, inputs, std::vector<std::string>(), outputs, kNumberNames, std::string(kCudaPrologue) + body,
          /*attributes=*/"", std::string(kCudaHeader) + kSampleKernelText);
    }
  }

  std::vector<mx::array> operator()(const std::vector<mx::array>& inputs, const std::vector<mx::Shape>& shapes,
      const std::vector<mx::Dtype>& dtypes, int groups, int threads, const Constants& constants,
      mx::Stream stream) const {
    if (cuda_) {
      const mx::Shape& sizes = inputs[0].shape();
      return (*cuda_)({.inputs = inputs,
                          .weights = {},
                          .shapes = shapes,
                          .dtype = dtypes[0],
                          .numbers = {sizes.begin(), sizes.end()},
                          .blocks = groups,
                          .threads = threads,
                          .dtypes = dtypes,
                          .leaves_gaps = true}, // what a greedy draw does not need
          constants, stream);
    }
    return (*metal_)(inputs, shapes, dtypes, groups, threads, constants, stream);
  }

 private:
  std::optional<SequenceKernel> cuda_;
  std::optional<MetalKernel> metal_;
};

// Copies the parameters to the memory of the GPU. MLX keeps single numbers in that of the host, and there are hundreds
// of blocks that would read them from there. They are read while the kernel that computes the logits still runs: the
// logits are an input only to put the kernel in their sequence.
constexpr char kParametersBody[] = R"(
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const float temperature = temperatures[min(i, uint32_t(count0 - 1))];
  const float top_p = top_ps[min(i, uint32_t(count1 - 1))];
  const int64_t seed = seeds[min(i, uint32_t(count2 - 1))];
  const int64_t top_k = top_ks[min(i, uint32_t(count3 - 1))];
  const float min_p = min_ps[min(i, uint32_t(count4 - 1))];
  wait_for_inputs();
  if (i < count0) {
    own_temperatures[i] = temperature;
  }
  if (i < count1) {
    own_top_ps[i] = top_p;
  }
  if (i < count2) {
    own_seeds[i] = seed;
  }
  if (i < count3) {
    own_top_ks[i] = top_k;
  }
  if (i < count4) {
    own_min_ps[i] = min_p;
  }
)";

std::vector<mx::array> on_gpu(const std::vector<mx::array>& parameters, const mx::array& logits, mx::Stream stream) {
  static const SequenceKernel kernel("parameters_of_draws",
      {"temperatures", "top_ps", "seeds", "top_ks", "min_ps", "logits"}, {},
      {"own_temperatures", "own_top_ps", "own_seeds", "own_top_ks", "own_min_ps"},
      {"count0", "count1", "count2", "count3", "count4"}, kParametersBody);
  SequenceKernel::Call call{.inputs = parameters,
      .weights = {},
      .shapes = {},
      .dtype = mx::float32,
      .numbers = {},
      .blocks = blocks_of(logits.shape(0), kWarp),
      .threads = kWarp,
      .early = {0, 1, 2, 3, 4}};
  for (const auto& x : parameters) {
    call.shapes.push_back(x.shape());
    call.dtypes.push_back(x.dtype());
    call.numbers.push_back(static_cast<int>(x.size()));
  }
  call.inputs.push_back(logits);
  return kernel(std::move(call), {}, stream);
}

std::vector<std::string> concatenated(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Returns the flags of the parameters that have one element for each row.
int per_row_flags(const SampleInputs& inputs) {
  const auto bit = [](const std::optional<mx::array>& x, int bit) { return x && x->size() > 1 ? bit : 0; };
  return bit(inputs.temperature, kernel::kTemperaturePerRow) | bit(inputs.top_p, kernel::kTopPPerRow) |
      bit(inputs.seed, kernel::kSeedPerRow) | bit(inputs.top_k, kernel::kTopKPerRow) |
      bit(inputs.min_p, kernel::kMinPPerRow);
}

} // namespace

std::optional<mx::array> sample(const SampleInputs& inputs, mx::Stream stream) {
  const int64_t num_keys = int64_t{inputs.logits.shape(0)} * kernel::power_of_two_from(inputs.logits.shape(1));
  if (!is_used(Kernel::sample, stream) || num_keys > std::numeric_limits<int>::max()) {
    return std::nullopt;
  }
  static const SampleKernel parts_kernel("sample_parts", kInputNames, kPartNames, kPartsBody, stream);
  static const SampleKernel rows_kernel(
      "sample_rows", concatenated(kInputNames, kPartNames), {"all_keys", "tokens"}, kRowsBody, stream);
  const int rows = inputs.logits.shape(0);
  const int vocabulary = inputs.logits.shape(1);
  const int parts = static_cast<int>(kernel::parts_of(vocabulary));
  // The kernels convert the logits themselves.
  const bool is_converted = inputs.logits.dtype() == mx::float32 && is_lazy(inputs.logits, "AsType") &&
      is_half(inputs.logits.inputs()[0].dtype());
  const mx::array& logits = is_converted ? inputs.logits.inputs()[0] : inputs.logits;
  std::vector<mx::array> operands{inputs.temperature, inputs.top_p, inputs.seed,
      inputs.top_k.value_or(mx::array(int64_t{0})), inputs.min_p.value_or(mx::array(0.0f))};
  if (is_cuda(stream)) {
    operands = on_gpu(operands, logits, stream);
  }
  operands.insert(operands.begin(), logits);
  const auto constants = [&](int threads) {
    return Constants{{"kPerRow", per_row_flags(inputs)}, {"kThreads", threads}, {"kSharedKeys", kSharedKeys}};
  };
  // Metal passes an array of fewer than 8 elements in another address space.
  const mx::Shape summary_shape{is_metal(stream) ? std::max(rows * parts, 8) : rows * parts};
  const auto summaries = parts_kernel(operands, std::vector(kPartNames.size(), summary_shape),
      {mx::float32, mx::uint32, mx::float32, mx::uint32}, rows * parts, kPartThreads, constants(kPartThreads), stream);
  operands.insert(operands.end(), summaries.begin(), summaries.end());
  return rows_kernel(operands, {{static_cast<int>(num_keys)}, {rows}}, {mx::uint64, mx::int64}, rows, kRowThreads,
      constants(kRowThreads), stream)[1];
}

namespace {

template <typename T>
void draw_on_host(const SampleInputs& inputs, mx::array& tokens) {
  const T* logits = inputs.logits.data<T>();
  const auto rows = static_cast<uint32_t>(inputs.logits.shape(0));
  const auto vocabulary = static_cast<uint32_t>(inputs.logits.shape(1));
  const uint32_t parts = kernel::parts_of(vocabulary);
  const int64_t no_top_k = 0;
  const float no_min_p = 0;
  std::vector<float> maximum(parts), weight(parts);
  std::vector<uint32_t> argmax(parts), winner(parts);
  std::vector<uint64_t> keys(kernel::power_of_two_from(vocabulary));
  for (uint32_t row = 0; row < rows; ++row) {
    const auto p = kernel::read_parameters(inputs.temperature.data<float>(), inputs.top_p.data<float>(),
        inputs.seed.data<int64_t>(), inputs.top_k ? inputs.top_k->data<int64_t>() : &no_top_k,
        inputs.min_p ? inputs.min_p->data<float>() : &no_min_p, per_row_flags(inputs), row, rows, vocabulary);
    float values[1];
    uint32_t indices[1];
    std::atomic<uint32_t> counter[2];
    const T* from = logits + static_cast<size_t>(row) * vocabulary;
    for (uint32_t part = 0; part < parts; ++part) {
      kernel::sample_parts_group(
          from, p, part, values, indices, 0, 1, maximum.data(), argmax.data(), weight.data(), winner.data());
    }
    kernel::sample_rows_group(from, p, 0, maximum.data(), argmax.data(), weight.data(), winner.data(), values, indices,
        static_cast<uint64_t*>(nullptr), 0, counter, 0, 1, keys.data(), tokens.data<int64_t>() + row);
  }
}

} // namespace

mx::array sample_on_host(const SampleInputs& inputs) {
  auto tokens = allocate({inputs.logits.shape(0)}, mx::int64);
  switch (inputs.logits.dtype()) {
    case mx::float32:
      draw_on_host<float>(inputs, tokens);
      break;
    case mx::float16:
      draw_on_host<mx::float16_t>(inputs, tokens);
      break;
    default:
      draw_on_host<mx::bfloat16_t>(inputs, tokens);
  }
  return tokens;
}

} // namespace executorch_mlx::gpu
