// Builds strings from parts, mostly for messages.
#pragma once

#include <sstream>
#include <string>

namespace executorch_mlx::engine {

// Concatenates its arguments as operator<< prints them.
template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

} // namespace executorch_mlx::engine
