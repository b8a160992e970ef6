#include "device.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include "error.h"

namespace executorch_mlx {

mx::Device find_device(const std::string& name) {
  if (name.empty()) {
    return mx::default_device();
  }
  check_argument(name == "cpu" || name == "gpu", "device: got \"", name, "\", expected \"cpu\" or \"gpu\"");
  const mx::Device device(name == "cpu" ? mx::Device::cpu : mx::Device::gpu);
  if (!mx::is_available(device)) {
    fail(Error::NotSupported, "device: this build of MLX does not support ", name);
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
