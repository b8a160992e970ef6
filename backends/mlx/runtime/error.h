// How anything below the ExecuTorch boundary says no.
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

// A failure that says which instruction it is of.
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

// Refused because of what the program says, whatever it is given.
template <typename... Parts>
void check_program(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(Error::InvalidProgram, parts...);
  }
}

// Refused because of what came in with this call.
template <typename... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(Error::InvalidArgument, parts...);
  }
}

} // namespace executorch_mlx
