#include "device.h"

#include <mlx/backend/cuda/cuda.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "error.h"

namespace executorch_mlx {

namespace {

// Prepares MLX for this process: the CPU is its default device if it was built for GPUs and none is visible, and
// products of float32 matrices on an NVIDIA GPU are computed in float32. MLX would round their operands to TF32, which
// has 10 bits of mantissa. If the environment has MLX_ENABLE_TF32, that value stays.
void prepare_mlx() {
  [[maybe_unused]] static const bool is_prepared = [] {
    if (mx::cu::is_available()) {
      setenv("MLX_ENABLE_TF32", "0", /*overwrite=*/0);
    }
    if (!mx::is_available(mx::default_device())) {
      mx::set_default_device(mx::Device::cpu);
    }
    return true;
  }();
}

} // namespace

mx::Device find_device(const std::string& name) {
  prepare_mlx();
  if (name.empty()) {
    return mx::default_device();
  }
  check_argument(name == "cpu" || name == "gpu", "device: got \"", name, "\", expected \"cpu\" or \"gpu\"");
  const mx::Device device(name == "cpu" ? mx::Device::cpu : mx::Device::gpu);
  if (!mx::is_available(device)) {
    const bool lacks_gpu = device == mx::Device::gpu && mx::cu::is_available();
    fail(
        Error::NotSupported, "device: got \"", name, "\", but ",
        lacks_gpu ? "no NVIDIA GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES"
                  : "this build of MLX does not support it");
  }
  return device;
}

mx::Device chosen_device(const std::string& name) {
  const char* environment = std::getenv("EXECUTORCH_MLX_DEVICE");
  return find_device(name.empty() && environment != nullptr ? environment : name);
}

const char* name(mx::Device device) {
  return device.type == mx::Device::cpu ? "cpu" : "gpu";
}

mx::Stream shared_stream(mx::Device device) {
  static std::mutex mutex;
  static std::map<mx::Device, mx::Stream> streams;
  std::lock_guard lock(mutex);
  auto found = streams.find(device);
  if (found == streams.end()) {
    found = streams.emplace(device, mx::new_thread_unsafe_stream(device)).first;
  }
  return found->second;
}

} // namespace executorch_mlx
