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

// An input whose memory is `values`.
template <typename T>
MethodInput input_of(
    const char* name, ScalarType type, std::vector<SizesType> sizes, std::vector<T>& values, int dynamic_axis = -1) {
  const auto allocate = [&values](size_t count) {
    values.resize(count);
    return values.data();
  };
  return {name, type, std::move(sizes), dynamic_axis, allocate};
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
  const auto all = inputs();
  checker.check_inputs(all); // before memory is allocated: a damaged file may have any sizes in its metadata
  checker.check_backends();
  kind == Kind::kLogits ? checker.check_returns_logits() : checker.check_returns_tokens();
  for (const MethodInput& input : all) {
    size_t count = 1;
    for (const SizesType size : input.sizes) {
      count *= static_cast<size_t>(size);
    }
    dynamic_axes_.push_back(input.dynamic_axis);
    tensors_.push_back(executorch::extension::make_tensor_ptr(input.sizes, input.allocate(count), input.type));
    arguments_.emplace_back(*tensors_.back());
  }
}

// Returns the inputs in order, with the sizes that the metadata says.
std::vector<MethodInput> Method::inputs() {
  const auto tasks = static_cast<SizesType>(max_tasks_);
  const auto tokens = static_cast<SizesType>(max_tokens_);
  std::vector<MethodInput> all;
  if (is_embedded()) {
    const auto width = static_cast<SizesType>(width_);
    all.push_back(input_of("embeddings", ScalarType::Float, {1, tokens, width}, values_.embeddings, 1));
  } else {
    all.push_back(input_of("tokens", ScalarType::Long, {tasks, tokens}, values_.tokens, max_tasks_ == 1 ? 1 : -1));
  }
  all.push_back(input_of("input_pos", ScalarType::Long, {tasks}, values_.position));
  if (metadata_.rows > 1) {
    all.push_back(input_of("row", ScalarType::Long, {tasks}, values_.row));
  }
  if (kind_ == Kind::kDraft) {
    all.push_back(input_of("row_length", ScalarType::Long, {1}, values_.row_length));
  }
  if (form_ == Form::kAdapted) {
    all.push_back(input_of("adapter", ScalarType::Long, {tasks}, values_.adapter));
  }
  if (is_embedded() && metadata_.takes_penalties) {
    all.push_back(input_of("tokens", ScalarType::Long, {1, tokens}, values_.tokens, 1));
  }
  if (metadata_.pictures.has_rope_offset && is_embedded()) {
    all.push_back(input_of("rope_positions", ScalarType::Long, {3, tokens}, values_.rope_positions, 1));
  } else if (metadata_.pictures.has_rope_offset) {
    all.push_back(input_of("rope_offset", ScalarType::Long, {tasks}, values_.rope_offset));
  }
  if (kind_ != Kind::kLogits && kind_ != Kind::kRewind) {
    add_head_inputs(all);
  }
  if (kind_ == Kind::kVerify && metadata_.logprobs > 0) {
    all.push_back(input_of("targets", ScalarType::Long, {1, tokens}, values_.targets, 1));
  }
  return all;
}

void Method::add_head_inputs(std::vector<MethodInput>& inputs) {
  const auto tasks = static_cast<SizesType>(max_tasks_);
  const auto bias = static_cast<SizesType>(metadata_.logit_bias);
  const auto words = static_cast<SizesType>(mask_words_);
  const auto add = [&](const char* name, ScalarType type, std::vector<SizesType> sizes, auto& values) {
    inputs.push_back(input_of(name, type, std::move(sizes), values));
  };
  const std::vector<SizesType> scalar = max_tasks_ == 1 ? std::vector<SizesType>{} : std::vector<SizesType>{tasks};
  add("temperature", ScalarType::Float, scalar, values_.temperature);
  add("top_p", ScalarType::Float, scalar, values_.top_p);
  if (metadata_.takes_seed) {
    add("seed", ScalarType::Long, scalar, values_.seed);
  }
  if (metadata_.takes_top_k) {
    add("top_k", ScalarType::Long, scalar, values_.top_k);
  }
  if (metadata_.takes_min_p) {
    add("min_p", ScalarType::Float, scalar, values_.min_p);
  }
  if (metadata_.takes_penalties) {
    add("repetition_penalty", ScalarType::Float, scalar, values_.repetition_penalty);
    add("presence_penalty", ScalarType::Float, scalar, values_.presence_penalty);
    add("frequency_penalty", ScalarType::Float, scalar, values_.frequency_penalty);
  }
  if (bias > 0) {
    const std::vector<SizesType> sizes = max_tasks_ == 1 ? std::vector{bias} : std::vector{tasks, bias};
    add("bias_tokens", ScalarType::Long, sizes, values_.bias_tokens);
    add("bias_values", ScalarType::Float, sizes, values_.bias_values);
  }
  if (words > 0) {
    const bool verifies = kind_ == Kind::kVerify;
    add("allowed_tokens", ScalarType::Int, {verifies ? static_cast<SizesType>(max_tokens_) : tasks, words},
        values_.allowed_tokens);
    inputs.back().dynamic_axis = verifies ? 0 : -1;
  }
  if (metadata_.logprobs > 0) {
    add("logprobs", ScalarType::Long, scalar, values_.logprobs);
  }
  if (metadata_.takes_adjusts) {
    add("adjusts", ScalarType::Bool, {}, values_.adjusts);
  }
  if (metadata_.speech.timestamp_begin >= 0) {
    add("timestamps", ScalarType::Long, scalar, values_.timestamps);
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

void Method::fill(size_t index, const RowTask& task) {
  static const SamplingParameters kGreedy;
  const SamplingParameters& s = task.sampling ? *task.sampling : kGreedy;
  Values& v = values_;
  const size_t count = task.tokens.size();
  if (!v.tokens.empty()) {
    std::copy(task.tokens.begin(), task.tokens.end(), v.tokens.begin() + index * count);
  }
  if (is_embedded()) {
    check(task.embeddings.size() == count * width_, EXECUTORCH_MLX_FAILED, name_, ": got ", task.embeddings.size(),
        " numbers for ", count, " embeddings of ", width_);
    std::copy(task.embeddings.begin(), task.embeddings.end(), v.embeddings.begin());
    std::copy(task.rope_positions.begin(), task.rope_positions.end(), v.rope_positions.begin());
  }
  v.position[index] = task.position;
  const auto set = [index](auto& values, auto value) {
    if (!values.empty()) {
      values[index] = value;
    }
  };
  set(v.row, task.row);
  set(v.row_length, task.row_length);
  set(v.adapter, task.adapter);
  set(v.rope_offset, task.rope_offset);
  set(v.temperature, s.temperature);
  set(v.top_p, s.top_p);
  set(v.seed, task.seed);
  set(v.top_k, s.top_k);
  set(v.min_p, s.min_p);
  set(v.repetition_penalty, s.repetition_penalty);
  set(v.presence_penalty, s.presence_penalty);
  set(v.frequency_penalty, s.frequency_penalty);
  const int64_t bias = metadata_.logit_bias;
  for (int64_t i = 0; i < bias && !v.bias_tokens.empty(); ++i) {
    const bool is_used = i < static_cast<int64_t>(s.logit_bias.size());
    v.bias_tokens[index * bias + i] = is_used ? s.logit_bias[i].first : kNoToken;
    v.bias_values[index * bias + i] = is_used ? s.logit_bias[i].second : 0;
  }
  if (!v.allowed_tokens.empty()) {
    const size_t words = mask_words_ * (kind_ == Kind::kVerify ? count : 1);
    const auto begin = v.allowed_tokens.begin() + index * words;
    if (task.allowed_tokens.empty()) {
      std::fill_n(begin, words, kAllTokens);
    } else {
      std::copy_n(task.allowed_tokens.begin(), words, begin);
    }
  }
  set(v.logprobs, !task.wants_logprobs ? 0 : task.targets.empty() ? kLogprobsOfDrawn : kLogprobsOfTargets);
  if (!v.adjusts.empty()) { // one value for all tasks
    v.adjusts[0] = (index > 0 && v.adjusts[0] != 0) || s.changes_logits() || !task.allowed_tokens.empty();
  }
  set(v.timestamps, int64_t{task.timestamps});
  if (!v.targets.empty()) {
    std::fill_n(v.targets.begin(), count, 0);
    std::copy(task.targets.begin(), task.targets.end(), v.targets.begin());
  }
}

executorch::runtime::Result<std::vector<EValue>> Method::execute() {
  const auto held = profile_ ? profile_->lock() : std::unique_lock<std::mutex>();
  auto result = module_.execute(name_, arguments_);
  is_undefined_ |= !result.ok() && executorch_mlx_is_undefined() != 0;
  return result;
}

// Sets the dynamic axes to this number of tokens.
void Method::resize(size_t tokens) {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (dynamic_axes_[i] >= 0) {
      const auto old = tensors_[i]->sizes();
      std::vector<SizesType> sizes(old.begin(), old.end());
      sizes[dynamic_axes_[i]] = static_cast<SizesType>(tokens);
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
    fill(i, tasks[i < static_cast<int64_t>(tasks.size()) ? i : 0]);
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
