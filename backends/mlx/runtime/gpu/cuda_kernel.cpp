#include "cuda_kernel.h"

#include <utility>

namespace executorch_mlx::gpu {

namespace {

// The number of primitives that a kernel keeps: one for each combination of launch size, numbers, dtypes and constants.
constexpr size_t kMaxPrimitives = 256;

} // namespace

CudaKernel::CudaKernel(std::string name, std::vector<std::string> inputs, std::vector<std::string> outputs,
    std::vector<std::string> numbers, std::string body, std::string header)
    : name_(std::move(name)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)),
      numbers_(std::move(numbers)),
      body_(std::move(body)),
      header_(std::move(header)) {}

std::vector<mx::array> CudaKernel::operator()(Call call, const Constants& constants, mx::Stream stream) const {
  if (call.dtypes.empty()) {
    call.dtypes.assign(call.shapes.size(), call.inputs[0].dtype());
  }
  std::vector<int> key{stream.device.index};
  key.reserve(4 + call.dtypes.size() + call.inputs.size() + constants.size() + call.numbers.size());
  for (const auto dtype : call.dtypes) {
    key.push_back(static_cast<int>(dtype.val()));
  }
  for (const auto& x : call.inputs) {
    key.push_back(static_cast<int>(x.dtype().val()));
  }
  for (const auto& constant : constants) {
    key.push_back(constant.second);
  }
  const size_t size_of_source = key.size();
  key.insert(key.end(), {call.blocks, call.threads, stream.index});
  key.insert(key.end(), call.numbers.begin(), call.numbers.end());
  std::lock_guard lock(mutex_);
  if (const auto found = primitives_.find(key); found != primitives_.end()) {
    return mx::array::make_arrays(std::move(call.shapes), call.dtypes, found->second, call.inputs);
  }
  std::string& binary = binaries_[{key.begin(), key.begin() + static_cast<ptrdiff_t>(size_of_source)}];
  if (binary.empty()) {
    binary = compile(name_, source(call, constants), stream);
  }
  const std::vector<mx::fast::ScalarArg> numbers(call.numbers.begin(), call.numbers.end());
  auto results = mx::fast::precompiled_cuda_kernel(name_, binary, call.inputs, call.shapes, call.dtypes, numbers,
      {call.blocks * call.threads, 1, 1}, {call.threads, 1, 1}, /*shared_memory=*/0, std::nullopt,
      /*ensure_row_contiguous=*/true, stream);
  if (primitives_.size() == kMaxPrimitives) {
    primitives_.clear();
  }
  primitives_[std::move(key)] = results[0].primitive_ptr();
  return results;
}

std::string CudaKernel::source(const Call& call, const Constants& constants) const {
  std::vector<std::string> parameters;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    parameters.push_back(input_parameter(call.inputs[i].dtype(), inputs_[i]));
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    parameters.push_back(output_parameter(call.dtypes[i], outputs_[i]));
  }
  for (const auto& number : numbers_) {
    parameters.push_back(number_parameter(number));
  }
  return kernel_source(name_, call.inputs[0].dtype(), constants, parameters, body_, header_);
}

} // namespace executorch_mlx::gpu
