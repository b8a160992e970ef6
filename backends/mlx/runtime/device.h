// The device that programs run on, and the stream that they share.
#pragma once

#include <mlx/mlx.h>

#include <string>
#include <vector>

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

// Evaluates arrays on a shared stream, one caller at a time. If MLX throws, first waits for the work
// that it has started, because the caller may free the memory of that work.
void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

} // namespace executorch_mlx
