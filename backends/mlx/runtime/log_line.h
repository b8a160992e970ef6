// Lines of the log whose text comes from elsewhere: from a program, the system or a compiler.
#pragma once

#include <executorch/runtime/platform/log.h>

#include <string>
#include <string_view>

namespace executorch_mlx {

// Replaces characters that are not printable ASCII by question marks. A Python process that reads the log may abort at
// invalid UTF-8, and a line feed would begin a line that this library has not written.
inline std::string printable(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    c = c >= ' ' && c <= '~' ? c : '?';
  }
  return result;
}

// Logs an error as one line.
inline void log_error(std::string_view text) { ET_LOG(Error, "%s", printable(text).c_str()); }

} // namespace executorch_mlx
