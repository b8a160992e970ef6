#include "cuda_kernel.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <functional>
#include <optional>

#include "../error.h"

namespace executorch_mlx::gpu {

namespace {

// The number of primitives that a kernel keeps: one for each combination of launch size, dtypes and constants.
constexpr size_t kMaxPrimitives = 256;

// Source that includes `text` from a file in memory, or the text itself if there can be no such file. MLX hashes the
// source each time the kernel runs, so a short one saves the host time: 8% of a step of a small model. The file is
// never closed, because MLX compiles the kernel at its first use.
std::string included(const std::string& text) {
#if defined(__linux__)
  const int file = text.empty() ? -1 : memfd_create("executorch-mlx-kernel", MFD_CLOEXEC);
  if (file >= 0) {
    const std::string path = str("/proc/self/fd/", file);
    const auto size = static_cast<ssize_t>(text.size());
    if (write(file, text.data(), text.size()) == size && access(path.c_str(), R_OK) == 0) {
      return str("#include \"", path, "\"\n");
    }
    close(file);
  }
#endif
  return text;
}

// A comment with the parameters that a kernel has for the shapes of its inputs. MLX adds those that it finds in the
// source.
std::string shapes_of(const std::vector<std::string>& inputs, const std::string& body) {
  std::string comment = "//";
  for (const auto& input : inputs) {
    for (const char* suffix : {"_shape", "_strides", "_ndim"}) {
      comment += body.find(input + suffix) == std::string::npos ? "" : str(" ", input, suffix);
    }
  }
  return comment + "\n";
}

} // namespace

bool is_cuda(mx::Stream stream) {
  static const bool has_cuda = mx::cu::is_available();
  return has_cuda && stream.device == mx::Device::gpu;
}

// MLX caches compiled kernels on disk by their names, so a name contains the hash of the source.
CudaKernel::CudaKernel(
    const char* name, const std::vector<std::string>& inputs, const std::vector<std::string>& outputs,
    const std::string& body, const std::string& header)
    : make_(mx::fast::cuda_kernel(
          str("executorch_mlx_", name, "_", std::hex, std::hash<std::string>()(header + body)), inputs, outputs,
          shapes_of(inputs, body) + included(body), included(header))) {}

std::vector<mx::array> CudaKernel::operator()(
    std::vector<mx::array> inputs, std::vector<mx::Shape> shapes, int blocks, int threads, const Constants& constants,
    mx::Stream stream, std::vector<mx::Dtype> dtypes) const {
  if (dtypes.empty()) {
    dtypes.assign(shapes.size(), inputs[0].dtype());
  }
  std::vector<int> key;
  key.reserve(2 + dtypes.size() + 2 * inputs.size() + constants.size());
  key.insert(key.end(), {blocks, threads});
  for (const auto dtype : dtypes) {
    key.push_back(static_cast<int>(dtype.val()));
  }
  for (const auto& x : inputs) {
    key.push_back(static_cast<int>(x.dtype().val()));
    key.push_back(x.ndim() > 0);
  }
  for (const auto& constant : constants) {
    key.push_back(constant.second);
  }
  std::lock_guard lock(mutex_);
  if (const auto found = primitives_.find(key); found != primitives_.end()) {
    return mx::array::make_arrays(std::move(shapes), dtypes, found->second, std::move(inputs));
  }
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> arguments = {{"T", inputs[0].dtype()}};
  arguments.insert(arguments.end(), constants.begin(), constants.end());
  auto results = make_(
      inputs, shapes, dtypes, {blocks * threads, 1, 1}, {threads, 1, 1}, arguments, std::nullopt, /*verbose=*/false,
      stream);
  if (primitives_.size() == kMaxPrimitives) {
    primitives_.clear();
  }
  primitives_[key] = results[0].primitive_ptr();
  return results;
}

} // namespace executorch_mlx::gpu
