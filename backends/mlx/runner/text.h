// Messages out of parts.
#pragma once

#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch_mlx/llm_runner.h>

#include <sstream>
#include <string>

namespace executorch_mlx {

template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    throw LlmError(str(parts...));
  }
}

template <typename... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    throw LlmArgumentError(str(parts...));
  }
}

// ExecuTorch has logged the details of an error by the time it returns one.
inline std::string because(executorch::runtime::Error error) {
  return str(executorch::runtime::to_string(error), ", see the log");
}

inline std::string dtype(executorch::aten::ScalarType type) {
  return executorch::runtime::toString(type);
}

} // namespace executorch_mlx
