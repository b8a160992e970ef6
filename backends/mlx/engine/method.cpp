#include "method.h"

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch_mlx/buffers.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "check.h"
#include "token_mask.h"

namespace executorch_mlx::engine {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::runtime::Error;
using executorch::runtime::EValue;

namespace {

constexpr int64_t kNoToken = -1; // in bias_tokens: an unused entry
// Values of the input `logprobs`; 0: no log probabilities. Only `verify` has targets: other methods return the log
// probabilities of drawn tokens for any value but 0.
constexpr int64_t kLogprobsOfTargets = 1;
constexpr int64_t kLogprobsOfDrawn = 2;

const SamplingParameters& sampling_of(const RowTask& task) {
  static const SamplingParameters greedy;
  return task.sampling != nullptr ? *task.sampling : greedy;
}

// An input with a number for each task.
template <typename T>
MethodInput number(const char* name, std::vector<SizesType> sizes, T (*value)(const RowTask& task)) {
  const auto write = [value](void* memory, size_t index, const RowTask& task) {
    static_cast<T*>(memory)[index] = value(task);
  };
  return {name, executorch::runtime::CppTypeToScalarType<T>::value, std::move(sizes), -1, write};
}

// An input with a list of each task, all of the same length.
template <typename T>
MethodInput list(
    const char* name, std::vector<SizesType> sizes, int dynamic_axis, std::span<const T> RowTask::* member) {
  const auto write = [member](void* memory, size_t index, const RowTask& task) {
    const std::span<const T> values = task.*member;
    std::copy(values.begin(), values.end(), static_cast<T*>(memory) + index * values.size());
  };
  return {name, executorch::runtime::CppTypeToScalarType<T>::value, std::move(sizes), dynamic_axis, write};
}

// The entries of logit_bias, `size` for each task, of which `value` makes the elements of the input.
template <typename T, typename Value>
MethodInput biases(const char* name, std::vector<SizesType> sizes, int64_t size, T unused, Value value) {
  const auto write = [=](void* memory, size_t index, const RowTask& task) {
    const auto& entries = sampling_of(task).logit_bias;
    const auto used = std::min(std::ssize(entries), static_cast<ptrdiff_t>(size)); // a draft model may take fewer
    T* const to = static_cast<T*>(memory) + index * size;
    std::fill(std::transform(entries.begin(), entries.begin() + used, to, value), to + size, unused);
  };
  return {name, executorch::runtime::CppTypeToScalarType<T>::value, std::move(sizes), -1, write};
}

} // namespace

Method::Method(executorch::extension::Module& module, const std::string& path, const LlmMetadata& metadata,
    const std::string& name, Kind kind, int64_t max_tasks, Form form, Profile* profile, bool& is_undefined)
    : module_(module),
      path_(path),
      metadata_(metadata),
      name_(name),
      kind_(kind),
      max_tasks_(max_tasks),
      form_(form),
      profile_(profile),
      is_undefined_(is_undefined),
      mask_words_(metadata.takes_allowed_tokens ? mask_words(metadata.vocab_size) : 0) {
  const MethodChecker checker(module, path, name);
  is_one_mlx_call_ = checker.is_one_mlx_call();
  num_outputs_ = checker.num_outputs();
  if (max_tasks == 1) {
    const bool has_own_limit = kind == Kind::kVerify || kind == Kind::kRewind;
    max_tokens_ = has_own_limit ? std::max<int64_t>(1, checker.max_size(0, 1)) : metadata.max_seq_len;
  }
  width_ = is_embedded() ? std::max<int64_t>(1, checker.max_size(0, 2)) : 0;
  inputs_ = make_inputs();
  checker.check_inputs(inputs_); // before memory is allocated: a damaged file may have any sizes in its metadata
  checker.check_backends();
  kind == Kind::kLogits ? checker.check_returns_logits() : checker.check_returns_tokens();
  for (const MethodInput& input : inputs_) {
    size_t bytes = executorch::runtime::elementSize(input.type);
    for (const SizesType size : input.sizes) {
      bytes *= static_cast<size_t>(size);
    }
    tensors_.push_back(executorch::extension::make_tensor_ptr(input.sizes, std::vector<uint8_t>(bytes), input.type));
    arguments_.emplace_back(*tensors_.back());
  }
}

// Returns the inputs in order, with the sizes that the metadata says.
std::vector<MethodInput> Method::make_inputs() const {
  const auto tasks = static_cast<SizesType>(max_tasks_);
  const auto tokens = static_cast<SizesType>(max_tokens_);
  std::vector<MethodInput> all;
  if (is_embedded()) {
    all.push_back(list("embeddings", {1, tokens, static_cast<SizesType>(width_)}, 1, &RowTask::embeddings));
  } else {
    all.push_back(list("tokens", {tasks, tokens}, max_tasks_ == 1 ? 1 : -1, &RowTask::tokens));
  }
  all.push_back(number("input_pos", {tasks}, +[](const RowTask& task) { return task.position; }));
  if (metadata_.rows > 1) {
    all.push_back(number("row", {tasks}, +[](const RowTask& task) { return task.row; }));
  }
  if (kind_ == Kind::kDraft) {
    all.push_back(number("row_length", {1}, +[](const RowTask& task) { return task.row_length; }));
  }
  if (form_ == Form::kAdapted) {
    all.push_back(number("adapter", {tasks}, +[](const RowTask& task) { return task.adapter; }));
  }
  if (is_embedded() && metadata_.takes_penalties) {
    all.push_back(list("tokens", {1, tokens}, 1, &RowTask::tokens));
  }
  if (metadata_.pictures.has_rope_offset && is_embedded()) {
    all.push_back(list("rope_positions", {3, tokens}, 1, &RowTask::rope_positions));
  } else if (metadata_.pictures.has_rope_offset) {
    all.push_back(number("rope_offset", {tasks}, +[](const RowTask& task) { return task.rope_offset; }));
  }
  if (kind_ != Kind::kLogits && kind_ != Kind::kRewind) {
    add_head_inputs(all);
  }
  if (kind_ == Kind::kVerify && metadata_.logprobs > 0) {
    const auto write = [](void* memory, size_t, const RowTask& task) {
      auto* const targets = static_cast<int64_t*>(memory);
      std::fill_n(targets, task.tokens.size(), 0);
      std::copy(task.targets.begin(), task.targets.end(), targets);
    };
    all.push_back({"targets", ScalarType::Long, {1, tokens}, 1, write});
  }
  return all;
}

void Method::add_head_inputs(std::vector<MethodInput>& inputs) const {
  const auto tasks = static_cast<SizesType>(max_tasks_);
  const auto bias = static_cast<SizesType>(metadata_.logit_bias);
  const auto words = static_cast<SizesType>(mask_words_);
  const std::vector<SizesType> scalar = max_tasks_ == 1 ? std::vector<SizesType>{} : std::vector<SizesType>{tasks};
  const auto add = [&]<typename T>(const char* name, T (*value)(const RowTask& task)) {
    inputs.push_back(number(name, scalar, value));
  };
  add("temperature", +[](const RowTask& task) { return sampling_of(task).temperature; });
  add("top_p", +[](const RowTask& task) { return sampling_of(task).top_p; });
  if (metadata_.takes_seed) {
    add("seed", +[](const RowTask& task) { return task.seed; });
  }
  if (metadata_.takes_top_k) {
    add("top_k", +[](const RowTask& task) { return sampling_of(task).top_k; });
  }
  if (metadata_.takes_min_p) {
    add("min_p", +[](const RowTask& task) { return sampling_of(task).min_p; });
  }
  if (metadata_.takes_penalties) {
    add("repetition_penalty", +[](const RowTask& task) { return sampling_of(task).repetition_penalty; });
    add("presence_penalty", +[](const RowTask& task) { return sampling_of(task).presence_penalty; });
    add("frequency_penalty", +[](const RowTask& task) { return sampling_of(task).frequency_penalty; });
  }
  if (bias > 0) {
    const std::vector<SizesType> sizes = max_tasks_ == 1 ? std::vector{bias} : std::vector{tasks, bias};
    inputs.push_back(biases("bias_tokens", sizes, bias, kNoToken, [](const auto& entry) { return entry.first; }));
    inputs.push_back(biases("bias_values", sizes, bias, 0.0f, [](const auto& entry) { return entry.second; }));
  }
  if (words > 0) {
    const bool verifies = kind_ == Kind::kVerify;
    const auto write = [=](void* memory, size_t index, const RowTask& task) {
      const size_t count = words * (verifies ? task.tokens.size() : 1);
      auto* const mask = static_cast<int32_t*>(memory) + index * count;
      if (task.allowed_tokens.empty()) {
        std::fill_n(mask, count, kAllTokens);
      } else {
        std::copy_n(task.allowed_tokens.begin(), count, mask);
      }
    };
    const SizesType masks = verifies ? static_cast<SizesType>(max_tokens_) : tasks;
    inputs.push_back({"allowed_tokens", ScalarType::Int, {masks, words}, verifies ? 0 : -1, write});
  }
  if (metadata_.logprobs > 0) {
    add(
        "logprobs", +[](const RowTask& task) {
          return !task.wants_logprobs ? 0 : task.targets.empty() ? kLogprobsOfDrawn : kLogprobsOfTargets;
        });
  }
  if (metadata_.takes_adjusts) { // one value for all tasks
    const auto write = [](void* memory, size_t index, const RowTask& task) {
      auto& adjusts = *static_cast<bool*>(memory);
      adjusts = (index > 0 && adjusts) || sampling_of(task).changes_logits() || !task.allowed_tokens.empty();
    };
    inputs.push_back({"adjusts", ScalarType::Bool, {}, -1, write});
  }
  if (metadata_.speech.timestamp_begin >= 0) {
    add("timestamps", +[](const RowTask& task) { return int64_t{task.timestamps}; });
  }
}

void Method::load() {
  if (!module_.is_method_loaded(name_)) {
    const auto held = profile_ ? profile_->lock() : std::unique_lock<std::mutex>();
    auto* const tracer = profile_ ? profile_->tracer() : nullptr;
    check_ok(module_.load_method(name_, nullptr, tracer), path_, ": cannot load the method ", name_, ": ");
  }
}

bool Method::unload() { return module_.unload_method(name_); }

executorch::runtime::Result<std::vector<EValue>> Method::execute() {
  const auto held = profile_ ? profile_->lock() : std::unique_lock<std::mutex>();
  auto result = module_.execute(name_, arguments_);
  is_undefined_ |= !result.ok() && executorch_mlx_is_undefined() != 0;
  return result;
}

// Sets the dynamic axes to this number of tokens.
void Method::resize(size_t tokens) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (inputs_[i].dynamic_axis >= 0) {
      const auto old = tensors_[i]->sizes();
      std::vector<SizesType> sizes(old.begin(), old.end());
      sizes[inputs_[i].dynamic_axis] = static_cast<SizesType>(tokens);
      const Error error = executorch::runtime::resize_tensor(*tensors_[i], {sizes.data(), sizes.size()});
      check_ok(error, name_, ": ", tokens, " tokens: ");
    }
  }
}

std::vector<EValue> Method::run(std::span<const RowTask> tasks) {
  load();
  const size_t count = tasks[0].tokens.size();
  resize(count);
  for (int64_t i = 0; i < max_tasks_; ++i) {
    const RowTask& task = tasks[i < static_cast<int64_t>(tasks.size()) ? i : 0];
    check(!is_embedded() || task.embeddings.size() == count * width_, EXECUTORCH_MLX_FAILED, name_, ": got ",
        task.embeddings.size(), " numbers for ", count, " embeddings of ", width_);
    for (size_t input = 0; input < inputs_.size(); ++input) {
      inputs_[input].write(tensors_[input]->mutable_data_ptr(), i, task);
    }
  }
  auto outputs = execute();
  check_ok(outputs.error(), name_, ": ", count, " tokens at position ", tasks[0].position, ": ");
  for (const EValue& value : *outputs) {
    check(value.isTensor(), EXECUTORCH_MLX_FAILED, name_, ": an output is not a tensor");
    check(has_memory(value.toTensor()), EXECUTORCH_MLX_FAILED, name_, ": an output has no memory");
  }
  check(!outputs->empty(), EXECUTORCH_MLX_FAILED, name_, ": no output");
  return std::move(*outputs);
}

Outputs Method::submit(std::span<const RowTask> tasks, const Outputs* source, std::span<const size_t> sources) {
  check(
      source == nullptr || source->pending, EXECUTORCH_MLX_FAILED, name_, ": the source of the tokens is not pending");
  std::vector<int64_t> elements;
  for (int64_t i = 0; source != nullptr && i < max_tasks_; ++i) {
    elements.push_back(static_cast<int64_t>(sources[i < static_cast<int64_t>(sources.size()) ? i : 0]));
  }
  const void* const tokens = source == nullptr ? nullptr : source->values[0].toTensor().const_data_ptr();
  load(); // now, because the next call of the delegate after executorch_mlx_defer() must be the one in run()
  executorch_mlx_defer(source == nullptr ? nullptr : source->pending.get(), tokens, elements.data(), elements.size());
  Outputs outputs;
  try {
    outputs.values = run(tasks);
  } catch (...) {
    executorch_mlx_deferred_free(executorch_mlx_deferred_take());
    throw;
  }
  outputs.pending.reset(executorch_mlx_deferred_take());
  return outputs;
}

void Method::finish(Outputs& outputs) {
  if (const auto pending = std::move(outputs.pending)) {
    const auto error = static_cast<Error>(executorch_mlx_deferred_finish(pending.get()));
    is_undefined_ |= error != Error::Ok && executorch_mlx_is_undefined() != 0;
    check_ok(error, name_, ": ");
  }
}

} // namespace executorch_mlx::engine
