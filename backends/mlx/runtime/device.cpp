#include "device.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include "error.h"

namespace executorch_mlx {

namespace {

// Products of float32 matrices on an NVIDIA GPU are computed in float32. MLX would round their operands to TF32, which
// has 10 bits of mantissa. If the environment has MLX_ENABLE_TF32, that value stays.
void turn_tf32_off() { [[maybe_unused]] static const int done = setenv("MLX_ENABLE_TF32", "0", /*overwrite=*/0); }

} // namespace

mx::Device find_device(const std::string& name, const char* origin) {
  check_argument(
      name.empty() || name == "cpu" || name == "gpu", origin, ": got \"", name, "\", expected \"cpu\" or \"gpu\"");
  if (mx::cu::is_available()) {
    // Without a GPU, a build of MLX for CUDA cannot allocate memory for the CPU either.
    if (mx::device_count(mx::Device::gpu) == 0) {
      fail(Error::NotSupported,
          "device: no NVIDIA GPU is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES), and this "
          "build of MLX needs one; install mlx[cpu] to run on the CPU");
    }
    turn_tf32_off();
  }
  if (name.empty()) {
    return mx::default_device();
  }
  const mx::Device device(name == "cpu" ? mx::Device::cpu : mx::Device::gpu);
  if (!mx::is_available(device)) {
    fail(Error::NotSupported, origin, ": got \"", name, "\", which this build of MLX does not support");
  }
  return device;
}

mx::Device chosen_device(const std::string& name) {
  constexpr const char* kVariable = "EXECUTORCH_MLX_DEVICE";
  const char* const value = std::getenv(kVariable);
  return name.empty() && value != nullptr ? find_device(value, kVariable) : find_device(name);
}

const char* name(mx::Device device) { return device.type == mx::Device::cpu ? "cpu" : "gpu"; }

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
