// The device that programs run on, and the stream that they share.
#pragma once

#include <mlx/mlx.h>

#include <string>

namespace executorch_mlx {

namespace mx = mlx::core;

// "cpu", "gpu", or "" for MLX's default device. Throws Failure if the device is not available.
mx::Device find_device(const std::string& name);
const char* name(mx::Device device);

// As find_device(), but "" means the environment variable EXECUTORCH_MLX_DEVICE if it is set.
mx::Device chosen_device(const std::string& name);

// Returns the one stream of a device. An ordinary MLX stream belongs to the thread that made it and
// costs an OS thread that is never freed. Any thread may use this one, but only one at a time may
// evaluate on it.
mx::Stream shared_stream(mx::Device device);

} // namespace executorch_mlx
