#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "error.h"
#include "mlx_internals/cpu_task.h"
#include "thread_priority.h"

namespace executorch_mlx {

namespace {

// Products of float32 matrices on an NVIDIA GPU are computed in float32. MLX would round their operands to TF32, which
// has 10 bits of mantissa. If the environment has MLX_ENABLE_TF32, that value stays.
void turn_tf32_off() { [[maybe_unused]] static const int done = setenv("MLX_ENABLE_TF32", "0", /*overwrite=*/0); }

constexpr int kStreamsOfDevice = 8;

struct Streams {
  std::mutex mutex;
  std::map<std::pair<mx::Device, bool>, std::vector<mx::Stream>> of_device; // and whether their priority is low
  std::map<int, mx::Stream> of_host; // by the index of a stream of the GPU
  std::map<int, int> programs; // how many use a stream, by its index
};

Streams& streams() {
  static auto* const instance = new Streams(); // never destroyed: programs may be unloaded at the end of the process
  return *instance;
}

// All streams of a device are made together, because making one while another thread evaluates is not safe in MLX.
std::vector<mx::Stream> make_streams(mx::Device device, bool has_low_priority, Streams& all) {
  const auto make = [&](mx::Device of) {
    const auto stream = mx::new_thread_unsafe_stream(of);
    if (has_low_priority && of == mx::Device::cpu) {
      internals::run_on_thread(stream, lower_thread_priority);
    }
    return stream;
  };
  std::vector<mx::Stream> result;
  for (int i = 0; i < kStreamsOfDevice; ++i) {
    result.push_back(make(device));
    if (device == mx::Device::gpu) {
      all.of_host.emplace(result.back().index, make(mx::Device::cpu));
    }
  }
  return result;
}

// The stream of the device that the fewest programs use.
mx::Stream take_stream(mx::Device device, bool has_low_priority) {
  auto& all = streams();
  std::lock_guard lock(all.mutex);
  auto& candidates = all.of_device[{device, has_low_priority}];
  if (candidates.empty()) {
    candidates = make_streams(device, has_low_priority, all);
  }
  const auto stream = *std::min_element(candidates.begin(), candidates.end(),
      [&](mx::Stream a, mx::Stream b) { return all.programs[a.index] < all.programs[b.index]; });
  ++all.programs[stream.index];
  return stream;
}

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

ProgramStream::ProgramStream(mx::Device device, bool has_low_priority)
    : stream(take_stream(device, has_low_priority)) {}

ProgramStream::~ProgramStream() {
  std::lock_guard lock(streams().mutex);
  --streams().programs.at(stream.index);
}

mx::Stream host_stream(mx::Stream stream) {
  std::lock_guard lock(streams().mutex);
  const auto found = streams().of_host.find(stream.index);
  return found == streams().of_host.end() ? stream : found->second;
}

} // namespace executorch_mlx
