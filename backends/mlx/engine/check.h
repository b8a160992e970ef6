// Checks that throw, and their messages.
#pragma once

#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch_mlx/executorch_mlx.h>
#include <executorch_mlx/memory.h>

#include <stdexcept>
#include <string>

#include "str.h"

namespace executorch_mlx::engine {

// What the functions of the engine throw. c_api.cpp turns it into a status and a message.
class EngineError : public std::runtime_error {
 public:
  EngineError(executorch_mlx_status status, const std::string& message) : std::runtime_error(message), status(status) {}

  executorch_mlx_status status;
};

// Throws EngineError unless `ok`. The other arguments are the parts of its message.
template <typename... Parts>
void check(bool ok, executorch_mlx_status status, const Parts&... message) {
  if (!ok) [[unlikely]] {
    throw EngineError(status, str(message...));
  }
}

// check() for errors in a request or another argument: the status is INVALID_ARGUMENT.
template <typename... Parts>
void check_argument(bool ok, const Parts&... message) {
  check(ok, EXECUTORCH_MLX_INVALID_ARGUMENT, message...);
}

// check() for errors in a file: the status is INVALID_PROGRAM.
template <typename... Parts>
void check_program(bool ok, const Parts&... message) {
  check(ok, EXECUTORCH_MLX_INVALID_PROGRAM, message...);
}

// Describes an error of ExecuTorch for a message. ExecuTorch logs the details before it returns the error.
inline std::string describe(executorch::runtime::Error error) {
  return str(executorch::runtime::to_string(error), ", see the log for details");
}

// Throws EngineError unless `error` is Ok: with OUT_OF_MEMORY if memory is the reason, with INVALID_PROGRAM if weights
// are missing, else with FAILED.
template <typename... Parts>
void check_ok(executorch::runtime::Error error, const Parts&... message) {
  using executorch::runtime::Error;
  if (error == Error::MemoryAllocationFailed) {
    throw EngineError(EXECUTORCH_MLX_OUT_OF_MEMORY, str(message..., executorch_mlx_memory_error()));
  }
  if (error == Error::NotFound) { // the engine has checked that the backends exist
    throw EngineError(EXECUTORCH_MLX_INVALID_PROGRAM,
        str(message..., "weights are missing in the program, or its weights file is of another program; ",
            "see the log for details"));
  }
  if (error != Error::Ok) [[unlikely]] {
    throw EngineError(EXECUTORCH_MLX_FAILED, str(message..., describe(error)));
  }
}

// Whether the elements of a tensor can be read. The tensor of a damaged program may have no memory.
inline bool has_memory(const executorch::aten::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.const_data_ptr() != nullptr;
}

inline std::string dtype_name(executorch::aten::ScalarType type) { return executorch::runtime::toString(type); }

} // namespace executorch_mlx::engine
