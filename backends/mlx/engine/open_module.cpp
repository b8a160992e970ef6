#include "open_module.h"

#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/platform/runtime.h>
#include <executorch_mlx/delegate.h>

#include <fstream>

#include "check.h"
#include "fork_check.h"

namespace executorch_mlx::engine {

using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::Program;

namespace {

// Returned by executorch_mlx_register() if another library registered an MLXBackend first.
constexpr int kOtherBackend = 1;

} // namespace

std::unique_ptr<Module> open_module(const std::string& path, const std::string& device, bool has_low_priority) {
  check_not_forked();
  executorch::runtime::runtime_init();
  const int registered = executorch_mlx_register();
  check(registered <= kOtherBackend, EXECUTORCH_MLX_FAILED,
      "cannot register the backend MLXBackend: ", describe(static_cast<Error>(registered)));
  // A std::ifstream can open a directory, but it cannot read from a directory.
  check(std::ifstream(path).peek() != std::ifstream::traits_type::eof(), EXECUTORCH_MLX_NOT_FOUND, path,
      ": the file is unreadable or empty");
  check_argument(
      device.empty() || device == "cpu" || device == "gpu", "device: got '", device, "', expected cpu or gpu");
  auto module = std::make_unique<Module>(path, Module::LoadMode::Mmap);

  executorch::runtime::BackendOptions<2> options;
  executorch::runtime::LoadBackendOptionsMap map;
  Error error = device.empty() ? Error::Ok : options.set_option("device", device.c_str());
  if (has_low_priority && error == Error::Ok) {
    error = options.set_option("priority", "low");
  }
  error = error == Error::Ok ? map.set_options("MLXBackend", options.view()) : error;
  check_ok(error, "load options: ");
  error = module->load(map, Program::Verification::InternalConsistency);
  check_program(error == Error::Ok, path, ": not an ExecuTorch program (", describe(error), ")");
  return module;
}

} // namespace executorch_mlx::engine
