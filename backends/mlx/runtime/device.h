// The devices that programs run on. All programs on one device share one MLX stream.
#pragma once

#include <mlx/mlx.h>

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

// Returns the stream that all programs on `device` share. An ordinary MLX stream belongs to the thread that created
// it, and its worker thread is never freed. Any thread may use the shared stream, but only one thread at a time may
// evaluate arrays on it.
mx::Stream shared_stream(mx::Device device);

} // namespace executorch_mlx
