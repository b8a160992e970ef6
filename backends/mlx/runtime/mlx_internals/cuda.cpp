#include "mlx_internals/cuda.h"

#include <dlfcn.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <unordered_set>
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
struct CUgraphExec_st;
struct CUstream_st;
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

// The beginning of MLX's class of this name. A graph is submitted with all that its operations have added.
struct CommandEncoder {
  struct Node {
    CUgraphNode_st* node;
    std::string type, id;
  };

  Device* device;
  CUstream_st* stream;
  CUgraph_st* graph; // without dependencies
  std::shared_ptr<void> worker;
  int nodes; // of the graph
  bool is_concurrent;
  std::vector<CUgraphNode_st*> from, to; // the dependencies
  std::string key_of_nodes, key_of_dependencies;
  std::vector<Node> concurrent_nodes;
  std::vector<std::shared_ptr<mx::array::Data>> temporaries; // memory that is in use until the graph has run
};

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
const Function<int(CUgraphExec_st**, CUgraph_st*, unsigned long long flags)> cuGraphInstantiate(
    "cuGraphInstantiateWithFlags");
const Function<int(CUgraphExec_st*)> cuGraphExecDestroy("cuGraphExecDestroy");
const Function<int(CUgraphExec_st*, CUgraphNode_st*, const KernelNode*)> cuGraphExecKernelNodeSetParams(
    "cuGraphExecKernelNodeSetParams_v2");
const Function<int(CUgraphExec_st*, CUstream_st*)> cuGraphLaunch("cuGraphLaunch");
const Function<int(CUgraph_st**, CUgraph_st*)> cuGraphClone("cuGraphClone");
const Function<int(CUgraphNode_st**, CUgraphNode_st*, CUgraph_st* clone)> cuGraphNodeFindInClone(
    "cuGraphNodeFindInClone");
const Function<int(CUgraph_st*, CUgraphNode_st**, size_t* count)> cuGraphGetNodes("cuGraphGetNodes");
const Function<int(uint64_t to, uint64_t from, size_t bytes, CUstream_st*)> cuMemcpyAsync("cuMemcpyAsync");
const Function<int(size_t* free, size_t* total)> cuMemGetInfo("cuMemGetInfo_v2");

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
      cuGraphDestroy, cuGraphAddKernelNode, cuGraphAddDependencies, cuGraphInstantiate, cuGraphExecDestroy,
      cuGraphExecKernelNodeSetParams, cuGraphLaunch, cuGraphClone, cuGraphNodeFindInClone, cuGraphGetNodes,
      cuMemcpyAsync, cuMemGetInfo, nvrtcCreateProgram, nvrtcDestroyProgram, nvrtcCompileProgram, nvrtcGetCUBINSize,
      nvrtcGetCUBIN, nvrtcGetProgramLogSize, nvrtcGetProgramLog);
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

// Calls use(node) with what the driver wants to know of a kernel.
template <typename Use>
void with_node(const KernelRun& run, Use&& use) {
  std::vector<void*> arguments;
  arguments.reserve(run.arguments.size());
  for (const uint64_t& argument : run.arguments) { // the GPU is little-endian as the host: an int is its first half
    arguments.push_back(const_cast<uint64_t*>(&argument));
  }
  use(KernelNode{run.function, {static_cast<unsigned>(run.blocks), 1, 1}, {static_cast<unsigned>(run.threads), 1, 1}, 0,
      arguments.data(), nullptr, nullptr, nullptr});
}

// A CUDA graph of kernels, one after the other.
class Graph {
 public:
  explicit Graph(mx::Stream stream) : can_start_early_(architecture(stream) >= kVersionOfEarlyStart) {
    make_current(device_of(stream.device));
    check(cuGraphCreate(&graph_, 0), "cuGraphCreate");
  }
  Graph(const Graph&) = delete;
  ~Graph() { cuGraphDestroy(graph_); }

  void add(const KernelRun& run) {
    CUgraphNode_st* node;
    with_node(run, [&](const KernelNode& kernel) {
      check(cuGraphAddKernelNode(&node, graph_, nullptr, 0, &kernel), "cuGraphAddKernelNode");
    });
    if (!nodes_.empty()) {
      const auto* const edge = run.starts_early && can_start_early_ ? &kEarlyStart : nullptr;
      check(cuGraphAddDependencies(graph_, &nodes_.back(), &node, edge, 1), "cuGraphAddDependencies");
    }
    nodes_.push_back(node);
  }

  CUgraph_st* get() const { return graph_; }
  const std::vector<CUgraphNode_st*>& nodes() const { return nodes_; }

 private:
  bool can_start_early_;
  CUgraph_st* graph_ = nullptr;
  std::vector<CUgraphNode_st*> nodes_;
};

class CudaGraph : public KernelGraph {
 public:
  explicit CudaGraph(mx::Stream stream) : stream_(stream), graph_(stream) {}

  void add(const KernelRun& run) override { graph_.add(run); }

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
    add_graph_node(encoder, graph_.get(), str("(kernels", graph_.nodes().size(), ")"), /*is_updatable=*/true);
    encoder->temporaries.insert(encoder->temporaries.end(), memory_.begin(), memory_.end());
  }

 private:
  mx::Stream stream_;
  Graph graph_;
  std::vector<std::shared_ptr<mx::array::Data>> memory_;
};

// The driver copies the arguments of a graph at its launch. Two executables take turns, so that one can be changed
// while the other one runs.
class CudaReplay : public KernelReplay {
 public:
  CudaReplay(const std::vector<KernelRun>& runs, mx::Stream stream) : stream_(stream), graph_(stream) {
    for (const auto& run : runs) {
      graph_.add(run);
    }
    for (auto& executable : executables_) {
      check(cuGraphInstantiate(&executable.graph, graph_.get(), 0), "cuGraphInstantiate");
      executable.runs = runs;
    }
  }

  ~CudaReplay() override {
    for (const auto& executable : executables_) {
      if (executable.graph != nullptr) {
        cuGraphExecDestroy(executable.graph);
      }
    }
  }

  void start(const std::vector<KernelRun>& runs) override {
    make_current(device_of(stream_.device));
    auto& [graph, last_runs] = executables_[next_];
    next_ = (next_ + 1) % executables_.size();
    for (size_t i = 0; i < runs.size(); ++i) {
      if (runs[i] == last_runs[i]) {
        continue;
      }
      with_node(runs[i], [&](const KernelNode& kernel) {
        check(cuGraphExecKernelNodeSetParams(graph, graph_.nodes()[i], &kernel), "cuGraphExecKernelNodeSetParams");
      });
      last_runs[i] = runs[i];
    }
    check(cuGraphLaunch(graph, command_encoder(stream_)->stream), "cuGraphLaunch");
  }

 private:
  struct Executable {
    CUgraphExec_st* graph = nullptr;
    std::vector<KernelRun> runs; // as they are in `graph`
  };

  mx::Stream stream_;
  Graph graph_;
  std::array<Executable, 2> executables_;
  size_t next_ = 0;
};

// The lazy arrays that `arrays` depend on, each after its inputs. One array stands for all results of its operation.
std::vector<mx::array> in_order(const std::vector<mx::array>& arrays) {
  std::vector<mx::array> result;
  std::unordered_set<std::uintptr_t> found;
  std::vector<std::pair<mx::array, size_t>> path; // with the number of inputs that have been visited
  const auto visit = [&](const mx::array& x) {
    if (x.status() == mx::array::Status::unscheduled && found.insert(x.id()).second) {
      for (const auto& sibling : x.siblings()) {
        found.insert(sibling.id());
      }
      path.emplace_back(x, 0);
    }
  };
  for (const auto& x : arrays) {
    visit(x);
    while (!path.empty()) {
      auto& [y, visited] = path.back();
      if (visited < y.inputs().size()) {
        const mx::array& input = y.inputs()[visited++];
        visit(input);
      } else {
        result.push_back(std::move(y));
        path.pop_back();
      }
    }
  }
  return result;
}

// Computes a lazy array whose inputs are computed: adds the operation to the graph of its stream, as an evaluation of
// MLX does, but never submits the graph. Adds the memory that the operation uses and that would be free later.
void compute(const mx::array& x, std::vector<std::shared_ptr<mx::array::Data>>& memory) {
  mx::array y = x;
  auto results = y.outputs();
  y.primitive().eval_gpu(y.inputs(), results);
  for (const auto& input : y.inputs()) {
    if (input.data_shared_ptr() != y.data_shared_ptr()) { // else the result has the memory of the input
      memory.push_back(input.data_shared_ptr());
    }
  }
  for (const auto& sibling : y.siblings()) {
    memory.push_back(sibling.data_shared_ptr());
  }
  for (const auto& result : results) {
    result.set_status(mx::array::Status::evaluated);
  }
  y.detach();
}

class RecordedWork : public WorkReplay {
 public:
  // The work that the stream has not submitted yet, with `bytes` of intermediate results.
  RecordedWork(mx::Stream stream, std::vector<std::shared_ptr<mx::array::Data>> memory, size_t bytes)
      : stream_(stream), memory_(std::move(memory)), bytes_(bytes) {
    const CommandEncoder& encoder = *command_encoder(stream);
    memory_.insert(memory_.end(), encoder.temporaries.begin(), encoder.temporaries.end());
    CUgraph_st* graph;
    check(cuGraphClone(&graph, encoder.graph), "cuGraphClone");
    try {
      std::vector<CUgraphNode_st*> from(encoder.from.size()), to(encoder.to.size());
      for (size_t i = 0; i < from.size(); ++i) {
        check(cuGraphNodeFindInClone(&from[i], encoder.from[i], graph), "cuGraphNodeFindInClone");
        check(cuGraphNodeFindInClone(&to[i], encoder.to[i], graph), "cuGraphNodeFindInClone");
      }
      check(cuGraphAddDependencies(graph, from.data(), to.data(), nullptr, from.size()), "cuGraphAddDependencies");
      check(cuGraphInstantiate(&executable_, graph, 0), "cuGraphInstantiate");
    } catch (...) {
      cuGraphDestroy(graph);
      throw;
    }
    cuGraphDestroy(graph);
  }

  ~RecordedWork() override {
    if (executable_ != nullptr) {
      cuGraphExecDestroy(executable_);
    }
  }

  void start() override {
    make_current(device_of(stream_.device));
    check(cuGraphLaunch(executable_, command_encoder(stream_)->stream), "cuGraphLaunch");
  }

  size_t bytes() const override { return bytes_; }

 private:
  mx::Stream stream_;
  std::vector<std::shared_ptr<mx::array::Data>> memory_;
  const size_t bytes_;
  CUgraphExec_st* executable_ = nullptr;
};

size_t count_nodes(CUgraph_st* graph) {
  size_t count = 0;
  check(cuGraphGetNodes(graph, nullptr, &count), "cuGraphGetNodes");
  return count;
}

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

std::unique_ptr<KernelReplay> KernelReplay::make(const std::vector<KernelRun>& runs, mx::Stream stream) {
  return std::make_unique<CudaReplay>(runs, stream);
}

std::unique_ptr<WorkReplay> WorkReplay::evaluate(const std::vector<mx::array>& arrays, mx::Stream stream) {
  mx::synchronize(stream);
  make_current(device_of(stream.device));
  const CommandEncoder& encoder = *command_encoder(stream);
  const CUgraph_st* const graph = encoder.graph;
  const size_t bytes = mx::get_active_memory();
  std::vector<std::shared_ptr<mx::array::Data>> memory;
  for (auto& x : in_order(arrays)) {
    compute(std::exchange(x, mx::array(0)), memory);
  }
  std::unique_ptr<RecordedWork> result;
  const bool is_whole = encoder.graph == graph && encoder.nodes > 0 &&
      count_nodes(encoder.graph) == static_cast<size_t>(encoder.nodes) && encoder.from.size() == encoder.to.size();
  if (is_whole) {
    const size_t active = mx::get_active_memory();
    result = std::make_unique<RecordedWork>(stream, std::move(memory), active - std::min(bytes, active));
  }
  mx::synchronize(stream); // submits the work
  return result;
}

void copy_on_gpu(const mx::array& from, const mx::array& to, mx::Stream stream) {
  make_current(device_of(stream.device));
  const auto address = [](const mx::array& x) { return reinterpret_cast<uintptr_t>(address_on_gpu(x)); };
  if (from.nbytes() > 0 && address(from) != address(to)) {
    check(cuMemcpyAsync(address(to), address(from), from.nbytes(), command_encoder(stream)->stream), "cuMemcpyAsync");
  }
}

size_t memory_of_gpu(mx::Stream stream) {
  make_current(device_of(stream.device));
  size_t free, total;
  check(cuMemGetInfo(&free, &total), "cuMemGetInfo");
  return total;
}

void keep_until_done(const std::vector<mx::array>& arrays, mx::Stream stream) {
  std::vector<std::shared_ptr<mx::array::Data>> memory;
  for (const auto& x : arrays) {
    memory.push_back(x.data_shared_ptr());
  }
  add_completed_handler(command_encoder(stream), [memory = std::move(memory)] {});
}

} // namespace executorch_mlx::gpu
