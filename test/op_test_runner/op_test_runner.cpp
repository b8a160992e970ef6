// Runs a method of a program on inputs from files, and writes the outputs to files. Does not compare the outputs with
// anything: the tests that call this tool compare them. ExecuTorch's own tool for this purpose has the same name.
//
// op_test_runner MODEL.pte --inputs IN [--inputs IN ...] --outputs OUT [--method NAME] [--profile FILE.etdp] [--times]
//
// The method is called once for each --inputs, in order. Buffers keep their values between the calls. Call k, counted
// from 0, reads its inputs from IN/0.tensor, IN/1.tensor, ... of the k-th folder IN, and writes its outputs to
// OUT/k/0.tensor, OUT/k/1.tensor, .... --profile times each instruction, for ExecuTorch's Inspector. --times
// prints the seconds of each call, one in a line.
//
// Format of a .tensor file, little-endian:
//
//   char[8]       "MLXTNSR" and a zero byte
//   int32         ScalarType, as ExecuTorch numbers them
//   int32         rank
//   int64[rank]   sizes
//   ...           elements, row-major
//
// Exit status: 0; 1 if the program fails or a file cannot be read or written; 2 if the command line is invalid.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch_mlx/delegate.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "profile.h"

namespace executorch_mlx::engine {

namespace {

namespace fs = std::filesystem;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::EValue;

constexpr std::array<char, 8> kMagic = {'M', 'L', 'X', 'T', 'N', 'S', 'R', '\0'};
constexpr int32_t kMaxRank = 16;

constexpr const char* kUsage =
    "usage: op_test_runner MODEL.pte --inputs IN [--inputs IN ...] --outputs OUT [options]\n\n"
    "Runs a method on inputs from files and writes the outputs to files.\n\n"
    "  --inputs IN     folder with the inputs 0.tensor, 1.tensor, ...; repeat --inputs for several calls\n"
    "  --outputs OUT   folder for the outputs; call k, counted from 0, writes to OUT/k\n"
    "  --method NAME   the method to run (default: forward)\n"
    "  --profile FILE  time each instruction, for ExecuTorch's Inspector; this is slower\n"
    "  --times         print the seconds of each call\n";

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Arguments {
  std::string model;
  std::vector<fs::path> inputs;
  fs::path outputs;
  std::string method = "forward";
  std::string profile;
  bool prints_times = false;
};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(str(parts...));
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (!argument.starts_with("--")) {
      if (!arguments.model.empty()) {
        throw UsageError(str("unexpected argument '", argument, "': the model is ", arguments.model));
      }
      arguments.model = argument;
      continue;
    }
    if (argument == "--times") {
      arguments.prints_times = true;
      continue;
    }
    if (argument != "--inputs" && argument != "--outputs" && argument != "--method" && argument != "--profile") {
      throw UsageError(str(argument, ": unknown option"));
    }
    if (++i == argc) {
      throw UsageError(str(argument, ": missing value"));
    }
    if (argument == "--inputs") {
      arguments.inputs.emplace_back(argv[i]);
    } else if (argument == "--outputs") {
      arguments.outputs = argv[i];
    } else if (argument == "--profile") {
      arguments.profile = argv[i];
    } else {
      arguments.method = argv[i];
    }
  }
  if (arguments.model.empty() || arguments.inputs.empty() || arguments.outputs.empty()) {
    throw UsageError("expected MODEL.pte, --inputs and --outputs");
  }
  return arguments;
}

// Reads a value of a file's header at `offset` and advances `offset` past it. `path` is for messages.
template <typename T>
T read_value(const std::vector<char>& bytes, size_t& offset, const fs::path& path) {
  T value;
  if (bytes.size() - offset < sizeof(T)) {
    fail(path.string(), ": incomplete header");
  }
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  offset += sizeof(T);
  return value;
}

TensorPtr read_tensor(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    fail(path.string(), ": cannot read the file");
  }
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  size_t offset = 0;
  if (read_value<std::array<char, 8>>(bytes, offset, path) != kMagic) {
    fail(path.string(), ": not a .tensor file");
  }
  const auto type = static_cast<ScalarType>(read_value<int32_t>(bytes, offset, path));
  const auto rank = read_value<int32_t>(bytes, offset, path);
  if (!executorch::runtime::isValid(type) || rank < 0 || rank > kMaxRank) {
    fail(path.string(), ": invalid header: ScalarType ", static_cast<int>(type), ", rank ", rank);
  }
  std::vector<SizesType> sizes;
  size_t expected = executorch::runtime::elementSize(type);
  for (int32_t i = 0; i < rank; ++i) {
    const auto size = read_value<int64_t>(bytes, offset, path);
    if (size < 0 || size > INT32_MAX) {
      fail(path.string(), ": got size ", size, " on axis ", i, ", expected 0 to ", INT32_MAX);
    }
    sizes.push_back(static_cast<SizesType>(size));
    expected *= static_cast<size_t>(size);
  }
  if (bytes.size() - offset != expected) {
    fail(path.string(), ": got ", bytes.size() - offset, " bytes of elements, expected ", expected);
  }
  const auto* elements = reinterpret_cast<const uint8_t*>(bytes.data() + offset);
  // This overload of make_tensor_ptr() takes the elements as raw bytes. The two empty lists, for the dim_order and the
  // strides, stand for row-major order.
  return make_tensor_ptr(std::move(sizes), std::vector<uint8_t>(elements, elements + expected), {}, {}, type);
}

// Reads 0.tensor, 1.tensor, ... in `folder`, up to the first number without a file.
std::vector<TensorPtr> read_inputs(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    fail(folder.string(), ": not a folder");
  }
  std::vector<TensorPtr> tensors;
  while (true) {
    const auto path = folder / str(tensors.size(), ".tensor");
    if (!fs::exists(path)) {
      return tensors;
    }
    tensors.push_back(read_tensor(path));
  }
}

// Where the i-th element, counted in row-major order, lies in the tensor's memory: an offset in elements that follows
// the strides.
ssize_t offset_of(const executorch::aten::Tensor& tensor, ssize_t i) {
  ssize_t offset = 0;
  for (ssize_t axis = tensor.dim(); axis-- > 0;) {
    offset += i % tensor.size(axis) * tensor.strides()[axis];
    i /= tensor.size(axis);
  }
  return offset;
}

void write_tensor(const fs::path& path, const executorch::aten::Tensor& tensor) {
  std::ofstream file(path, std::ios::binary);
  const auto put = [&](auto value) { file.write(reinterpret_cast<const char*>(&value), sizeof(value)); };
  put(kMagic);
  put(static_cast<int32_t>(tensor.scalar_type()));
  put(static_cast<int32_t>(tensor.dim()));
  for (const auto size : tensor.sizes()) {
    put(static_cast<int64_t>(size));
  }
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto width = static_cast<std::streamsize>(tensor.element_size());
  for (ssize_t i = 0; i < tensor.numel(); ++i) {
    file.write(data + width * offset_of(tensor, i), width);
  }
  if (!file.flush()) {
    fail(path.string(), ": cannot write the file");
  }
}

void run(const Arguments& arguments) {
  const int registered = executorch_mlx_register();
  if (registered != 0) {
    fail("cannot register the backend MLXBackend: error ", registered);
  }
  std::unique_ptr<executorch::etdump::ETDumpGen> tracer;
  if (!arguments.profile.empty()) {
    tracer = std::make_unique<executorch::etdump::ETDumpGen>();
  }
  auto* profile = tracer.get();
  Module module(arguments.model, Module::LoadMode::File, std::move(tracer));
  for (size_t call = 0; call < arguments.inputs.size(); ++call) {
    const auto tensors = read_inputs(arguments.inputs[call]);
    const std::vector<EValue> values(tensors.begin(), tensors.end());
    const auto begin = std::chrono::steady_clock::now();
    const auto result = module.execute(arguments.method, values);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (!result.ok()) {
      fail(arguments.model, ": ", arguments.method, ": call ", call, ": ", describe(result.error()));
    }
    if (arguments.prints_times) {
      std::printf("%.6f\n", seconds.count());
    }
    const auto folder = arguments.outputs / std::to_string(call);
    fs::create_directories(folder);
    for (size_t i = 0; i < result->size(); ++i) {
      const auto& value = (*result)[i];
      if (!value.isTensor()) {
        fail(arguments.method, ": output ", i, ": expected a tensor");
      }
      write_tensor(folder / str(i, ".tensor"), value.toTensor());
    }
  }
  if (profile != nullptr) {
    write_profile(*profile, arguments.profile);
  }
}

} // namespace

} // namespace executorch_mlx::engine

int main(int argc, char** argv) {
  try {
    executorch_mlx::engine::run(executorch_mlx::engine::parse(argc, argv));
    return 0;
  } catch (const executorch_mlx::engine::UsageError& error) {
    std::fprintf(stderr, "op_test_runner: %s\n\n%s", error.what(), executorch_mlx::engine::kUsage);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "op_test_runner: %s\n", error.what());
    return 1;
  }
}
