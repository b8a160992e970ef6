// What this library uses of MLX beyond its public operations. This folder has all of it, behind small functions: the
// memory of arrays (arrays.h), lazy graphs (graph.h), tasks on the stream of a CPU (cpu_task.h) and MLX's backend for
// CUDA (cuda.h).
#pragma once

#include <mlx/version.h>

#include <string>

#include "error.h"

namespace executorch_mlx::internals {

// The environment variable that turns the functions of this folder off if it is "0".
inline constexpr char kVariable[] = "EXECUTORCH_MLX_INTERNALS";

// Why these functions cannot be used with this version of MLX, or "".
inline std::string version_mismatch(const std::string& version) {
  const std::string expected = str(MLX_VERSION_MAJOR, ".", MLX_VERSION_MINOR, ".", MLX_VERSION_PATCH);
  return version == expected
      ? ""
      : str("got MLX ", version, ", expected the version ", expected, " with which this library was built");
}

// Whether MLX has the version with which this library was built, and the functions of this folder have passed a
// self-test. If not, the log says so once, and callers use MLX's public operations. The first call evaluates arrays.
bool are_usable();

} // namespace executorch_mlx::internals
