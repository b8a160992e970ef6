// Turns exceptions into an Error and a line of the log, at the entry points of the library.
#pragma once

#include <executorch/runtime/platform/log.h>

#include <string>

#include "error.h"
#include "memory/limit.h"

namespace executorch_mlx {

// Replaces characters that are not printable ASCII by question marks. Names in a message come from the program, and a
// Python process that reads the log may abort at invalid UTF-8.
inline std::string printable(const char* message) {
  std::string result = message;
  for (char& c : result) {
    c = c >= ' ' && c <= '~' ? c : '?';
  }
  return result;
}

inline Error report(const char* what, Error code, const char* message) {
  const std::string line = printable(message);
  ET_LOG(Error, "MLX %s: %s", what, line.c_str());
  if (code == Error::MemoryAllocationFailed) {
    set_memory_error(line);
  }
  return code;
}

// In a handler of an exception: reports the exception. Throws if there is no memory for the message.
inline Error report_exception(const char* what) {
  try {
    throw;
  } catch (const Failure& failure) {
    return report(what, failure.code, failure.what());
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) {
      return report(what, Error::MemoryAllocationFailed, str("out of memory: ", error.what()).c_str());
    }
    return report(what, Error::Internal, error.what());
  } catch (...) {
    return report(what, Error::Internal, "unknown exception");
  }
}

// Runs `body`, which does the work that `what` names. Turns an exception into a line of the log and an Error.
template <typename Body>
Error guarded(const char* what, Body&& body) noexcept {
  try {
    body();
    return Error::Ok;
  } catch (...) {
    try {
      return report_exception(what);
    } catch (...) {
      ET_LOG(Error, "MLX %s: out of memory", what);
      return Error::MemoryAllocationFailed;
    }
  }
}

} // namespace executorch_mlx
