#include "call/replay.h"

#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <set>
#include <utility>

#include "call/call_io.h"
#include "call/context.h"
#include "gpu/device_memory.h"
#include "gpu/fused.h"
#include "gpu/verdicts.h"
#include "memory/limit.h"
#include "mlx_internals/arrays.h"

namespace executorch_mlx {

namespace {

constexpr int kMaxAttempts = 3;
constexpr int kTrials = 3; // of which the last one is timed: the first ones also move the graph to the GPU
constexpr double kMaxSlowdown = 1.05;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

uint64_t address_of(const mx::array& x) { return reinterpret_cast<uintptr_t>(gpu::address_on_gpu(x)); }

std::optional<uint64_t> address_of_operand(const mx::array& x) {
  const auto operand = gpu::operand_in_memory(x);
  return operand ? std::optional(address_of(*operand)) : std::nullopt;
}

} // namespace

std::unique_ptr<Replay> Replay::make(const MlxProgram& program, mx::Stream stream) {
  if (!gpu::is_cuda(stream) || !gpu::is_used(gpu::Kernel::replay, stream)) {
    return nullptr;
  }
  const auto are_tensors = [](const auto* map) {
    return map != nullptr && std::all_of(map->begin(), map->end(), [](const auto* slot) {
      return slot->slot_type() == fb::SlotType::TensorSlot;
    });
  };
  const auto tokens = input_slot(program, "tokens");
  if (!tokens || !are_tensors(program.graph->input_map()) || !are_tensors(program.graph->output_map())) {
    return nullptr;
  }
  auto use = find_position_use(program);
  return use ? std::make_unique<Replay>(program, *std::move(use), *tokens, stream) : nullptr;
}

Replay::Replay(const MlxProgram& program, PositionUse use, uint32_t tokens, mx::Stream stream)
    : program_(program), use_(std::move(use)), tokens_(tokens), stream_(stream) {}

// -- recording ---------------------------------------------------------------

void Replay::record(const State& state, const std::vector<mx::array>& results) {
  const mx::array& position = *state.tensors[use_.input];
  recorded_.reset();
  if (is_given_up_ || (plan_ && !results_) || position.size() != 1 || state.tensors[tokens_]->size() != 1) {
    return;
  }
  auto sequence = gpu::record(results);
  if (sequence == nullptr) {
    if (++attempts_ == kMaxAttempts) {
      give_up("a call of it is not one sequence of kernels");
    }
    return;
  }
  recorded_.emplace(Recorded{std::move(sequence), {}, {}, state.values, *position.data<int64_t>()});
  const auto add = [&](const auto& map, auto& tensors) {
    for (const auto* slot : map) {
      tensors.emplace_back(slot->idx(), *state.tensors[slot->idx()]);
    }
  };
  add(*program_.graph->input_map(), recorded_->inputs);
  add(*program_.graph->output_map(), recorded_->outputs);
}

void Replay::finish(const State& state) {
  const auto recorded = std::exchange(recorded_, std::nullopt);
  if (!recorded) {
    return;
  }
  try {
    auto plan = plan_of(state, *recorded);
    if (plan && results_) {
      return judge(*plan, state);
    }
    results_.reset();
    if (!plan && ++attempts_ == kMaxAttempts) {
      return give_up("its kernels use memory that changes");
    }
    if (plan) {
      plan->graph = gpu::KernelReplay::make(plan->runs, stream_);
      plan_ = std::move(plan);
    }
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}

std::optional<Replay::Plan> Replay::plan_of(const State& state, const Recorded& recorded) const {
  const auto& [sequence, inputs, outputs, values, position] = recorded;
  const auto place = use_.place(position, values);
  if (sequence->runs != 1 || !place) {
    return std::nullopt;
  }
  Plan plan{{}, {}, {}, {}, {}, std::numeric_limits<int>::max(), values, {}, *sequence->memory, {}, nullptr};
  std::set<uint64_t> constants;
  for (uint32_t slot = 0; slot < program_.layout.constants; ++slot) {
    constants.insert(address_of(*state.tensors[slot]));
  }
  for (const auto& buffer : state.buffers()) {
    const mx::array& contents = *buffer->contents;
    if (contents.ndim() != 4 || !is_float(contents.dtype()) || contents.size() < 2) { // no KV cache
      return std::nullopt;
    }
    plan.buffers.push_back(gpu::address_on_gpu(contents));
    plan.capacity = std::min(plan.capacity, contents.shape(2));
  }
  const auto is_buffer = [&](uint64_t address) {
    return std::count(plan.buffers.begin(), plan.buffers.end(), reinterpret_cast<const void*>(address)) == 1;
  };
  for (const auto& [slot, x] : inputs) {
    plan.inputs.push_back({slot, x.shape(), x.dtype(), {}});
  }
  std::set<uint64_t> read; // by a kernel after the one that writes it
  for (size_t i = 0; i < sequence->kernels.size(); ++i) {
    const auto& [run, call, operands, results] = sequence->kernels[i];
    for (size_t j = 0; j < operands.size(); ++j) {
      const uint64_t address = run.arguments[j];
      if (!operands[j]) {
        read.insert(address);
        continue;
      }
      const auto input = std::find_if(
          inputs.begin(), inputs.end(), [&](const auto& input) { return address_of_operand(input.second) == address; });
      if (input != inputs.end()) {
        plan.inputs[input - inputs.begin()].arguments.push_back({i, j});
      } else if (constants.contains(address) || (call.workspace && address_of(*call.workspace) == address)) {
        plan.kept.push_back(*operands[j]);
      } else if (!is_buffer(address) || call.at == nullptr || call.place != place) {
        return std::nullopt;
      }
    }
    for (size_t j = 0; j < call.weights.size(); ++j) {
      if (!constants.contains(run.arguments[operands.size() + j])) {
        return std::nullopt;
      }
      plan.kept.push_back(call.weights[j]);
    }
    if (call.at != nullptr) {
      const size_t first_number = run.arguments.size() - call.numbers.size() - (call.leaves_gpu_idle ? 1 : 0);
      plan.attention.push_back({i, run.blocks - call.blocks, first_number, call});
      auto& kept = plan.attention.back().call;
      kept.inputs.clear();
      kept.weights.clear();
      kept.written.clear();
    }
    plan.runs.push_back(run);
  }
  const uint64_t memory = address_of(plan.memory);
  std::set<uint64_t> written; // outputs
  for (const auto& [slot, x] : outputs) {
    const auto address = address_of_operand(x);
    Tensor output{slot, x.shape(), x.dtype(), {}};
    for (size_t i = 0; address && i < plan.runs.size(); ++i) {
      const auto& arguments = plan.runs[i].arguments;
      for (size_t j = 0; j < arguments.size(); ++j) {
        if (arguments[j] == *address) {
          output.arguments.push_back({i, j});
        }
      }
    }
    if (output.arguments.empty()) {
      return std::nullopt;
    }
    written.insert(*address);
    plan.outputs.push_back(std::move(output));
  }
  for (const auto& kernel : sequence->kernels) {
    for (const auto& result : kernel.results) {
      const uint64_t address = memory + result.first;
      if (written.contains(address) || (read.contains(address) && !kernel.call.leaves_gaps)) {
        plan.results.push_back(result);
      }
    }
  }
  return plan;
}

// -- a replay ----------------------------------------------------------------

std::optional<TokenPlace> Replay::place_of(State& state, const Limits& limits) const {
  const int64_t position = *state.tensors[use_.input]->data<int64_t>();
  state.values = plan_->values;
  Context context(program_, state, stream_, limits);
  try {
    for (const auto* instruction : use_.arithmetic) {
      instruction->function(instruction->node, context);
    }
  } catch (const std::exception&) {
    return std::nullopt; // the call will fail with the error
  }
  const auto place = use_.place(position, state.values);
  return place && place->span.stop <= plan_->capacity ? place : std::nullopt;
}

bool Replay::prepare(State& state, const Limits& limits) {
  if (!plan_ || has_memory_limit()) {
    return false;
  }
  for (size_t i = 0; i < plan_->buffers.size(); ++i) {
    const auto& contents = state.buffers()[i]->contents;
    if (!contents || gpu::address_on_gpu(*contents) != plan_->buffers[i] || !contents->is_donatable()) {
      plan_.reset(); // for example after a reset
      results_.reset();
      return false;
    }
  }
  in_use_.clear();
  for (const auto& input : plan_->inputs) {
    const mx::array& x = *state.tensors[input.slot];
    const auto operand = gpu::operand_in_memory(x);
    if (x.shape() != input.shape || !operand) {
      return false;
    }
    for (const auto& [kernel, number] : input.arguments) {
      plan_->runs[kernel].arguments[number] = address_of(*operand);
    }
    in_use_.push_back(*operand);
  }
  const auto place = place_of(state, limits);
  if (!place) {
    return false;
  }
  for (const auto& [kernel, ahead, first_number, call] : plan_->attention) {
    const auto work = call.at(*place);
    auto& run = plan_->runs[kernel];
    std::copy(work.numbers.begin(), work.numbers.end(), run.arguments.begin() + static_cast<ptrdiff_t>(first_number));
    run.blocks = work.blocks + ahead;
    if (call.leaves_gpu_idle) {
      run.arguments.back() = work.blocks;
    }
  }
  return true;
}

std::vector<std::pair<uint32_t, mx::array>> Replay::outputs() {
  std::vector<std::pair<uint32_t, mx::array>> result;
  for (const auto& output : plan_->outputs) {
    const size_t bytes = mx::array(output.shape, output.dtype, nullptr, {}).nbytes();
    mx::array y = internals::array_in(gpu::allocate_on_gpu(bytes, stream_), output.shape, output.dtype);
    for (const auto& [kernel, number] : output.arguments) {
      plan_->runs[kernel].arguments[number] = address_of(y);
    }
    result.emplace_back(output.slot, std::move(y));
  }
  return result;
}

void Replay::start() {
  plan_->graph->start(plan_->runs);
  gpu::keep_until_done(std::exchange(in_use_, {}), stream_);
}

// -- the trial ---------------------------------------------------------------

void Replay::try_out(const State& state) {
  const mx::array& memory = plan_->memory;
  results_ = mx::full({static_cast<int>(memory.size())}, mx::array(uint8_t{255}), mx::uint8, stream_);
  evaluate({*results_}, stream_);
  auto runs = plan_->runs;
  const uint64_t begin = address_of(memory), moved = address_of(*results_);
  for (auto& run : runs) {
    for (auto& argument : run.arguments) {
      argument = argument >= begin && argument < begin + memory.size() ? argument - begin + moved : argument;
    }
  }
  for (const auto& input : plan_->inputs) { // an output of the recorded call may be in its memory
    for (const auto& [kernel, number] : input.arguments) {
      runs[kernel].arguments[number] = plan_->runs[kernel].arguments[number];
    }
  }
  for (int i = 0; i < kTrials; ++i) {
    const auto begin_of_run = Clock::now();
    Evaluation evaluation({}, stream_, state.owner);
    evaluation.start([&] { plan_->graph->start(runs); });
    evaluation.wait();
    seconds_ = seconds_since(begin_of_run);
  }
  begin_ = Clock::now();
}

void Replay::judge(const Plan& ordinary, const State& state) {
  Evaluation({}, stream_, state.owner).wait();
  const double seconds = seconds_since(begin_);
  const auto results = std::exchange(results_, std::nullopt);
  if (ordinary.results != plan_->results || ordinary.runs.size() != plan_->runs.size()) {
    return give_up("two calls have different kernels");
  }
  std::vector<mx::array> equal;
  for (const auto& [begin, size] : plan_->results) {
    const auto part = [begin = static_cast<int64_t>(begin), size = static_cast<int>(size)](
                          const mx::array& x) { return internals::view(x, {size}, {1}, begin); };
    equal.push_back(mx::array_equal(part(*results), part(ordinary.memory), stream_));
  }
  const auto all = mx::stack(equal, stream_);
  evaluate({all}, stream_);
  const bool* const flags = all.data<bool>();
  if (const auto different = std::find(flags, flags + equal.size(), false); different != flags + equal.size()) {
    return give_up(str("result ", different - flags, " of ", equal.size(), " differs from that of a usual call"));
  }
  if (seconds_ > kMaxSlowdown * seconds) {
    return give_up(str("it takes ", 1e6 * seconds_, " us, and a call without it ", 1e6 * seconds, " us"));
  }
  is_proven_ = true;
  ET_LOG(Info, "MLX: calls for one token are replayed: %.0f us, and %.0f us without", 1e6 * seconds_, 1e6 * seconds);
}

void Replay::give_up(const std::string& reason) {
  is_given_up_ = true;
  plan_.reset();
  results_.reset();
  ET_LOG(Info, "MLX: calls for one token of this program are not replayed: %s", reason.c_str());
}

} // namespace executorch_mlx
