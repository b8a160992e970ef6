#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/deferred.h>
#pragma GCC visibility pop

#include "call/deferred.h"

#include <numeric>
#include <string_view>
#include <utility>

#include "call/evaluation.h"
#include "call/reset.h"
#include "checks.h"
#include "guarded.h"
#include "memory/views.h"

namespace executorch_mlx {

namespace {

// Of this thread: what the next call shall do, and the last deferred call until it is taken.
thread_local std::optional<Deferral> next_call;
thread_local std::unique_ptr<DeferredCall> last_call;

} // namespace

DeferredCall::DeferredCall(const MlxProgram& program, std::shared_ptr<Session> session, Arguments args,
    std::vector<mx::array> outputs, std::vector<mx::array> copies, mx::Stream stream, uint64_t failures)
    : program_(program),
      session_(std::move(session)),
      args_(args.begin(), args.end()),
      outputs_(std::move(outputs)),
      copies_(std::move(copies)),
      stream_(stream),
      failures_(failures),
      resets_(session_->resets) {}

DeferredCall::~DeferredCall() {
  try {
    wait();
  } catch (...) {
    session_->owner->has_lost_work = true; // nobody takes the results of this call
  }
}

void DeferredCall::wait() { wait_for(copies_, stream_, *session_->owner); }

void DeferredCall::finish() {
  std::lock_guard lock(session_->mutex);
  try {
    wait();
    check_no_failure_since(*session_->owner, failures_);
  } catch (...) {
    if (session_->resets == resets_) {
      session_->make_undefined();
    }
    throw;
  }
  write_tensor_outputs(program_, {args_.data(), args_.size()}, copies_);
}

const mx::array& DeferredCall::output(const void* memory) const {
  const auto* outputs = program_.graph->output_map();
  const size_t first = args_.size() - (outputs == nullptr ? 0 : outputs->size());
  auto array = outputs_.begin();
  for (size_t i = first; i < args_.size(); ++i) {
    if (!args_[i]->isTensor()) {
      continue;
    }
    if (args_[i]->toTensor().const_data_ptr() == memory) {
      return *array;
    }
    ++array;
  }
  fail(Error::InvalidArgument, "defer: the source has no output with this memory");
}

std::optional<Deferral> take_deferral() { return std::exchange(next_call, std::nullopt); }

void set_deferred(std::unique_ptr<DeferredCall> call) { last_call = std::move(call); }

void set_tokens(const Deferral& deferral, mx::array& tokens, mx::Stream stream) {
  const mx::array& source = deferral.source->output(deferral.output);
  check_argument(source.dtype() == mx::int64 && deferral.elements.size() == tokens.size(), "defer: got ",
      deferral.elements.size(), " elements of ", describe(source), ", expected ", tokens.size(), " of int64");
  for (const int64_t element : deferral.elements) {
    check_argument(0 <= element && element < static_cast<int64_t>(source.size()), "defer: element ", element,
        " is out of range [0, ", source.size(), ")");
  }
  std::vector<int64_t> all(source.size());
  std::iota(all.begin(), all.end(), 0);
  if (deferral.elements == all) {
    tokens = mx::reshape(source, tokens.shape(), stream);
    return;
  }
  const std::vector<int32_t> indices(deferral.elements.begin(), deferral.elements.end());
  const mx::array index(indices.begin(), tokens.shape(), mx::int32);
  tokens = mx::take(mx::flatten(source, stream), index, 0, stream);
}

std::vector<mx::array> copies_of(const std::vector<mx::array>& arrays, mx::Stream stream) {
  std::vector<mx::array> copies;
  for (const auto& x : arrays) {
    // Unlike mx::copy or mx::contiguous, this never shares the memory of x.
    copies.push_back(x.size() == 0 ? x : mx::where(views::scalar_for(x, mx::array(true), stream), x, x, stream));
  }
  return copies;
}

} // namespace executorch_mlx

using namespace executorch_mlx;

// An executorch_mlx_deferred is a DeferredCall.
void executorch_mlx_defer(
    const executorch_mlx_deferred* source, const void* output, const int64_t* elements, size_t count) {
  last_call.reset();
  auto& deferral = next_call.emplace();
  deferral.error = guarded("defer", [&] {
    if (source != nullptr) {
      check_argument(elements != nullptr || count == 0, "elements: got a null pointer");
      check_argument(count <= deferral.elements.max_size(), "elements: got ", count, " of them");
      deferral.elements.assign(elements, elements + count);
      deferral.source = reinterpret_cast<const DeferredCall*>(source);
      deferral.output = output;
    }
  });
}

executorch_mlx_deferred* executorch_mlx_deferred_take() {
  next_call.reset();
  return reinterpret_cast<executorch_mlx_deferred*>(last_call.release());
}

int executorch_mlx_deferred_finish(executorch_mlx_deferred* call) {
  auto* const deferred = reinterpret_cast<DeferredCall*>(call);
  const Error error = guarded("execute", [&] {
    check_argument(deferred != nullptr, "got a null pointer");
    deferred->finish();
  });
  set_undefined(error != Error::Ok && deferred != nullptr && deferred->is_undefined());
  return static_cast<int>(error);
}

void executorch_mlx_deferred_free(executorch_mlx_deferred* call) { delete reinterpret_cast<DeferredCall*>(call); }
