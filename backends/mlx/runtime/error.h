// Errors inside the runtime. backend.cpp turns them into ExecuTorch's Error and a log line.
#pragma once

#include <executorch/runtime/core/error.h>

#include <exception>
#include <sstream>
#include <string>
#include <utility>

namespace executorch_mlx {

using executorch::runtime::Error;

class Failure : public std::exception {
 public:
  Failure(Error code, std::string message) : code(code), message_(std::move(message)) {}
  const char* what() const noexcept override {
    return message_.c_str();
  }

  Error code;

 private:
  std::string message_;
};

// A failure whose message names the instruction.
class LocatedFailure : public Failure {
 public:
  using Failure::Failure;
};

template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
[[noreturn]] void fail(Error code, const Parts&... parts) {
  throw Failure(code, str(parts...));
}

// Throws if the program is invalid, whatever its inputs are.
template <typename... Parts>
void check_program(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(Error::InvalidProgram, parts...);
  }
}

// Throws if the arguments of this call are invalid.
template <typename... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(Error::InvalidArgument, parts...);
  }
}

} // namespace executorch_mlx
