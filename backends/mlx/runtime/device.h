// The devices that programs run on, and their MLX streams.
#pragma once

#include <mlx/mlx.h>

#include <memory>
#include <string>

namespace executorch_mlx {

namespace mx = mlx::core;

// Returns the device called "cpu" or "gpu", or MLX's default device for "". Throws Failure if the name is unknown, the
// device is not available, or a build of MLX for CUDA sees no GPU. `origin` says in the message where the name is from.
mx::Device find_device(const std::string& name, const char* origin = "device");

// Returns "cpu" or "gpu".
const char* name(mx::Device device);

// Like find_device(), but for "" returns the device that the environment variable EXECUTORCH_MLX_DEVICE names, if
// the variable is set.
mx::Device chosen_device(const std::string& name);

// A stream that a program uses as long as this exists. MLX never frees a stream, so a device has a fixed number of
// them. Programs get different streams as far as possible, so that they do not wait for each other. Any thread may use
// such a stream, but only one thread at a time may evaluate arrays on it: see Evaluation. With `has_low_priority`, the
// thread of a stream of the CPU has a low priority.
class ProgramStream {
 public:
  explicit ProgramStream(mx::Device device, bool has_low_priority = false);
  ~ProgramStream();
  ProgramStream(const ProgramStream&) = delete;
  ProgramStream& operator=(const ProgramStream&) = delete;

  const mx::Stream stream;
};

// The stream of the CPU for operations that a program runs there beside `stream`: `stream` itself if it is one of the
// CPU, else one that only the programs of `stream` use.
mx::Stream host_stream(mx::Stream stream);

} // namespace executorch_mlx
