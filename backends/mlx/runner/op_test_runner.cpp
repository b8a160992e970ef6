// op_test_runner MODEL.pte --inputs DIR [--inputs DIR ...] --outputs DIR [--method NAME] [--profile FILE.etdp]
//
// Runs a method of one loaded program once for every --inputs, in order, so that
// what the program keeps in buffers is carried on. The k-th call, counted from 0,
// reads DIR/0.tensor, DIR/1.tensor, ... and writes OUTPUTS/k/0.tensor, .... With
// --profile every instruction is timed, for ExecuTorch's Inspector to read.
//
// A .tensor file, all little-endian:
//
//   char[8]       "MLXTNSR" and a zero
//   int32         ScalarType, ExecuTorch's number
//   int32         rank
//   int64[rank]   sizes
//   ...           elements, row-major
//
// Exit codes: 0, 1 if the program or a file cannot be run or read, 2 for a wrong
// command line.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch_mlx/delegate.h>

#include <array>
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

#include "profile.h"
#include "text.h"

namespace executorch_mlx {

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
    "usage: op_test_runner MODEL.pte --inputs DIR [--inputs DIR ...] --outputs DIR [--method NAME]\n"
    "       [--profile FILE.etdp]\n";

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
};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(str(parts...));
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (!word.starts_with("--")) {
      if (!arguments.model.empty()) {
        throw UsageError(str("'", word, "': one MODEL.pte was expected, there is ", arguments.model, " already"));
      }
      arguments.model = word;
      continue;
    }
    if (word != "--inputs" && word != "--outputs" && word != "--method" && word != "--profile") {
      throw UsageError(str("there is no option ", word));
    }
    if (++i == argc) {
      throw UsageError(str(word, ": a value was expected"));
    }
    if (word == "--inputs") {
      arguments.inputs.emplace_back(argv[i]);
    } else if (word == "--outputs") {
      arguments.outputs = argv[i];
    } else if (word == "--profile") {
      arguments.profile = argv[i];
    } else {
      arguments.method = argv[i];
    }
  }
  if (arguments.model.empty() || arguments.inputs.empty() || arguments.outputs.empty()) {
    throw UsageError("MODEL.pte, --inputs and --outputs are needed");
  }
  return arguments;
}

template <typename T>
T take(const std::vector<char>& bytes, size_t& at, const fs::path& path) {
  T value;
  if (bytes.size() - at < sizeof(T)) {
    fail(path.string(), ": the file ends in its header");
  }
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  at += sizeof(T);
  return value;
}

TensorPtr read_tensor(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    fail(path.string(), ": cannot be read");
  }
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  size_t at = 0;
  if (take<std::array<char, 8>>(bytes, at, path) != kMagic) {
    fail(path.string(), ": not a .tensor file");
  }
  const auto type = static_cast<ScalarType>(take<int32_t>(bytes, at, path));
  const auto rank = take<int32_t>(bytes, at, path);
  if (!executorch::runtime::isValid(type) || rank < 0 || rank > kMaxRank) {
    fail(path.string(), ": ScalarType ", static_cast<int>(type), ", rank ", rank);
  }
  std::vector<SizesType> sizes;
  size_t expected = executorch::runtime::elementSize(type);
  for (int32_t i = 0; i < rank; ++i) {
    const auto size = take<int64_t>(bytes, at, path);
    if (size < 0 || size > INT32_MAX) {
      fail(path.string(), ": size ", size, " of axis ", i);
    }
    sizes.push_back(static_cast<SizesType>(size));
    expected *= static_cast<size_t>(size);
  }
  if (bytes.size() - at != expected) {
    fail(path.string(), ": ", bytes.size() - at, " bytes of elements, expected ", expected);
  }
  const auto* elements = reinterpret_cast<const uint8_t*>(bytes.data() + at);
  // With an order and strides, empty for the usual ones, the bytes are taken as they are.
  return make_tensor_ptr(
      std::move(sizes), std::vector<uint8_t>(elements, elements + expected), {}, {}, type);
}

std::vector<TensorPtr> read_inputs(const fs::path& folder) {
  if (!fs::is_directory(folder)) {
    fail(folder.string(), ": no such folder");
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

// Where the i-th element in row-major order lies: a tensor may have another order.
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
  const auto put = [&](auto value) {
    file.write(reinterpret_cast<const char*>(&value), sizeof(value));
  };
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
    fail(path.string(), ": cannot be written");
  }
}

void run(const Arguments& arguments) {
  const int registered = executorch_mlx_register();
  if (registered != 0) {
    fail("MLXBackend cannot be registered: error ", registered);
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
    const auto result = module.execute(arguments.method, values);
    if (!result.ok()) {
      fail(arguments.model, ", ", arguments.method, ", call ", call, ": ",
           executorch::runtime::to_string(result.error()), ", see the log");
    }
    const auto folder = arguments.outputs / std::to_string(call);
    fs::create_directories(folder);
    for (size_t i = 0; i < result->size(); ++i) {
      const auto& value = (*result)[i];
      if (!value.isTensor()) {
        fail(arguments.method, ": output ", i, " is not a tensor");
      }
      write_tensor(folder / str(i, ".tensor"), value.toTensor());
    }
  }
  if (profile != nullptr) {
    write_profile(*profile, arguments.profile);
  }
}

} // namespace

} // namespace executorch_mlx

int main(int argc, char** argv) {
  try {
    executorch_mlx::run(executorch_mlx::parse(argc, argv));
    return 0;
  } catch (const executorch_mlx::UsageError& error) {
    std::fprintf(stderr, "op_test_runner: %s\n%s", error.what(), executorch_mlx::kUsage);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "op_test_runner: %s\n", error.what());
    return 1;
  }
}
