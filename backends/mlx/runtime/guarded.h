// Turns exceptions into an Error and a line of the log, at the entry points of the library.
#pragma once

#include <executorch/runtime/platform/log.h>

#include <string>

#include "error.h"
#include "log_line.h"
#include "memory/limit.h"

namespace executorch_mlx {

inline Error report(const char* what, Error code, const char* message) {
  log_error(str("MLX ", what, ": ", message));
  if (code == Error::MemoryAllocationFailed) {
    set_memory_error(printable(message));
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
