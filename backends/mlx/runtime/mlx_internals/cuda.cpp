#include "mlx_internals/cuda.h"

#include <dlfcn.h>

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "error.h"
#include "log_line.h"
#include "mlx_internals/internals.h"

// CUDA's driver (cuda.h) and its run-time compiler (nvrtc.h), of CUDA 13. This library is built without their headers.
struct CUgraph_st;
struct CUgraphNode_st;
struct CUmod_st;
struct CUctx_st;
struct CUkern_st;
struct _nvrtcProgram;

namespace executorch_mlx::gpu {

namespace {

struct KernelNode { // CUDA_KERNEL_NODE_PARAMS
  CUfunc_st* function;
  unsigned grid[3], block[3], shared_bytes;
  void** arguments;
  void** extra;
  CUkern_st* kernel;
  CUctx_st* context;
};

struct Edge { // CUgraphEdgeData
  unsigned char from_port, to_port, type, reserved[5];
};

// A function of another library: null if the library is not loaded or lacks the function, as in builds of MLX without
// CUDA. `name` is for messages. A member function takes the object as the first argument.
template <typename Signature>
struct Function {
  Function(const char* name, const char* symbol)
      : name(name), address(reinterpret_cast<Signature*>(dlsym(RTLD_DEFAULT, symbol))) {}
  explicit Function(const char* name) : Function(name, name) {}

  template <typename... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) const {
    return address(std::forward<Arguments>(arguments)...);
  }

  const char* name;
  Signature* address;
};

// MLX's backend for CUDA.
struct Device;
struct CommandEncoder;
const Function<void(Device*)> make_current("mx::cu::Device::make_current", "_ZN3mlx4core2cu6Device12make_currentEv");
const Function<void(CommandEncoder*, const mx::array&)> set_input_array(
    "mx::cu::CommandEncoder::set_input_array", "_ZN3mlx4core2cu14CommandEncoder15set_input_arrayERKNS0_5arrayE");
const Function<void(CommandEncoder*, const mx::array&)> set_output_array(
    "mx::cu::CommandEncoder::set_output_array", "_ZN3mlx4core2cu14CommandEncoder16set_output_arrayERKNS0_5arrayE");
const Function<void(CommandEncoder*, CUgraph_st*, const std::string& key, bool is_updatable)> add_graph_node(
    "mx::cu::CommandEncoder::add_graph_node",
    "_ZN3mlx4core2cu14CommandEncoder14add_graph_nodeEP10CUgraph_stRKNSt7__cxx1112basic_stringIcSt11char_"
    "traitsIcESaIcEEEb");
const Function<void(CommandEncoder*, std::function<void()>)> add_completed_handler(
    "mx::cu::CommandEncoder::add_completed_handler",
    "_ZN3mlx4core2cu14CommandEncoder21add_completed_handlerESt8functionIFvvEE");
const Function<Device*(mx::Device)> device_of("mx::cu::device", "_ZN3mlx4core2cu6deviceENS0_6DeviceE");
const Function<CommandEncoder*(mx::Stream)> command_encoder(
    "mx::cu::get_command_encoder", "_ZN3mlx4core2cu19get_command_encoderENS0_6StreamE");

const Function<int(int* device)> cuCtxGetDevice("cuCtxGetDevice");
const Function<int(int* value, int attribute, int device)> cuDeviceGetAttribute("cuDeviceGetAttribute");
const Function<int(CUmod_st**, const void* image)> cuModuleLoadData("cuModuleLoadData");
const Function<int(CUfunc_st**, CUmod_st*, const char* name)> cuModuleGetFunction("cuModuleGetFunction");
const Function<int(CUgraph_st**, unsigned flags)> cuGraphCreate("cuGraphCreate");
const Function<int(CUgraph_st*)> cuGraphDestroy("cuGraphDestroy");
const Function<int(CUgraphNode_st**, CUgraph_st*, const CUgraphNode_st* const* before, size_t count, const KernelNode*)>
    cuGraphAddKernelNode("cuGraphAddKernelNode_v2");
const Function<int(CUgraph_st*, CUgraphNode_st* const* from, CUgraphNode_st* const* to, const Edge*, size_t count)>
    cuGraphAddDependencies("cuGraphAddDependencies_v2");

const Function<int(_nvrtcProgram**, const char* source, const char* name, int headers, const char* const* texts,
    const char* const* names)>
    nvrtcCreateProgram("nvrtcCreateProgram");
const Function<int(_nvrtcProgram**)> nvrtcDestroyProgram("nvrtcDestroyProgram");
const Function<int(_nvrtcProgram*, int count, const char* const* options)> nvrtcCompileProgram("nvrtcCompileProgram");
const Function<int(_nvrtcProgram*, size_t* size)> nvrtcGetCUBINSize("nvrtcGetCUBINSize");
const Function<int(_nvrtcProgram*, char* cubin)> nvrtcGetCUBIN("nvrtcGetCUBIN");
const Function<int(_nvrtcProgram*, size_t* size)> nvrtcGetProgramLogSize("nvrtcGetProgramLogSize");
const Function<int(_nvrtcProgram*, char* log)> nvrtcGetProgramLog("nvrtcGetProgramLog");

constexpr int kMajorVersion = 75, kMinorVersion = 76; // attributes of a device
// From this version of the architecture on, a kernel can start before the kernel in front of it ends.
constexpr int kVersionOfEarlyStart = 90;
constexpr Edge kEarlyStart{1, 0, 1, {}}; // when all blocks of the kernel in front permit it

void check(int result, const char* call) {
  if (result != 0) {
    throw std::runtime_error(str(call, ": error ", result, " of CUDA"));
  }
}

// Why the functions above cannot be called, or "".
std::string why_unusable() {
  const char* missing = nullptr;
  const auto look_at = [&](const auto&... functions) {
    ((missing = missing == nullptr && functions.address == nullptr ? functions.name : missing), ...);
  };
  look_at(make_current, set_input_array, set_output_array, add_graph_node, add_completed_handler, device_of,
      command_encoder, cuCtxGetDevice, cuDeviceGetAttribute, cuModuleLoadData, cuModuleGetFunction, cuGraphCreate,
      cuGraphDestroy, cuGraphAddKernelNode, cuGraphAddDependencies, nvrtcCreateProgram, nvrtcDestroyProgram,
      nvrtcCompileProgram, nvrtcGetCUBINSize, nvrtcGetCUBIN, nvrtcGetProgramLogSize, nvrtcGetProgramLog);
  return missing == nullptr ? "" : str("MLX ", mx::version(), " lacks the function ", missing);
}

int ask_for_architecture(mx::Stream stream) {
  make_current(device_of(stream.device));
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
    make_current(device_of(stream.device));
    check(cuGraphCreate(&graph_, 0), "cuGraphCreate");
  }

  ~CudaGraph() override { cuGraphDestroy(graph_); }

  void add(CUfunc_st* function, int blocks, int threads, std::vector<void*>& arguments, bool starts_early) override {
    const KernelNode kernel{function, {static_cast<unsigned>(blocks), 1, 1}, {static_cast<unsigned>(threads), 1, 1}, 0,
        arguments.data(), nullptr, nullptr, nullptr};
    CUgraphNode_st* node;
    check(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &kernel), "cuGraphAddKernelNode");
    if (last_ != nullptr) {
      const auto* const edge = starts_early && can_start_early_ ? &kEarlyStart : nullptr;
      check(cuGraphAddDependencies(graph_, &last_, &node, edge, 1), "cuGraphAddDependencies");
    }
    last_ = node;
    ++size_;
  }

  void reads(const mx::array& x) override {
    set_input_array(command_encoder(stream_), x);
    keeps(x);
  }

  void writes(const mx::array& x) override {
    set_output_array(command_encoder(stream_), x);
    keeps(x);
  }

  void keeps(const mx::array& x) override { memory_.push_back(x.data_shared_ptr()); }

  void submit() override {
    CommandEncoder* const encoder = command_encoder(stream_);
    // Graphs with the same key have the same structure, so that MLX updates an earlier one instead of making it anew.
    add_graph_node(encoder, graph_, str("(kernels", size_, ")"), /*is_updatable=*/true);
    add_completed_handler(encoder, [memory = std::move(memory_)] {});
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
    if (!mx::cu::is_available() || !internals::are_usable()) {
      return false;
    }
    const std::string reason = why_unusable();
    if (!reason.empty()) {
      log_error(str("MLX: the kernels for CUDA of this library are not used: ", reason));
    }
    return reason.empty();
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
  make_current(device_of(stream.device));
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
