// Opens a program of ExecuTorch.
#pragma once

#include <executorch/extension/module/module.h>

#include <memory>
#include <string>

namespace executorch_mlx::engine {

// Registers the delegate, and opens the file. `device` is "cpu", "gpu" or "" for the default. Loads no method. Throws
// EngineError, also in a process that was forked after MLX was loaded.
std::unique_ptr<executorch::extension::Module> open_module(
    const std::string& path, const std::string& device, bool has_low_priority = false);

} // namespace executorch_mlx::engine
