// Checks that throw, and their messages.
#pragma once

#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch_mlx/llm_runner.h>
#include <executorch_mlx/memory.h>

#include <sstream>
#include <string>

namespace executorch_mlx {

// Concatenates its arguments as operator<< prints them.
template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Throws LlmError unless `ok`. The other arguments are the parts of its message.
template <typename... Parts>
void check(bool ok, const Parts&... message) {
  if (!ok) [[unlikely]] {
    throw LlmError(str(message...));
  }
}

// Throws LlmArgumentError unless `ok`. The other arguments are the parts of its message.
template <typename... Parts>
void check_argument(bool ok, const Parts&... message) {
  if (!ok) [[unlikely]] {
    throw LlmArgumentError(str(message...));
  }
}

// Describes an error of ExecuTorch for a message. ExecuTorch logs the details before it returns the error.
inline std::string describe(executorch::runtime::Error error) {
  return str(executorch::runtime::to_string(error), ", see the log for details");
}

// Throws LlmMemoryError or LlmError unless `error` is Ok.
template <typename... Parts>
void check_status(executorch::runtime::Error error, const Parts&... message) {
  using executorch::runtime::Error;
  if (error == Error::MemoryAllocationFailed) {
    throw LlmMemoryError(str(message..., executorch_mlx_memory_error()));
  }
  if (error != Error::Ok) [[unlikely]] {
    throw LlmError(str(message..., describe(error)));
  }
}

inline std::string dtype_name(executorch::aten::ScalarType type) {
  return executorch::runtime::toString(type);
}

} // namespace executorch_mlx
