#include "cuda_api.h"

#include <executorch/runtime/platform/log.h>
#include <mlx/version.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "../error.h"

// This library is built without the headers of CUDA, so the few declarations that it needs are here. Builds of MLX for
// CUDA bring the functions. In other builds, they are null: see why_unusable().
struct CUgraph_st;

namespace mlx::core::cu {

class Device {
 public:
  [[gnu::weak]] void make_current();
};

class CommandEncoder {
 public:
  [[gnu::weak]] void set_input_array(const array& x);
  [[gnu::weak]] void set_output_array(const array& x);
  [[gnu::weak]] void add_graph_node(CUgraph_st* graph, const std::string& key, bool is_updatable);
  [[gnu::weak]] void add_completed_handler(std::function<void()> handler);
};

[[gnu::weak]] Device& device(mlx::core::Device device);
[[gnu::weak]] CommandEncoder& get_command_encoder(Stream stream);

} // namespace mlx::core::cu

// The CUDA driver (cuda.h) and its run-time compiler (nvrtc.h), of CUDA 13.
extern "C" {

struct CUgraphNode_st;
struct CUmod_st;
struct CUctx_st;
struct CUkern_st;
struct _nvrtcProgram;

struct ExecutorchMlxKernelNode { // CUDA_KERNEL_NODE_PARAMS
  CUfunc_st* function;
  unsigned grid[3], block[3], shared_bytes;
  void** arguments;
  void** extra;
  CUkern_st* kernel;
  CUctx_st* context;
};

struct ExecutorchMlxEdge { // CUgraphEdgeData
  unsigned char from_port, to_port, type, reserved[5];
};

[[gnu::weak]] int cuCtxGetDevice(int* device);
[[gnu::weak]] int cuDeviceGetAttribute(int* value, int attribute, int device);
[[gnu::weak]] int cuModuleLoadData(CUmod_st** module, const void* image);
[[gnu::weak]] int cuModuleGetFunction(CUfunc_st** function, CUmod_st* module, const char* name);
[[gnu::weak]] int cuGraphCreate(CUgraph_st** graph, unsigned flags);
[[gnu::weak]] int cuGraphDestroy(CUgraph_st* graph);
[[gnu::weak]] int cuGraphAddKernelNode_v2(CUgraphNode_st** node, CUgraph_st* graph, const CUgraphNode_st* const* before,
    size_t count, const ExecutorchMlxKernelNode* parameters);
[[gnu::weak]] int cuGraphAddDependencies_v2(CUgraph_st* graph, CUgraphNode_st* const* from, CUgraphNode_st* const* to,
    const ExecutorchMlxEdge* edges, size_t count);

[[gnu::weak]] int nvrtcCreateProgram(_nvrtcProgram** program, const char* source, const char* name, int headers,
    const char* const* texts, const char* const* names);
[[gnu::weak]] int nvrtcDestroyProgram(_nvrtcProgram** program);
[[gnu::weak]] int nvrtcCompileProgram(_nvrtcProgram* program, int count, const char* const* options);
[[gnu::weak]] int nvrtcGetCUBINSize(_nvrtcProgram* program, size_t* size);
[[gnu::weak]] int nvrtcGetCUBIN(_nvrtcProgram* program, char* cubin);
[[gnu::weak]] int nvrtcGetProgramLogSize(_nvrtcProgram* program, size_t* size);
[[gnu::weak]] int nvrtcGetProgramLog(_nvrtcProgram* program, char* log);

} // extern "C"

namespace executorch_mlx::gpu {

namespace {

constexpr int kMajorVersion = 75, kMinorVersion = 76; // attributes of a device
// From this version of the architecture on, a kernel can start before the kernel in front of it ends.
constexpr int kVersionOfEarlyStart = 90;
constexpr ExecutorchMlxEdge kEarlyStart{1, 0, 1, {}}; // when all blocks of the kernel in front permit it

void check(int result, const char* call) {
  if (result != 0) {
    throw std::runtime_error(str(call, ": error ", result, " of CUDA"));
  }
}

// The address of a function, null if it is weak and missing.
template <typename Function>
const void* address_of(Function function) {
  const void* address;
  static_assert(sizeof(function) >= sizeof(address));
  std::memcpy(&address, &function, sizeof(address)); // also the first word of a pointer to a member function
  return address;
}

// The name of the first function above that is missing, or null.
const char* missing_function() {
#define EXECUTORCH_MLX_FUNCTION(name) std::pair(#name, address_of(&name))
  const std::pair<const char*, const void*> functions[] = {EXECUTORCH_MLX_FUNCTION(mx::cu::Device::make_current),
      EXECUTORCH_MLX_FUNCTION(mx::cu::CommandEncoder::set_input_array),
      EXECUTORCH_MLX_FUNCTION(mx::cu::CommandEncoder::set_output_array),
      EXECUTORCH_MLX_FUNCTION(mx::cu::CommandEncoder::add_graph_node),
      EXECUTORCH_MLX_FUNCTION(mx::cu::CommandEncoder::add_completed_handler), EXECUTORCH_MLX_FUNCTION(mx::cu::device),
      EXECUTORCH_MLX_FUNCTION(mx::cu::get_command_encoder), EXECUTORCH_MLX_FUNCTION(cuCtxGetDevice),
      EXECUTORCH_MLX_FUNCTION(cuDeviceGetAttribute), EXECUTORCH_MLX_FUNCTION(cuModuleLoadData),
      EXECUTORCH_MLX_FUNCTION(cuModuleGetFunction), EXECUTORCH_MLX_FUNCTION(cuGraphCreate),
      EXECUTORCH_MLX_FUNCTION(cuGraphDestroy), EXECUTORCH_MLX_FUNCTION(cuGraphAddKernelNode_v2),
      EXECUTORCH_MLX_FUNCTION(cuGraphAddDependencies_v2), EXECUTORCH_MLX_FUNCTION(nvrtcCreateProgram),
      EXECUTORCH_MLX_FUNCTION(nvrtcDestroyProgram), EXECUTORCH_MLX_FUNCTION(nvrtcCompileProgram),
      EXECUTORCH_MLX_FUNCTION(nvrtcGetCUBINSize), EXECUTORCH_MLX_FUNCTION(nvrtcGetCUBIN),
      EXECUTORCH_MLX_FUNCTION(nvrtcGetProgramLogSize), EXECUTORCH_MLX_FUNCTION(nvrtcGetProgramLog)};
#undef EXECUTORCH_MLX_FUNCTION
  const auto found = std::find_if(
      std::begin(functions), std::end(functions), [](const auto& function) { return function.second == nullptr; });
  return found == std::end(functions) ? nullptr : found->first;
}

// Returns why the functions above cannot be called in this MLX of version `version`, or "" if they can. Those of MLX
// are not part of its public interface: another version may have changed them.
std::string why_unusable(const std::string& version) {
  const std::string expected = str(MLX_VERSION_MAJOR, ".", MLX_VERSION_MINOR, ".", MLX_VERSION_PATCH);
  if (version != expected) {
    return str("got MLX ", version, ", expected the version ", expected, " with which this library was built");
  }
  const char* const missing = missing_function();
  return missing == nullptr ? "" : str("MLX ", version, " lacks the function ", missing);
}

int ask_for_architecture(mx::Stream stream) {
  mx::cu::device(stream.device).make_current();
  int device, major, minor;
  check(cuCtxGetDevice(&device), "cuCtxGetDevice");
  check(cuDeviceGetAttribute(&major, kMajorVersion, device), "cuDeviceGetAttribute");
  check(cuDeviceGetAttribute(&minor, kMinorVersion, device), "cuDeviceGetAttribute");
  return major * 10 + minor;
}

class CudaGraph : public KernelGraph {
 public:
  explicit CudaGraph(mx::Stream stream)
      : stream_(stream), can_start_early_(architecture(stream) >= kVersionOfEarlyStart) {
    mx::cu::device(stream.device).make_current();
    check(cuGraphCreate(&graph_, 0), "cuGraphCreate");
  }

  ~CudaGraph() override { cuGraphDestroy(graph_); }

  void add(CUfunc_st* function, int blocks, int threads, std::vector<void*>& arguments, bool starts_early) override {
    const ExecutorchMlxKernelNode kernel{function, {static_cast<unsigned>(blocks), 1, 1},
        {static_cast<unsigned>(threads), 1, 1}, 0, arguments.data(), nullptr, nullptr, nullptr};
    CUgraphNode_st* node;
    check(cuGraphAddKernelNode_v2(&node, graph_, nullptr, 0, &kernel), "cuGraphAddKernelNode");
    if (last_ != nullptr) {
      const auto* const edge = starts_early && can_start_early_ ? &kEarlyStart : nullptr;
      check(cuGraphAddDependencies_v2(graph_, &last_, &node, edge, 1), "cuGraphAddDependencies");
    }
    last_ = node;
    ++size_;
  }

  void reads(const mx::array& x) override {
    mx::cu::get_command_encoder(stream_).set_input_array(x);
    keeps(x);
  }

  void writes(const mx::array& x) override {
    mx::cu::get_command_encoder(stream_).set_output_array(x);
    keeps(x);
  }

  void keeps(const mx::array& x) override { memory_.push_back(x.data_shared_ptr()); }

  void submit() override {
    auto& encoder = mx::cu::get_command_encoder(stream_);
    // Graphs with the same key have the same structure, so that MLX updates an earlier one instead of making it anew.
    encoder.add_graph_node(graph_, str("(kernels", size_, ")"), /*is_updatable=*/true);
    encoder.add_completed_handler([memory = std::move(memory_)] {});
  }

 private:
  mx::Stream stream_;
  bool can_start_early_;
  CUgraph_st* graph_ = nullptr;
  CUgraphNode_st* last_ = nullptr;
  int size_ = 0;
  std::vector<std::shared_ptr<mx::array::Data>> memory_;
};

} // namespace

int architecture(mx::Stream stream) {
  static std::mutex mutex;
  static std::map<int, int> versions;
  std::lock_guard lock(mutex);
  const auto found = versions.find(stream.device.index);
  return found != versions.end() ? found->second : versions[stream.device.index] = ask_for_architecture(stream);
}

bool is_cuda(mx::Stream stream) {
  static const bool has_cuda = [] {
    const std::string reason = mx::cu::is_available() ? why_unusable(mx::version()) : "";
    if (!reason.empty()) {
      ET_LOG(Error, "MLX: the kernels for CUDA of this library are not used: %s", reason.c_str());
    }
    return mx::cu::is_available() && reason.empty();
  }();
  return has_cuda && stream.device == mx::Device::gpu;
}

std::string compile(const std::string& name, const std::string& source, mx::Stream stream) {
  _nvrtcProgram* program = nullptr;
  check(nvrtcCreateProgram(&program, source.c_str(), name.c_str(), 0, nullptr, nullptr), "nvrtcCreateProgram");
  const std::string target = str("--gpu-architecture=sm_", architecture(stream));
  const std::array options{target.c_str(), "--std=c++20"};
  const int result = nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data());
  std::string output;
  size_t size = 0;
  if (result == 0 && nvrtcGetCUBINSize(program, &size) == 0) {
    output.resize(size);
    nvrtcGetCUBIN(program, output.data());
  } else if (nvrtcGetProgramLogSize(program, &size) == 0) {
    output.resize(size);
    nvrtcGetProgramLog(program, output.data());
  }
  nvrtcDestroyProgram(&program);
  if (result != 0) {
    throw std::runtime_error(str("Failed to compile kernel ", name, ": ", output));
  }
  return output;
}

CUfunc_st* load(const std::string& name, const std::string& binary, mx::Stream stream) {
  mx::cu::device(stream.device).make_current();
  CUmod_st* module;
  CUfunc_st* function;
  check(cuModuleLoadData(&module, binary.data()), "cuModuleLoadData");
  check(cuModuleGetFunction(&function, module, name.c_str()), "cuModuleGetFunction");
  return function;
}

void* address_on_gpu(const mx::array& x) {
  // The first member of MLX's CudaBuffer is the address.
  const auto& buffer = const_cast<mx::array&>(x).buffer();
  return *static_cast<char* const*>(buffer.ptr()) + x.offset();
}

std::unique_ptr<KernelGraph> KernelGraph::make(mx::Stream stream) { return std::make_unique<CudaGraph>(stream); }

} // namespace executorch_mlx::gpu
