#include "call/prompt_replay.h"

#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <variant>

#include "call/evaluation.h"
#include "checks.h"
#include "gpu/device_memory.h"
#include "gpu/sequence_kernel.h"
#include "mlx_internals/arrays.h"

namespace executorch_mlx {

namespace {

constexpr size_t kMaxCalls = 32;
constexpr int kMaxFailures = 3;
constexpr size_t kPartOfMemory = 32; // recordings of a method use at most this part of the memory of the GPU
constexpr int kTrials = 2; // of which the last one is timed: the first one also moves the graph to the GPU

} // namespace

size_t PromptReplay::run(State& state, Context& context) {
  Call* const call = find(state, context);
  if (call == nullptr) {
    context.run(part_.program.graph->main_chain_idx(), 0, part_.use.end);
    remember(state);
    return part_.use.end;
  }
  Slots inputs = this->inputs(state);
  if (call->failures >= kMaxFailures || inputs.size() != call->shapes.size()) {
    return 0;
  }
  if (call->work != nullptr && !finds_memory(*call, state)) { // for example after a reset
    drop(*call, state);
    count_failure(*call, "its buffers move");
    if (call->failures >= kMaxFailures) {
      return 0;
    }
  }
  for (const uint32_t slot : part_.use.caches) {
    state.drop_reference(slot);
  }
  if (call->work == nullptr) {
    record(*call, std::move(inputs), state, context);
  } else if (!call->is_proven) {
    try_out(*call, inputs, state, context);
  } else {
    start(*call, inputs, state);
    state.set_written(*state.tensors[part_.results[0]]);
  }
  return part_.use.end;
}

PromptReplay::Call* PromptReplay::find(State& state, Context& context) {
  const auto before = state.values;
  const auto numbers = this->numbers(state);
  for (auto call = calls_.begin(); call != calls_.end(); ++call) {
    const auto has_shape = [&](const auto* slot, const mx::Shape& shape) {
      return state.tensors[slot->idx()]->shape() == shape;
    };
    const auto& map = *part_.program.graph->input_map();
    if (numbers == call->numbers &&
        std::equal(map.begin(), map.end(), call->shapes.begin(), call->shapes.end(), has_shape) &&
        part_.set_values(call->values, state, context) && state.values == call->values) {
      calls_.splice(calls_.begin(), calls_, call);
      return &*call;
    }
  }
  state.values = before;
  return nullptr;
}

void PromptReplay::remember(State& state) {
  Call call{{}, numbers(state), state.values};
  for (const auto* slot : *part_.program.graph->input_map()) {
    call.shapes.push_back(state.tensors[slot->idx()]->shape());
  }
  calls_.push_front(std::move(call));
  if (calls_.size() > kMaxCalls) {
    drop(calls_.back(), state);
    calls_.pop_back();
  }
}

std::vector<int64_t> PromptReplay::numbers(const State& state) const {
  std::vector<int64_t> result;
  for (const uint32_t slot : part_.use.read) {
    for_each_integer(*state.tensors[slot], [&](int64_t number) { result.push_back(number); });
  }
  return result;
}

PromptReplay::Slots PromptReplay::inputs(const State& state) const {
  Slots result;
  for (const auto* slot : *part_.program.graph->input_map()) {
    if (const auto x = gpu::operand_in_memory(*state.tensors[slot->idx()])) {
      result.emplace_back(slot->idx(), *x);
    }
  }
  return result;
}

bool PromptReplay::finds_memory(const Call& call, State& state) const {
  return ReplayedPart::addresses(state, part_.buffers) == call.buffers && part_.finds_caches(state, call.caches);
}

// -- recording ---------------------------------------------------------------

void PromptReplay::record(Call& call, Slots inputs, State& state, Context& context) {
  call.inputs = std::move(inputs);
  call.caches = ReplayedPart::addresses(state, part_.use.caches);
  call.buffers = ReplayedPart::addresses(state, part_.buffers);
  call.results = part_.run(state, context);
  auto arrays = state.pending();
  for (const auto& [slot, x] : call.results) {
    arrays.push_back(x);
  }
  call.work = Evaluation(std::move(arrays), stream_, state.owner).record();
  const auto fits = [](const auto& result) { return gpu::operand_in_memory(result.second).has_value(); };
  const size_t limit = gpu::memory_of_gpu(stream_) / kPartOfMemory;
  if (call.work == nullptr) { // a kernel has needed new memory, which MLX makes with an evaluation
    count_failure(call, "MLX submits a part of it by itself");
  } else if (ReplayedPart::addresses(state, part_.use.caches) != call.caches) {
    drop(call, state);
    count_failure(call, "its buffers move");
  } else if (call.results.size() != part_.results.size() ||
      !std::all_of(call.results.begin(), call.results.end(), fits)) {
    refuse(call, state, "its results are not row-major");
  } else if (const size_t bytes = this->bytes(); bytes > limit) {
    refuse(call, state, str("with it, recordings use ", bytes >> 20, " MiB, and ", limit >> 20, " are allowed"));
  } else {
    take_results(call, state); // later calls write to the memory of the recorded results
  }
}

size_t PromptReplay::bytes() const {
  const auto add = [](size_t sum, const Call& call) { return sum + (call.work != nullptr ? call.work->bytes() : 0); };
  return std::accumulate(calls_.begin(), calls_.end(), size_t{0}, add);
}

void PromptReplay::drop(Call& call, State& state) {
  if (call.work != nullptr) {
    Evaluation({}, stream_, state.owner).wait();
  }
  call.work.reset();
  call.inputs.clear();
  call.results.clear();
  call.is_proven = false;
}

void PromptReplay::count_failure(Call& call, const std::string& reason) {
  if (++call.failures == kMaxFailures) {
    ET_LOG(Info, "MLX: a call for tokens of a prompt is not replayed: %s", reason.c_str());
  }
}

void PromptReplay::refuse(Call& call, State& state, const std::string& reason) {
  drop(call, state);
  call.failures = kMaxFailures - 1;
  count_failure(call, reason);
}

// -- a replay ----------------------------------------------------------------

void PromptReplay::start(const Call& call, const Slots& inputs, State& state) {
  take_results(call, state, [&] {
    std::vector<mx::array> in_use;
    for (size_t i = 0; i < inputs.size(); ++i) {
      gpu::copy_on_gpu(inputs[i].second, call.inputs[i].second, stream_);
      in_use.push_back(inputs[i].second);
    }
    call.work->start();
    gpu::keep_until_done(in_use, stream_);
  });
}

void PromptReplay::take_results(const Call& call, State& state, const std::function<void()>& before) {
  std::vector<mx::array> results;
  for (const auto& [slot, x] : call.results) {
    results.push_back(internals::array_in(gpu::allocate_on_gpu(x.nbytes(), stream_), x.shape(), x.dtype()));
  }
  Evaluation({}, stream_, state.owner).start([&] {
    if (before != nullptr) {
      before();
    }
    for (size_t i = 0; i < results.size(); ++i) {
      gpu::copy_on_gpu(call.results[i].second, results[i], stream_);
    }
    internals::wait_for_stream(results, stream_);
  });
  for (size_t i = 0; i < results.size(); ++i) {
    state.tensors[call.results[i].first] = std::move(results[i]);
  }
}

void PromptReplay::try_out(Call& call, const Slots& inputs, State& state, Context& context) {
  int64_t stop = 0; // of all positions in use
  for (const auto& row : part_.use.rows) {
    const auto* const bound = row.stops[0];
    stop = std::max(stop, bound->is_vid() ? std::get<int64_t>(state.values[bound->vid()->idx()]) : bound->literal());
  }
  // The opposite of each number, which is a copy in all cases.
  const auto opposites = [&] {
    std::vector<mx::array> result;
    for (const uint32_t slot : part_.use.caches) {
      const mx::array& cache = *state.tensors[slot];
      auto end = cache.shape();
      end[2] = std::min(end[2], static_cast<int>(stop));
      result.push_back(mx::negative(mx::slice(cache, mx::Shape(4, 0), end, stream_), stream_));
    }
    evaluate(result, stream_);
    Evaluation({}, stream_, state.owner).wait(); // until MLX has released the caches
    return result;
  };
  double seconds = 0;
  for (int i = 0; i < kTrials; ++i) {
    const auto begin = Clock::now();
    start(call, inputs, state);
    Evaluation({}, stream_, state.owner).wait();
    seconds = seconds_since(begin);
  }
  const auto caches = opposites();
  std::vector<mx::array> replayed;
  for (const uint32_t slot : part_.results) {
    replayed.push_back(*std::exchange(state.tensors[slot], std::nullopt));
  }

  const auto begin = Clock::now();
  const Slots usual = part_.run(state, context);
  auto arrays = state.pending();
  for (const auto& [slot, x] : usual) {
    arrays.push_back(x);
  }
  state.evaluate(std::move(arrays), stream_);
  const double seconds_of_usual = seconds_since(begin);

  std::vector<mx::array> equal;
  for (size_t i = 0; i < usual.size(); ++i) {
    equal.push_back(mx::array_equal(usual[i].second, replayed[i], stream_));
  }
  const auto usual_caches = opposites();
  for (size_t i = 0; i < caches.size(); ++i) {
    equal.push_back(mx::array_equal(usual_caches[i], caches[i], stream_));
  }
  const auto all = mx::all(mx::stack(equal, stream_), stream_);
  evaluate({all}, stream_);
  if (!all.item<bool>()) {
    return refuse(call, state, "a result differs from that of a usual call");
  }
  if (seconds > kMaxSlowdown * seconds_of_usual) {
    return refuse(
        call, state, str("it takes ", 1e6 * seconds, " us, and ", 1e6 * seconds_of_usual, " us without a replay"));
  }
  call.is_proven = true;
  ET_LOG(Info, "MLX: calls for %zu tokens at position %lld are replayed: %.0f us, and %.0f us without; %zu MiB",
      state.tensors[part_.tokens]->size(), static_cast<long long>(call.numbers[0]), 1e6 * seconds,
      1e6 * seconds_of_usual, call.work->bytes() >> 20);
}

} // namespace executorch_mlx
