#include "sequence_kernel.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <unordered_set>

#include "../error.h"
#include "mlx_internals/cuda.h"
#include "device_memory.h"
#include "lazy.h"
#include "mlx_internals/arrays.h"

namespace executorch_mlx::gpu {

namespace {

// Every result begins at a multiple of so many bytes in the memory of its sequence.
constexpr size_t kAlignment = 256;

// How many bytes of the next kernel's weights the L2 cache loads while a kernel leaves the GPU idle.
constexpr size_t kMaxAhead = 8 << 20;
constexpr size_t kAheadOfThread = 4096;

// What the source of a kernel can use, apart from what kernel_source.h lists.
constexpr char kHeader[] = R"(
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

)";

// The beginning of a kernel that leaves the GPU idle: the blocks after its own ones load `next`.
const std::string kLoadAhead = str(R"(
  if (blockIdx.x >= own_blocks) {
#if __CUDA_ARCH__ >= 900
    constexpr int kAhead = )",
    kAheadOfThread, R"(;
    const uint64_t at = (uint64_t(blockIdx.x - own_blocks) * blockDim.x + threadIdx.x) * kAhead;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(next + at)), "r"(kAhead));
#endif
    return;
  }
)");

} // namespace

// One run of a kernel.
struct SequenceKernel::Launch {
  // An array, or the result of another launch.
  struct Input {
    mx::Dtype dtype;
    std::optional<mx::array> array;
    bool is_lazy = false;
    std::shared_ptr<Launch> launch = nullptr;
    int result = 0;
  };

  // Launches that depend on each other.
  struct Sequence {
    std::weak_ptr<Launch> last; // the latest one
    std::shared_ptr<Recording> recording; // null if nobody has asked for one
  };

  Launch(const SequenceKernel* kernel, Call call, Constants constants)
      : kernel(kernel), call(std::move(call)), constants(std::move(constants)) {}

  // Sequences can be long, so their launches are not destroyed recursively.
  ~Launch() {
    std::vector<std::shared_ptr<Launch>> released;
    take_launches(inputs, released);
    while (!released.empty()) {
      const auto launch = std::move(released.back());
      released.pop_back();
      if (launch.use_count() == 1) {
        take_launches(launch->inputs, released);
      }
    }
  }

  const uint64_t number = ++count; // in the order of creation
  const SequenceKernel* const kernel;
  Call call; // without its inputs
  const Constants constants;
  std::vector<Input> inputs;
  std::vector<mx::array> awaited; // lazy results of other operations that this launch and those before it read
  std::shared_ptr<Sequence> sequence;
  std::vector<size_t> offsets; // of the results in the memory of the sequence, in bytes
  std::optional<mx::array> memory; // of the sequence, after the run

  // Whether this launch has run or been submitted.
  bool has_run() const { return memory.has_value(); }

  // The launches that have to run for `last`, in the order of their creation.
  static std::vector<std::shared_ptr<Launch>> required_by(const std::shared_ptr<Launch>& last);

  // Runs these launches.
  static void run(const std::vector<std::shared_ptr<Launch>>& launches, mx::Stream stream);

 private:
  // Adds the kernel to a graph. `memory` is the memory of the sequence. `before` and `next` are the launches around
  // this one, or null.
  KernelRun add_to(
      KernelGraph& graph, const mx::array& memory, const Launch* before, const Launch* next, mx::Stream stream) const;

  // What a recording keeps of this launch, whose kernel is `run`.
  Record recorded(KernelRun run) const;

  size_t size_of(size_t result) const { // in bytes
    const auto& shape = call.shapes[result];
    return std::accumulate(shape.begin(), shape.end(), size_t{call.dtype_of(result).size()}, std::multiplies<>());
  }

  // Whether the kernel reads a result of `before`, or memory that `before` writes, before it waits.
  bool reads_early_from(const Launch& before) const;

  static void take_launches(std::vector<Input>& inputs, std::vector<std::shared_ptr<Launch>>& launches) {
    for (auto& input : inputs) {
      if (input.launch != nullptr) {
        launches.push_back(std::move(input.launch));
      }
    }
  }

  static inline std::atomic<uint64_t> count = 0;
};

// The results of a launch.
class SequenceKernel::Result : public mx::Primitive {
 public:
  Result(mx::Stream stream, std::shared_ptr<Launch> launch) : Primitive(stream), launch(std::move(launch)) {}

  // If x is a lazy result of a launch, returns its primitive, else null.
  static const Result* of(const mx::array& x) {
    return is_lazy(x, kName) ? static_cast<const Result*>(&x.primitive()) : nullptr;
  }

  // The lazy results of a launch that has not run.
  static std::vector<mx::array> make(const std::shared_ptr<Launch>& launch, mx::Stream stream) {
    const auto& call = launch->call;
    return mx::array::make_arrays(call.shapes,
        call.dtypes.empty() ? std::vector(call.shapes.size(), call.dtype) : call.dtypes,
        std::make_shared<Result>(stream, launch), launch->awaited);
  }

  const char* name() const override { return kName; }

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("SequenceKernel: runs on GPU streams only");
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    if (!launch->has_run()) {
      Launch::run(Launch::required_by(launch), stream());
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      mx::array& y = outputs[i];
      const auto offset = static_cast<int64_t>(launch->offsets[i] / y.itemsize());
      internals::place(y, *launch->memory, offset);
    }
  }

  const std::shared_ptr<Launch> launch;

 private:
  static constexpr char kName[] = "SequenceKernel";
};

std::vector<std::shared_ptr<SequenceKernel::Launch>> SequenceKernel::Launch::required_by(
    const std::shared_ptr<Launch>& last) {
  std::vector<std::shared_ptr<Launch>> result{last};
  std::unordered_set<const Launch*> found{last.get()};
  for (size_t i = 0; i < result.size(); ++i) {
    const auto launch = result[i];
    for (const auto& input : launch->inputs) {
      if (input.launch != nullptr && !input.launch->has_run() && found.insert(input.launch.get()).second) {
        result.push_back(input.launch);
      }
    }
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a->number < b->number; });
  return result;
}

void SequenceKernel::Launch::run(const std::vector<std::shared_ptr<Launch>>& launches, mx::Stream stream) {
  size_t bytes = 0;
  for (const auto& launch : launches) {
    launch->offsets.clear();
    for (size_t i = 0; i < launch->call.shapes.size(); ++i) {
      launch->offsets.push_back(bytes);
      bytes += (launch->size_of(i) + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  const mx::array memory = allocate_on_gpu(bytes, stream);
  const auto graph = KernelGraph::make(stream);
  const auto recording = launches.back()->sequence->recording;
  const Launch* before = nullptr;
  for (size_t i = 0; i < launches.size(); ++i) {
    const Launch* const next = i + 1 < launches.size() ? launches[i + 1].get() : nullptr;
    auto run = launches[i]->add_to(*graph, memory, before, next, stream);
    if (recording != nullptr) {
      recording->kernels.push_back(launches[i]->recorded(std::move(run)));
    }
    before = launches[i].get();
  }
  if (recording != nullptr) {
    recording->memory = memory;
    ++recording->runs;
  }
  graph->writes(memory);
  graph->submit();
  for (const auto& launch : launches) {
    launch->memory = memory;
    launch->inputs.clear();
    launch->awaited.clear();
    launch->call.weights.clear();
    launch->call.written.clear();
  }
}

KernelRun SequenceKernel::Launch::add_to(
    KernelGraph& graph, const mx::array& memory, const Launch* before, const Launch* next, mx::Stream stream) const {
  KernelRun run{kernel->function(*this, stream), call.blocks, call.threads, {},
      /*starts_early=*/before != nullptr && !reads_early_from(*before)};
  const auto add_address = [&](void* address) { run.arguments.push_back(reinterpret_cast<uintptr_t>(address)); };
  const auto add_result = [&](const Launch& launch, size_t index) {
    const mx::array& at = launch.has_run() ? *launch.memory : memory;
    add_address(static_cast<char*>(address_on_gpu(at)) + launch.offsets[index]);
  };
  for (const auto& input : inputs) {
    if (!input.array) {
      add_result(*input.launch, input.result);
      if (input.launch->has_run()) {
        graph.reads(*input.launch->memory); // another graph writes it, perhaps in this evaluation
      }
      continue;
    }
    add_address(address_on_gpu(*input.array));
    // Arrays that are not lazy have been written before this evaluation.
    input.is_lazy ? graph.reads(*input.array) : graph.keeps(*input.array);
  }
  for (const auto& x : call.weights) {
    add_address(address_on_gpu(x));
    graph.keeps(x);
  }
  for (size_t i = 0; i < call.shapes.size(); ++i) {
    add_result(*this, i);
  }
  for (const auto& x : call.written) {
    graph.writes(x);
  }
  if (call.leaves_gpu_idle) {
    const bool has_next = next != nullptr && !next->call.weights.empty();
    const size_t ahead = has_next ? std::min(next->call.weights[0].nbytes(), kMaxAhead) : 0;
    run.blocks += static_cast<int>(ahead / (call.threads * kAheadOfThread));
    add_address(has_next ? address_on_gpu(next->call.weights[0]) : nullptr);
  }
  const auto add_number = [&](int number) { run.arguments.push_back(static_cast<uint32_t>(number)); };
  std::for_each(call.numbers.begin(), call.numbers.end(), add_number);
  if (call.leaves_gpu_idle) {
    add_number(call.blocks);
  }
  graph.add(run);
  return run;
}

SequenceKernel::Record SequenceKernel::Launch::recorded(KernelRun run) const {
  Record result{std::move(run), call, {}, {}};
  for (const auto& input : inputs) {
    result.inputs.push_back(input.array);
  }
  for (size_t i = 0; i < offsets.size(); ++i) {
    result.results.emplace_back(offsets[i], size_of(i));
  }
  return result;
}

bool SequenceKernel::Launch::reads_early_from(const Launch& before) const {
  return std::any_of(call.early.begin(), call.early.end(), [&](int number) {
    const Input& input = inputs[number];
    const auto is_same = [&](const mx::array& x) {
      return input.array && internals::memory_of(x) == internals::memory_of(*input.array);
    };
    return input.launch.get() == &before ||
        std::any_of(before.call.written.begin(), before.call.written.end(), is_same);
  });
}

SequenceKernel::SequenceKernel(std::string name, std::vector<std::string> inputs, std::vector<std::string> weights,
    std::vector<std::string> outputs, std::vector<std::string> numbers, std::string body, std::string attributes,
    std::string header)
    : name_(std::move(name)),
      inputs_(std::move(inputs)),
      weights_(std::move(weights)),
      outputs_(std::move(outputs)),
      numbers_(std::move(numbers)),
      body_(std::move(body)),
      attributes_(std::move(attributes)),
      header_(kHeader + header) {}

std::vector<mx::array> SequenceKernel::operator()(Call call, Constants constants, mx::Stream stream) const {
  const auto inputs = std::exchange(call.inputs, {});
  const auto launch = std::make_shared<Launch>(this, std::move(call), std::move(constants));
  launch->inputs.reserve(inputs.size());
  for (const auto& input : inputs) {
    const mx::array& x = before_reshapes(input);
    if (const Result* const result = Result::of(x)) {
      const auto& before = result->launch;
      for (const auto& awaited : before->awaited) {
        const auto is_awaited = [&](const mx::array& y) { return y.id() == awaited.id(); };
        if (std::none_of(launch->awaited.begin(), launch->awaited.end(), is_awaited)) {
          launch->awaited.push_back(awaited);
        }
      }
      launch->sequence = before->sequence;
      launch->inputs.push_back({x.dtype(), std::nullopt, false, before, x.sibling_position()});
    } else if (x.status() == mx::array::Status::unscheduled || !x.flags().row_contiguous) {
      launch->awaited.push_back(mx::contiguous(x, /*allow_col_major=*/false, stream));
      launch->inputs.push_back({x.dtype(), launch->awaited.back(), true});
    } else {
      launch->inputs.push_back({x.dtype(), x});
    }
  }
  if (launch->sequence == nullptr) {
    launch->sequence = std::make_shared<Launch::Sequence>();
  }
  launch->sequence->last = launch;
  return Result::make(launch, stream);
}

CUfunc_st* SequenceKernel::function(const Launch& launch, mx::Stream stream) const {
  std::vector<int> key{stream.device.index};
  for (size_t i = 0; i < launch.call.shapes.size(); ++i) {
    key.push_back(static_cast<int>(launch.call.dtype_of(i).val()));
  }
  for (const auto& input : launch.inputs) {
    key.push_back(static_cast<int>(input.dtype.val()));
  }
  for (const auto& weight : launch.call.weights) {
    key.push_back(static_cast<int>(weight.dtype().val()));
  }
  for (const auto& constant : launch.constants) {
    key.push_back(constant.second);
  }
  std::lock_guard lock(mutex_);
  CUfunc_st*& function = functions_[key];
  if (function == nullptr) {
    function = load(name_, compile(name_, source(launch), stream), stream);
  }
  return function;
}

std::string SequenceKernel::source(const Launch& launch) const {
  const mx::Dtype type = launch.inputs[0].dtype;
  std::vector<std::string> parameters;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    parameters.push_back(input_parameter(launch.inputs[i].dtype, inputs_[i]));
  }
  for (size_t i = 0; i < weights_.size(); ++i) {
    parameters.push_back(input_parameter(launch.call.weights[i].dtype(), weights_[i]));
  }
  for (size_t i = 0; i < outputs_.size(); ++i) {
    parameters.push_back(output_parameter(launch.call.dtype_of(i), outputs_[i]));
  }
  if (launch.call.leaves_gpu_idle) {
    parameters.emplace_back("const char* next");
  }
  for (const auto& number : numbers_) {
    parameters.push_back(number_parameter(number));
  }
  if (launch.call.leaves_gpu_idle) {
    parameters.push_back(number_parameter("own_blocks"));
  }
  const std::string body = launch.call.leaves_gpu_idle ? kLoadAhead + body_ : body_;
  return kernel_source(name_, type, launch.constants, parameters, body, header_, attributes_);
}

void SequenceKernel::replace_by_ends(const std::vector<mx::array*>& arrays) {
  std::map<const Launch*, mx::array> ends;
  for (mx::array* x : arrays) {
    const Result* const result = Result::of(*x);
    const auto last = result != nullptr ? result->launch->sequence->last.lock() : nullptr;
    if (last != nullptr && !last->has_run()) {
      const auto found = ends.find(last.get());
      *x = found != ends.end() ? found->second
                               : ends.emplace(last.get(), Result::make(last, x->primitive().stream())[0]).first->second;
    }
  }
}

std::shared_ptr<SequenceKernel::Recording> SequenceKernel::record(const std::vector<mx::array>& results) {
  std::shared_ptr<Launch> last;
  for (const auto& y : results) {
    const Result* const result = Result::of(before_reshapes(y));
    const auto end = result != nullptr ? result->launch->sequence->last.lock() : nullptr;
    if (end == nullptr || end->has_run() || !end->awaited.empty() || (last != nullptr && end != last)) {
      return nullptr;
    }
    last = end;
  }
  return last == nullptr ? nullptr : last->sequence->recording = std::make_shared<Recording>();
}

std::optional<mx::array> operand_in_memory(const mx::array& x) {
  const mx::array& operand = before_reshapes(x);
  const bool is_in_memory = operand.status() != mx::array::Status::unscheduled && operand.flags().row_contiguous;
  return is_in_memory ? std::optional(operand) : std::nullopt;
}

} // namespace executorch_mlx::gpu
