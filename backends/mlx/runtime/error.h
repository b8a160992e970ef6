// Exceptions inside the runtime. backend.cpp turns them into an ExecuTorch Error and one line of the log.
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
  const char* what() const noexcept override { return message_.c_str(); }

  Error code;

 private:
  std::string message_;
};

// A failure whose message already names the chain and the instruction.
class LocatedFailure : public Failure {
 public:
  using Failure::Failure;
};

// Concatenates its arguments as operator<< prints them.
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

// Throws a Failure with the code InvalidProgram unless `ok`. The other arguments are the parts of its message. Reports
// faults of the program itself, which make a call fail for any inputs.
template <typename... Parts>
void check_program(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(Error::InvalidProgram, parts...);
  }
}

// Throws a Failure with the code InvalidArgument unless `ok`. The other arguments are the parts of its message. Reports
// faults that depend on the inputs of the call.
template <typename... Parts>
void check_argument(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]] {
    fail(Error::InvalidArgument, parts...);
  }
}

} // namespace executorch_mlx
