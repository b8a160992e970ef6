// The device a program runs on and the one stream it shares with all others.
#pragma once

#include <mlx/mlx.h>

#include <mutex>
#include <string>
#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

// "cpu", "gpu", or "" for MLX's default. Throws Failure if there is none such.
mx::Device find_device(const std::string& name);
const char* name(mx::Device device);

// The same, where "" is the environment's EXECUTORCH_MLX_DEVICE before MLX's default.
mx::Device chosen_device(const std::string& name);

// MLX's streams belong to the thread that made them, and each costs an OS thread
// for good. So there is one for a device and the process, of the kind that any
// thread may use; it is not safe to evaluate on it from two threads at once.
mx::Stream shared_stream(mx::Device device);

// Evaluates on shared streams, one caller at a time. If MLX throws, waits for
// what it had already set going, whose memory the caller may be about to free.
void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

} // namespace executorch_mlx
