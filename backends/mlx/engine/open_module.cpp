#include "open_module.h"

#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/platform/runtime.h>
#include <executorch_mlx/delegate.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include "check.h"
#include "fork_check.h"

namespace executorch_mlx::engine {

using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::Program;

namespace {

// Returned by executorch_mlx_register() if another library registered an MLXBackend first.
constexpr int kOtherBackend = 1;

// The method of a program that returns the name of its weights file, which is in the folder of the program.
constexpr char kWeightsFile[] = "get_weights_file";

bool is_readable(const std::string& path) {
  // A std::ifstream can open a directory, but it cannot read from a directory.
  return std::ifstream(path).peek() != std::ifstream::traits_type::eof();
}

// Returns the path of the weights file of the program at `path`, or nullopt if its weights are in the program. Throws
// EngineError if the file is missing.
std::optional<std::string> find_weights_file(Module& module, const std::string& path) {
  const auto names = module.method_names();
  if (!names.ok() || !names->contains(kWeightsFile)) {
    return std::nullopt;
  }
  const auto values = module.execute(kWeightsFile);
  const bool is_text = values.ok() && values->size() == 1 && (*values)[0].isTensor() &&
      (*values)[0].toTensor().scalar_type() == executorch::aten::ScalarType::Byte;
  check_program(is_text, path, ": ", kWeightsFile, ": expected the name of a file");
  const auto& text = (*values)[0].toTensor();
  const std::string name(text.const_data_ptr<char>(), text.nbytes());
  check_program(std::filesystem::path(name).filename().string() == name && name != "..", path, ": ", kWeightsFile,
      ": got '", name, "', expected the name of a file in the same folder");
  const auto weights = (std::filesystem::path(path).parent_path() / name).string();
  check(is_readable(weights), EXECUTORCH_MLX_NOT_FOUND, path, ": its weights file ", weights,
      " is missing, unreadable or empty");
  return weights;
}

} // namespace

std::unique_ptr<Module> open_module(const std::string& path, const std::string& device, bool has_low_priority) {
  check_not_forked();
  executorch::runtime::runtime_init();
  const int registered = executorch_mlx_register();
  check(registered <= kOtherBackend, EXECUTORCH_MLX_FAILED,
      "cannot register the backend MLXBackend: ", describe(static_cast<Error>(registered)));
  check(is_readable(path), EXECUTORCH_MLX_NOT_FOUND, path, ": the file is unreadable or empty");
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
  if (const auto weights = find_weights_file(*module, path)) {
    module = std::make_unique<Module>(path, *weights, Module::LoadMode::Mmap);
    error = module->load(map, Program::Verification::InternalConsistency);
    check_program(error == Error::Ok, *weights, ": not a weights file (", describe(error), ")");
  }
  return module;
}

} // namespace executorch_mlx::engine
