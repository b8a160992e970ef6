#include "call/replay.h"

#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "call/call_io.h"
#include "gpu/device_memory.h"
#include "gpu/fused.h"
#include "gpu/verdicts.h"
#include "memory/limit.h"
#include "mlx_internals/arrays.h"
#include "program/tensor_slots.h"

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

// What a chain does with slots from instruction `begin` on.
struct SlotUse {
  SlotUse(const MlxProgram& program, int64_t chain, size_t begin = 0) {
    const auto& instructions = program.chains[chain].instructions;
    for (size_t i = begin; i < instructions.size(); ++i) {
      const auto& instruction = *instructions[i].source;
      for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
        if (access != Access::write) {
          add_read(tid.idx());
        }
      });
      add_called(program, instruction);
      for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
        if (access != Access::read) {
          written.insert(tid.idx());
        }
      });
    }
  }

  std::set<uint32_t> read; // before the chain writes them
  std::set<uint32_t> written; // in every case

 private:
  void add_read(uint32_t slot) {
    if (!written.contains(slot)) {
      read.insert(slot);
    }
  }

  // Of the chains that a control instruction runs, only the branches of an If certainly write something.
  void add_called(const MlxProgram& program, const fb::Instruction& instruction) {
    std::vector<SlotUse> called;
    for (const int64_t chain : called_chains(instruction)) {
      const auto& use = called.emplace_back(program, chain);
      std::for_each(use.read.begin(), use.read.end(), [&](uint32_t slot) { add_read(slot); });
    }
    if (instruction.op_type() == fb::OpNode::IfNode) {
      const auto &a = called[0].written, &b = called[1].written;
      std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::inserter(written, written.end()));
    }
  }
};

} // namespace

std::unique_ptr<Replay> Replay::make(const MlxProgram& program, mx::Stream stream) {
  if (!gpu::is_cuda(stream) || !gpu::is_used(gpu::Kernel::replay, stream)) {
    return nullptr;
  }
  const auto are_tensors = [](const auto* map) {
    return map != nullptr && map->size() > 0 && std::all_of(map->begin(), map->end(), [](const auto* slot) {
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
    : program_(program), use_(std::move(use)), tokens_(tokens), stream_(stream) {
  const auto& layout = program.layout;
  const auto main = program.graph->main_chain_idx();
  const auto read = SlotUse(program, main, use_.end).read;
  std::vector<const DecodedInstruction*> writers(layout.num_tensors()); // the last ones
  for (size_t i = 0; i < use_.end; ++i) {
    const auto& instruction = program.chains[main].instructions[i];
    for_each_tensor_slot(*instruction.source, [&](const fb::Tid& tid, Access access) {
      writers[tid.idx()] = access == Access::read ? writers[tid.idx()] : &instruction;
    });
  }
  for (uint32_t slot = 0; slot < layout.num_tensors(); ++slot) {
    const bool is_output = slot >= layout.outputs_begin() && slot < layout.buffers_begin();
    const bool is_input = slot >= layout.inputs_begin() && slot < layout.outputs_begin();
    const bool is_read = read.contains(slot) && slot >= layout.temps_begin();
    const auto* const writer = writers[slot];
    const bool is_number = std::count(use_.arithmetic.begin(), use_.arithmetic.end(), writer) > 0;
    if (writer != nullptr && !is_number && (is_output || is_read)) {
      results_.push_back(slot);
    } else if (is_input || is_read) {
      kept_.push_back(slot);
    }
  }
}

std::span<const int64_t> Replay::positions(const State& state) const {
  const mx::array& x = *state.tensors[use_.input];
  return {x.data<int64_t>(), x.size()};
}

Replay::Slots Replay::contents(const State& state, const std::vector<uint32_t>& slots) {
  Slots result;
  for (const uint32_t slot : slots) {
    if (state.tensors[slot]) {
      result.emplace_back(slot, *state.tensors[slot]);
    }
  }
  return result;
}

size_t Replay::run(State& state, Context& context) {
  const size_t rows = use_.rows.size();
  if (is_given_up_ || has_memory_limit() || state.tensors[use_.input]->size() != rows ||
      state.tensors[tokens_]->size() != rows) {
    return 0;
  }
  const mx::array& tokens = *state.tensors[tokens_];
  if (!gpu::operand_in_memory(tokens)) {
    Evaluation({tokens}, stream_, state.owner).start();
  }
  if (prepare(state, context)) {
    for (const uint32_t slot : use_.caches) {
      state.drop_reference(slot);
    }
    if (is_proven_) {
      start(state);
      return use_.end;
    }
    try_out(state);
  } else if (plan_) {
    return 0;
  }
  record(state, context);
  return use_.end;
}

// -- recording ---------------------------------------------------------------

// Makes the plan of a step that has run as a sequence of kernels.
class Replay::Planner {
 public:
  Planner(const Replay& replay, const State& state, const gpu::SequenceKernel::Recording& sequence)
      : replay_(replay),
        state_(state),
        sequence_(sequence),
        plan_{.capacity = std::numeric_limits<int>::max(),
            .values = state.values,
            .memory = *sequence.memory,
            .graph = nullptr} {}

  // Returns nullopt if an argument of a kernel has an address that may change.
  std::optional<Plan> plan(const Slots& results) {
    places_ = replay_.use_.places(replay_.positions(state_), state_.values);
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
    for (const uint32_t slot : replay_.use_.caches) {
      const mx::array& cache = *state_.tensors[slot];
      plan_.caches.push_back(gpu::address_on_gpu(cache));
      plan_.capacity = std::min(plan_.capacity, cache.shape(2));
      if (!caches_.insert(address_of(cache)).second) {
        return false;
      }
    }
    return true;
  }

  void find_constants_and_inputs() {
    for (uint32_t slot = 0; slot < replay_.program_.layout.constants; ++slot) {
      constants_.insert(address_of(*state_.tensors[slot]));
    }
    for (const auto* slot : *replay_.program_.graph->input_map()) {
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

  const Replay& replay_;
  const State& state_;
  const gpu::SequenceKernel::Recording& sequence_;
  Plan plan_;
  std::optional<std::vector<TokenPlace>> places_;
  std::vector<std::optional<uint64_t>> inputs_; // the address of each
  std::set<uint64_t> constants_, caches_; // their addresses
  std::set<uint64_t> read_; // by a kernel after the one that writes it
  std::set<uint64_t> read_later_; // by an instruction after the sequence, or by the caller
};

void Replay::record(State& state, Context& context) {
  const auto begin = Clock::now();
  context.run(program_.graph->main_chain_idx(), 0, use_.end);
  const auto results = contents(state, results_), kept = contents(state, kept_);
  state.release_temporaries(); // MLX cannot update a buffer in place while one of them holds it
  for (const Slots* slots : {&kept, &results}) {
    for (const auto& [slot, x] : *slots) {
      state.tensors[slot] = x;
    }
  }
  auto arrays = state.pending();
  for (const auto& [slot, x] : results) {
    arrays.push_back(x);
  }
  // A result is missing if a later instruction would compute it together with others.
  const auto sequence = results.size() == results_.size() ? gpu::record(arrays) : nullptr;
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

// Whether the KV caches are where they were, and nothing else uses them.
bool Replay::finds_caches(State& state) {
  for (size_t i = 0; i < use_.caches.size(); ++i) {
    auto& slot = state.tensors[use_.caches[i]];
    const mx::array cache = *std::exchange(slot, std::nullopt);
    const bool fits =
        gpu::address_on_gpu(cache) == plan_->caches[i] && state.can_update_in_place(use_.caches[i], cache);
    slot = cache;
    if (!fits) {
      return false;
    }
  }
  return true;
}

std::optional<std::vector<TokenPlace>> Replay::places(State& state, Context& context) const {
  state.values = plan_->values;
  try {
    for (const auto* instruction : use_.arithmetic) {
      instruction->function(instruction->node, context);
    }
  } catch (const std::exception&) {
    return std::nullopt; // the call will fail with the error
  }
  const auto places = use_.places(positions(state), state.values);
  const auto fits = [&](const TokenPlace& place) { return place.span.stop <= plan_->capacity; };
  return places && std::all_of(places->begin(), places->end(), fits) ? places : std::nullopt;
}

bool Replay::prepare(State& state, Context& context) {
  if (plan_ && !finds_caches(state)) {
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

void Replay::start(State& state) {
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

void Replay::try_out(State& state) {
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

void Replay::judge(const Plan& usual, double seconds) {
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
  ET_LOG(Info, "MLX: %zu of %zu instructions of a step are replayed: %.0f us, and %.0f us without", use_.end,
      program_.chains[program_.graph->main_chain_idx()].instructions.size(), 1e6 * seconds_, 1e6 * seconds);
}

void Replay::give_up(const std::string& reason) {
  is_given_up_ = true;
  plan_.reset();
  tried_.reset();
  ET_LOG(Info, "MLX: steps of this program are not replayed: %s", reason.c_str());
}

} // namespace executorch_mlx
