#include "call/step_replay.h"

#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "gpu/device_memory.h"
#include "gpu/fused.h"
#include "mlx_internals/arrays.h"

namespace executorch_mlx {

namespace {

constexpr int kMaxAttempts = 3;
constexpr int kTrials = 3; // of which the last one is timed: the first ones also move the graph to the GPU

uint64_t address_of(const mx::array& x) { return reinterpret_cast<uintptr_t>(gpu::address_on_gpu(x)); }

std::optional<uint64_t> address_of_operand(const mx::array& x) {
  const auto operand = gpu::operand_in_memory(x);
  return operand ? std::optional(address_of(*operand)) : std::nullopt;
}

} // namespace

size_t StepReplay::run(State& state, Context& context) {
  const size_t end = part_.use.end;
  if (is_given_up_) {
    return 0;
  }
  if (prepare(state, context)) {
    for (const uint32_t slot : part_.use.caches) {
      state.drop_reference(slot);
    }
    if (is_proven_) {
      start(state);
      return end;
    }
    try_out(state);
  } else if (plan_) {
    return 0;
  }
  record(state, context);
  return end;
}

// -- recording ---------------------------------------------------------------

// Makes the plan of a step that has run as a sequence of kernels.
class StepReplay::Planner {
 public:
  Planner(const StepReplay& replay, const State& state, const gpu::SequenceKernel::Recording& sequence)
      : replay_(replay),
        state_(state),
        sequence_(sequence),
        plan_{{}, {}, {}, {}, ReplayedPart::addresses(state, replay.part_.use.caches), std::numeric_limits<int>::max(),
            state.values, {}, *sequence.memory, {}, nullptr} {}

  // Returns nullopt if an argument of a kernel has an address that may change.
  std::optional<Plan> plan(const ReplayedPart::Slots& results) {
    places_ = replay_.part_.use.places(replay_.part_.positions(state_), state_.values);
    find_constants_and_inputs();
    const auto add_all = [](const auto& items, auto&& add) { return std::all_of(items.begin(), items.end(), add); };
    const bool is_complete = sequence_.runs == 1 && places_ && find_caches() &&
        add_all(sequence_.kernels, [&](const auto& kernel) { return add_kernel(kernel); }) &&
        add_all(results, [&](const auto& result) { return add_result(result.first, result.second); });
    if (!is_complete) {
      return std::nullopt;
    }
    find_compared();
    return std::move(plan_);
  }

 private:
  bool find_caches() {
    for (const uint32_t slot : replay_.part_.use.caches) {
      const mx::array& cache = *state_.tensors[slot];
      plan_.capacity = std::min(plan_.capacity, cache.shape(2));
      if (!caches_.insert(address_of(cache)).second) {
        return false;
      }
    }
    return true;
  }

  void find_constants_and_inputs() {
    for (uint32_t slot = 0; slot < replay_.part_.program.layout.constants; ++slot) {
      constants_.insert(address_of(*state_.tensors[slot]));
    }
    for (const auto* slot : *replay_.part_.program.graph->input_map()) {
      const mx::array& x = *state_.tensors[slot->idx()];
      inputs_.push_back(address_of_operand(x));
      plan_.inputs.push_back({slot->idx(), x.shape(), x.dtype(), {}});
    }
  }

  bool add_kernel(const gpu::SequenceKernel::Record& kernel) {
    const auto& [run, call, operands, written] = kernel;
    const size_t index = plan_.runs.size();
    for (size_t i = 0; i < operands.size(); ++i) {
      if (!operands[i]) {
        read_.insert(run.arguments[i]);
      } else if (!add_operand(call, *operands[i], run.arguments[i], {index, i})) {
        return false;
      }
    }
    for (size_t i = 0; i < call.weights.size(); ++i) {
      if (!constants_.contains(run.arguments[operands.size() + i])) {
        return false;
      }
      plan_.kept.push_back(call.weights[i]);
    }
    if (call.at != nullptr) {
      const size_t first_number = run.arguments.size() - call.numbers.size() - (call.leaves_gpu_idle ? 1 : 0);
      plan_.attention.push_back({index, run.blocks - call.blocks, first_number, call});
      auto& kept = plan_.attention.back().call;
      kept.inputs.clear();
      kept.weights.clear();
      kept.written.clear();
    }
    plan_.runs.push_back(run);
    return true;
  }

  // An operand that was in memory before the sequence.
  bool add_operand(
      const gpu::SequenceKernel::Call& call, const mx::array& operand, uint64_t address, const Argument& argument) {
    const auto input = std::find(inputs_.begin(), inputs_.end(), std::optional(address));
    if (input != inputs_.end()) {
      plan_.inputs[input - inputs_.begin()].arguments.push_back(argument);
      return true;
    }
    if (constants_.contains(address) || (call.workspace && address_of(*call.workspace) == address)) {
      plan_.kept.push_back(operand);
      return true;
    }
    return caches_.contains(address) && call.at != nullptr && call.places == *places_;
  }

  bool add_result(uint32_t slot, const mx::array& x) {
    const auto address = address_of_operand(x);
    Tensor result{slot, x.shape(), x.dtype(), {}};
    for (size_t i = 0; address && i < plan_.runs.size(); ++i) {
      const auto& arguments = plan_.runs[i].arguments;
      for (size_t j = 0; j < arguments.size(); ++j) {
        if (arguments[j] == *address) {
          result.arguments.push_back({i, j});
        }
      }
    }
    if (result.arguments.empty()) {
      return false;
    }
    read_later_.insert(*address);
    plan_.results.push_back(std::move(result));
    return true;
  }

  void find_compared() {
    const uint64_t memory = address_of(plan_.memory);
    for (const auto& kernel : sequence_.kernels) {
      for (const auto& result : kernel.results) {
        const uint64_t address = memory + result.first;
        if (read_later_.contains(address) || (read_.contains(address) && !kernel.call.leaves_gaps)) {
          plan_.compared.push_back(result);
        }
      }
    }
  }

  const StepReplay& replay_;
  const State& state_;
  const gpu::SequenceKernel::Recording& sequence_;
  Plan plan_;
  std::optional<std::vector<TokenPlace>> places_;
  std::vector<std::optional<uint64_t>> inputs_; // the address of each
  std::set<uint64_t> constants_, caches_; // their addresses
  std::set<uint64_t> read_; // by a kernel after the one that writes it
  std::set<uint64_t> read_later_; // by an instruction after the sequence, or by the caller
};

void StepReplay::record(State& state, Context& context) {
  const auto begin = Clock::now();
  const auto results = part_.run(state, context);
  auto arrays = state.pending();
  for (const auto& [slot, x] : results) {
    arrays.push_back(x);
  }
  // A result is missing if a later instruction would compute it together with others.
  const auto sequence = results.size() == part_.results.size() ? gpu::record(arrays) : nullptr;
  state.evaluate(std::move(arrays), stream_);
  const double seconds = seconds_since(begin);
  std::string reason = "a step of it is not one sequence of kernels";
  if (sequence != nullptr) {
    auto plan = Planner(*this, state, *sequence).plan(results);
    if (plan && tried_) {
      return judge(*plan, seconds);
    }
    if (plan) {
      plan->graph = gpu::KernelReplay::make(plan->runs, stream_);
      plan_ = std::move(plan);
      return;
    }
    reason = "its kernels use memory that changes";
  }
  tried_.reset();
  if (++attempts_ == kMaxAttempts) {
    give_up(reason);
  }
}

// -- a replay ----------------------------------------------------------------

std::optional<std::vector<TokenPlace>> StepReplay::places(State& state, Context& context) const {
  if (!part_.set_values(plan_->values, state, context)) {
    return std::nullopt;
  }
  const auto places = part_.use.places(part_.positions(state), state.values);
  const auto fits = [&](const TokenPlace& place) { return place.span.stop <= plan_->capacity; };
  return places && std::all_of(places->begin(), places->end(), fits) ? places : std::nullopt;
}

bool StepReplay::prepare(State& state, Context& context) {
  if (plan_ && !part_.finds_caches(state, plan_->caches)) {
    plan_.reset(); // for example after a reset
    tried_.reset();
  }
  if (!plan_) {
    return false;
  }
  in_use_.clear();
  for (const auto& input : plan_->inputs) {
    const mx::array& x = *state.tensors[input.slot];
    const auto operand = gpu::operand_in_memory(x);
    if (x.shape() != input.shape || (!operand && !input.arguments.empty())) {
      return false;
    }
    for (const auto& [kernel, number] : input.arguments) {
      plan_->runs[kernel].arguments[number] = address_of(*operand);
      in_use_.push_back(*operand);
    }
  }
  const auto places = this->places(state, context);
  if (!places) {
    return false;
  }
  for (const auto& [kernel, ahead, first_number, call] : plan_->attention) {
    const auto work = call.at(*places);
    auto& run = plan_->runs[kernel];
    std::copy(work.numbers.begin(), work.numbers.end(), run.arguments.begin() + static_cast<ptrdiff_t>(first_number));
    run.blocks = work.blocks + ahead;
    if (call.leaves_gpu_idle) {
      run.arguments.back() = work.blocks;
    }
  }
  return true;
}

void StepReplay::start(State& state) {
  std::vector<mx::array> results;
  for (const auto& result : plan_->results) {
    const size_t bytes = mx::array(result.shape, result.dtype, nullptr, {}).nbytes();
    mx::array y = internals::array_in(gpu::allocate_on_gpu(bytes, stream_), result.shape, result.dtype);
    for (const auto& [kernel, number] : result.arguments) {
      plan_->runs[kernel].arguments[number] = address_of(y);
    }
    state.tensors[result.slot] = y;
    results.push_back(std::move(y));
  }
  Evaluation({}, stream_, state.owner).start([&] {
    plan_->graph->start(plan_->runs);
    gpu::keep_until_done(std::exchange(in_use_, {}), stream_);
    internals::wait_for_stream(results, stream_);
  });
  state.set_written(results[0]);
}

// -- the trial ---------------------------------------------------------------

void StepReplay::try_out(State& state) {
  const mx::array& memory = plan_->memory;
  tried_ = mx::full({static_cast<int>(memory.size())}, mx::array(uint8_t{255}), mx::uint8, stream_);
  evaluate({*tried_}, stream_);
  auto runs = plan_->runs;
  const uint64_t begin = address_of(memory), moved = address_of(*tried_);
  for (auto& run : runs) {
    for (auto& argument : run.arguments) {
      argument = argument >= begin && argument < begin + memory.size() ? argument - begin + moved : argument;
    }
  }
  for (const auto& input : plan_->inputs) { // a result of the recorded call may be in its memory
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
}

void StepReplay::judge(const Plan& usual, double seconds) {
  const auto tried = std::exchange(tried_, std::nullopt);
  if (usual.compared != plan_->compared || usual.runs.size() != plan_->runs.size()) {
    return give_up("two steps have different kernels");
  }
  std::vector<mx::array> equal;
  for (const auto& [begin, size] : plan_->compared) {
    const auto part = [begin = static_cast<int64_t>(begin), size = static_cast<int>(size)](
                          const mx::array& x) { return internals::view(x, {size}, {1}, begin); };
    equal.push_back(mx::array_equal(part(*tried), part(usual.memory), stream_));
  }
  const auto all = mx::stack(equal, stream_);
  evaluate({all}, stream_);
  const bool* const flags = all.data<bool>();
  if (const auto different = std::find(flags, flags + equal.size(), false); different != flags + equal.size()) {
    return give_up(str("result ", different - flags, " of ", equal.size(), " differs from that of a usual step"));
  }
  if (seconds_ > kMaxSlowdown * seconds) {
    return give_up(str("it takes ", 1e6 * seconds_, " us, and a step without it ", 1e6 * seconds, " us"));
  }
  is_proven_ = true;
  ET_LOG(Info, "MLX: %zu of %zu instructions of a step are replayed: %.0f us, and %.0f us without", part_.use.end,
      part_.program.chains[part_.program.graph->main_chain_idx()].instructions.size(), 1e6 * seconds_, 1e6 * seconds);
}

void StepReplay::give_up(const std::string& reason) {
  is_given_up_ = true;
  plan_.reset();
  tried_.reset();
  ET_LOG(Info, "MLX: steps of this program are not replayed: %s", reason.c_str());
}

} // namespace executorch_mlx
