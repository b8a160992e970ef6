// Messages out of parts.
#pragma once

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

} // namespace executorch_mlx
