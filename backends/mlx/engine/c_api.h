// What the files of the C API share.
#pragma once

#include <exception>
#include <new>
#include <utility>

#include "check.h"

namespace executorch_mlx::engine {

// Sets the message of executorch_mlx_last_error(), and returns `status`.
executorch_mlx_status report(executorch_mlx_status status, const char* message);

// Runs `body`, and turns what it throws into a status.
template <typename Body>
executorch_mlx_status guarded(Body&& body) {
  try {
    body();
    return EXECUTORCH_MLX_OK;
  } catch (const EngineError& error) {
    return report(error.status, error.what());
  } catch (const std::bad_alloc& error) {
    return report(EXECUTORCH_MLX_OUT_OF_MEMORY, error.what());
  } catch (const std::exception& error) {
    return report(EXECUTORCH_MLX_FAILED, error.what());
  } catch (...) {
    return report(EXECUTORCH_MLX_FAILED, "unknown exception");
  }
}

inline void check_not_null(const void* pointer, const char* argument) {
  check_argument(pointer != nullptr, argument, ": got null");
}

} // namespace executorch_mlx::engine
