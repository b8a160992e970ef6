#include "llm_program.h"

#include <executorch_mlx/delegate.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "check.h"
#include "open_module.h"
#include "profile.h"
#include "row_state.h"

namespace executorch_mlx::engine {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Program;

namespace {

constexpr char kLoadAdapter[] = "load_adapter";
constexpr char kTokenEmbedding[] = "token_embedding";
constexpr char kTextDecoder[] = "text_decoder";

// Returns a string that changes if the file is written to, or if another file takes its place.
std::string version_of(const std::string& path) {
  struct stat status = {};
  check(stat(path.c_str(), &status) == 0, EXECUTORCH_MLX_NOT_FOUND, path, ": cannot read the file");
  return str(status.st_dev, " ", status.st_ino, " ", status.st_size, " ", status.st_mtime);
}

void check_has_method(const MetadataReader& reader, const std::string& path, const char* name) {
  if (!reader.has_method(name)) {
    check_program(false, path, ": missing method ", name, "; the methods are: ", reader.describe_methods());
  }
}

// The logits of the last position of task `i`, from [B, S, V] or [B, V].
template <typename T>
std::vector<float> last_position(const Tensor& logits, int64_t i, int64_t vocab_size) {
  const int64_t task_numel = logits.numel() / logits.size(0);
  const T* end = logits.const_data_ptr<T>() + (i + 1) * task_numel;
  return {end - vocab_size, end};
}

} // namespace

LlmProgram::LlmProgram(const std::string& path, const executorch_mlx_load_options& options)
    : path_(path), has_low_priority_(options.low_priority) {
  if (options.profile) {
    profile_ = std::make_unique<Profile>();
  }
  const std::string device = options.device == nullptr ? "" : options.device;
  module_ = open_module(path, device, has_low_priority_);
  const char* const chosen = executorch_mlx_device(device.c_str());
  runs_on_cpu_ = chosen == nullptr || std::string_view(chosen) == "cpu";
  version_ = version_of(path);
  reader_.emplace(*module_, path);
  check_program(!reader_->has_value("encoder_config"), path,
      ": got an encoder, expected a language or speech model; executorch-mlx embed and serve run it");
  const int64_t rows = reader_->integer("get_max_batch_size", 1);
  // A portable program with pictures has only text_decoder, because methods share no caches there.
  const bool takes_only_embeddings = reader_->has_method(kTextDecoder) && !reader_->has_method("forward") && rows == 1;
  check_has_method(*reader_, path, takes_only_embeddings ? kTextDecoder : rows > 1 ? "prefill" : "forward");
  metadata_ = read_metadata(*reader_, path);
  token_table_ = read_token_table(*reader_, metadata_.vocab_size, path);

  if (!takes_only_embeddings) {
    plain_ = make_methods(Method::Form::kPlain);
  }
  if (metadata_.has_verify) {
    draft_ = reader_->has_method("draft") ? make_method("draft", Method::Kind::kDraft) : nullptr;
    rewind_ = reader_->has_method("rewind") ? make_method("rewind", Method::Kind::kRewind) : nullptr;
  }
  if (metadata_.adapter_slots > 0) {
    adapted_ = make_methods(Method::Form::kAdapted);
    read_adapted_layers();
  }
  if (metadata_.pictures.is_taken) {
    embedded_ = make_embedded_methods();
  }
  if (metadata_.speech.is_speech()) {
    const MethodChecker checker(*module_, path_, "encode");
    const auto most = static_cast<executorch::aten::SizesType>(metadata_.speech.max_samples);
    checker.check_inputs({{"samples", ScalarType::Float, {1, most}, 1}});
    checker.check_backends();
  }
  load({options.on_progress, options.user_data});
  const auto map = module_->program()->get_named_data_map();
  if (map.ok() && executorch_mlx_has_ring_buffers(*map) != 0) {
    metadata_.max_rewind = 0; // the program does not know the load option kv_windows
  }
}

void LlmProgram::load(LoadProgress progress) {
  const Methods& first = takes_tokens() ? plain_ : embedded_;
  Method& method = *(first.draw ? first.draw : first.logits);
  if (module_->is_method_loaded(method.name())) {
    return;
  }
  struct Call {
    LoadProgress progress;
    bool is_aborted = false;
  } call{progress};
  if (progress.callback != nullptr) {
    executorch_mlx_set_on_load(
        [](void* user_data, size_t loaded, size_t total) {
          auto& call = *static_cast<Call*>(user_data);
          const double part = total == 0 ? 1 : static_cast<double>(loaded) / static_cast<double>(total);
          call.is_aborted = !call.progress.callback(call.progress.user_data, part);
          return !call.is_aborted;
        },
        &call);
  }
  try {
    method.load();
  } catch (const EngineError&) {
    executorch_mlx_set_on_load(nullptr, nullptr);
    check(!call.is_aborted, EXECUTORCH_MLX_ABORTED, path_, ": the load was aborted");
    throw;
  }
  executorch_mlx_set_on_load(nullptr, nullptr);
  prompt_buffers_ = open_buffers(); // no other method is loaded yet
}

void LlmProgram::unload() {
  prompt_buffers_ = nullptr;
  for (Method* method : methods()) {
    method->unload();
  }
  for (const char* name : {"encode", metadata_.pictures.encoder.c_str(), kTokenEmbedding}) {
    module_->unload_method(name);
  }
  is_undefined_ = false;
}

LlmProgram::Methods LlmProgram::make_methods(Method::Form form) {
  using Kind = Method::Kind;
  const int64_t rows = metadata_.rows;
  const auto make = [&](const std::string& name, Kind kind, int64_t tasks = 1) {
    return make_method(name, kind, form, tasks);
  };
  const bool both = metadata_.has_head && metadata_.has_logits;
  const char* const first = rows > 1 ? "prefill" : "forward";
  Methods result;
  if (metadata_.has_logits) {
    result.logits = make(both && rows > 1 ? "logits" : first, Kind::kLogits);
  }
  if (metadata_.has_head) {
    result.draw = make(both && rows == 1 ? "sample" : first, Kind::kDraw);
  }
  const auto kind = metadata_.has_head ? Kind::kDraw : Kind::kLogits;
  for (int64_t width = 2; width < rows; width *= 2) {
    const auto name = str("decode_", width);
    if (reader_->has_method(name.c_str())) { // a program of an earlier version has no narrow methods
      result.decodes.push_back(make(name, kind, width));
    }
  }
  if (rows > 1) {
    result.decodes.push_back(make("decode", kind, rows));
  }
  if (metadata_.has_verify) {
    result.verify = make("verify", Kind::kVerify);
  }
  return result;
}

LlmProgram::Methods LlmProgram::make_embedded_methods() {
  check_has_method(*reader_, path_, kTokenEmbedding);
  for (const char* name : {metadata_.pictures.encoder.c_str(), kTokenEmbedding}) {
    const MethodChecker checker(*module_, path_, name);
    checker.check_backends();
    checker.check_returns_logits(); // floats
  }
  const auto make = [&](const std::string& name, Method::Kind kind) {
    return make_method(name, kind, Method::Form::kEmbedded);
  };
  Methods result;
  if (metadata_.has_logits) {
    result.logits = make(kTextDecoder, Method::Kind::kLogits);
  }
  if (metadata_.has_head) {
    result.draw = make(metadata_.has_logits ? str(kTextDecoder, "_sample") : kTextDecoder, Method::Kind::kDraw);
  }
  return result;
}

// Checks the method load_adapter, and reads the sizes of the layers from its inputs: the slot, and A and B of each.
void LlmProgram::read_adapted_layers() {
  check_program(has_only_mlx_state(), path_, ": adapters: expected methods that are one call of MLXBackend each");
  check_has_method(*reader_, path_, kLoadAdapter);
  const MethodChecker checker(*module_, path_, kLoadAdapter);
  const auto rank = static_cast<executorch::aten::SizesType>(metadata_.adapter_rank);
  std::vector<MethodInput> inputs = {{"slot", ScalarType::Long, {1}}};
  for (const std::string& path : metadata_.adapter_layers) {
    const int64_t in = checker.max_size(inputs.size(), 1);
    const int64_t out = checker.max_size(inputs.size() + 1, 0);
    inputs.push_back({"a", ScalarType::Float, {rank, static_cast<executorch::aten::SizesType>(in)}});
    inputs.push_back({"b", ScalarType::Float, {static_cast<executorch::aten::SizesType>(out), rank}});
    adapted_layers_.push_back({path, static_cast<size_t>(in), static_cast<size_t>(out)});
  }
  checker.check_inputs(inputs);
  checker.check_backends();
}

void LlmProgram::write_adapter(int64_t slot, std::span<std::vector<float>> weights) {
  using executorch::extension::make_tensor_ptr;
  using Size = executorch::aten::SizesType;
  const auto rank = static_cast<Size>(metadata_.adapter_rank);
  std::vector<executorch::extension::TensorPtr> tensors = {make_tensor_ptr({1}, &slot, ScalarType::Long)};
  for (size_t i = 0; i < adapted_layers_.size(); ++i) {
    const auto in = static_cast<Size>(adapted_layers_[i].inputs), out = static_cast<Size>(adapted_layers_[i].outputs);
    tensors.push_back(make_tensor_ptr({rank, in}, weights[2 * i].data(), ScalarType::Float));
    tensors.push_back(make_tensor_ptr({out, rank}, weights[2 * i + 1].data(), ScalarType::Float));
  }
  run_other(kLoadAdapter, tensors, str(kLoadAdapter, ": slot ", slot));
}

std::vector<EValue> LlmProgram::run_other(
    const char* name, const std::vector<executorch::extension::TensorPtr>& inputs, const std::string& what) {
  const auto held = profile_ ? profile_->lock() : std::unique_lock<std::mutex>();
  if (!module_->is_method_loaded(name)) {
    auto* const tracer = profile_ ? profile_->tracer() : nullptr;
    check_ok(module_->load_method(name, nullptr, tracer), path_, ": cannot load the method ", name, ": ");
  }
  std::vector<EValue> arguments;
  for (const auto& tensor : inputs) {
    arguments.emplace_back(*tensor);
  }
  auto outputs = module_->execute(name, arguments);
  is_undefined_ |= !outputs.ok() && executorch_mlx_is_undefined() != 0;
  check_ok(outputs.error(), what, ": ");
  return std::move(*outputs);
}

std::vector<Method*> LlmProgram::methods() const {
  std::vector<Method*> all;
  const auto add = [&](const auto& method) {
    if (method != nullptr) {
      all.push_back(method.get());
    }
  };
  for (const Methods* set : {&plain_, &adapted_, &embedded_}) {
    add(set->draw);
    add(set->verify);
    add(set->logits);
    std::for_each(set->decodes.begin(), set->decodes.end(), add);
  }
  add(draft_);
  add(rewind_);
  return all;
}

LlmProgram::Methods& LlmProgram::methods_for(std::span<const RowTask> tasks) {
  if (!tasks[0].embeddings.empty() || !takes_tokens()) {
    return embedded_; // a single task
  }
  const auto has_adapter = [](const RowTask& task) { return task.adapter != 0; };
  return std::any_of(tasks.begin(), tasks.end(), has_adapter) ? adapted_ : plain_;
}

size_t LlmProgram::decode_width(size_t rows) const {
  const Methods& methods = takes_tokens() ? plain_ : embedded_;
  return method_for(rows, methods, metadata_.has_head ? methods.draw : methods.logits).max_tasks();
}

Method& LlmProgram::method_for(size_t tasks, const Methods& methods, const std::unique_ptr<Method>& single) const {
  if (tasks == 1) {
    return *single;
  }
  const auto fits = [&](const auto& decode) { return decode->max_tasks() >= tasks; };
  const auto found = std::find_if(methods.decodes.begin(), methods.decodes.end(), fits);
  check(found != methods.decodes.end(), EXECUTORCH_MLX_FAILED, path_, ": no method decodes ", tasks, " rows");
  return **found;
}

std::unique_ptr<Method> LlmProgram::make_method(
    const std::string& name, Method::Kind kind, Method::Form form, int64_t tasks) {
  const std::string full = form == Method::Form::kAdapted ? name + "_adapted" : name;
  check_has_method(*reader_, path_, full.c_str());
  return std::make_unique<Method>(*module_, path_, metadata_, full, kind, tasks, form, profile_.get(), is_undefined_);
}

std::string_view LlmProgram::token_bytes(int64_t token) const {
  if (token + 1 >= static_cast<int64_t>(token_table_.offsets.size())) {
    return {};
  }
  const int64_t begin = token_table_.offsets[token];
  return {reinterpret_cast<const char*>(token_table_.bytes.data()) + begin,
      static_cast<size_t>(token_table_.offsets[token + 1] - begin)};
}

void LlmProgram::set_token_bytes(std::span<const uint8_t> bytes, std::span<const int64_t> offsets) {
  check_argument(!has_token_bytes(), "token_bytes: the program has token bytes already");
  check_argument(offsets.front() == 0 && std::is_sorted(offsets.begin(), offsets.end()),
      "offsets: expected ascending values from 0 on");
  own_bytes_.assign(bytes.begin(), bytes.end());
  own_offsets_.assign(offsets.begin(), offsets.end());
  token_table_ = {own_bytes_, own_offsets_};
}

uint64_t LlmProgram::hash(const std::function<uint64_t()>& compute) const {
  std::lock_guard lock(hashing_);
  if (!hash_) {
    check_argument(version_of(path_) == version_, path_, ": the file has changed since it was loaded");
    hash_ = compute();
  }
  return *hash_;
}

bool LlmProgram::has_only_mlx_state() const {
  const auto all = methods();
  return std::all_of(all.begin(), all.end(), [](const auto* m) { return m->is_one_mlx_call(); });
}

std::shared_ptr<executorch_mlx_buffers> LlmProgram::open_buffers() const {
  const auto map = module_->program()->get_named_data_map();
  executorch_mlx_buffers* buffers = nullptr;
  if (!has_only_mlx_state() || !map.ok() || executorch_mlx_buffers_open(*map, &buffers) != 0) {
    return nullptr;
  }
  return {buffers, executorch_mlx_buffers_close};
}

std::vector<int64_t> LlmProgram::stop_ids(const RequestOptions& options) const {
  std::vector<int64_t> ids = options.stop_ids;
  if (!options.ignore_eos) {
    ids.insert(ids.end(), metadata_.eos_ids.begin(), metadata_.eos_ids.end());
  }
  std::erase_if(ids, [this](int64_t id) { return id < 0 || id >= metadata_.vocab_size; }); // they are never drawn
  return ids;
}

const char* LlmProgram::unsupported_parameter(const RequestOptions& options) const {
  const SamplingParameters& s = options.sampling;
  const LlmMetadata& m = metadata_;
  const struct {
    const char* name;
    bool is_enabled;
    bool is_supported;
  } parameters[] = {
      {"seed", options.seed.has_value(), m.takes_seed},
      {"top_k", s.top_k > 0, m.takes_top_k},
      {"min_p", s.min_p > 0, m.takes_min_p},
      {"repetition_penalty", s.repetition_penalty != 1, m.takes_penalties},
      {"presence_penalty", s.presence_penalty != 0, m.takes_penalties},
      {"frequency_penalty", s.frequency_penalty != 0, m.takes_penalties},
      {"logit_bias", !s.logit_bias.empty(), static_cast<int64_t>(s.logit_bias.size()) <= m.logit_bias},
      {"allowed_tokens", options.allowed_tokens != nullptr, m.takes_allowed_tokens},
      {"min_new_tokens", options.min_new_tokens > 0 && !stop_ids(options).empty(), m.takes_allowed_tokens},
      {"logprobs", options.logprobs >= 0, m.logprobs > 0 && options.logprobs <= m.logprobs},
  };
  for (const auto& parameter : parameters) {
    if (parameter.is_enabled && !parameter.is_supported) {
      return parameter.name;
    }
  }
  return nullptr;
}

void LlmProgram::check_token(const Method& method, int64_t token) const {
  check(0 <= token && token < metadata_.vocab_size, EXECUTORCH_MLX_FAILED, method.name(), ": returned the token ",
      token, ", which is outside the vocabulary [0, ", metadata_.vocab_size, ")");
}

// Reads the first `count` of `expected` drawn tokens from the outputs: tokens, logprob, top_tokens and top_logprobs.
std::vector<Drawn> LlmProgram::read_drawn(
    const Method& method, std::span<const EValue> outputs, size_t expected, size_t count, bool has_logprobs) const {
  const auto check_output = [&](size_t output, size_t size, ScalarType type) {
    const Tensor& tensor = outputs[output].toTensor();
    const auto got = static_cast<size_t>(tensor.numel());
    check(got == size, EXECUTORCH_MLX_FAILED, method.name(), ": got ", got, " results, expected ", size);
    check(tensor.scalar_type() == type, EXECUTORCH_MLX_FAILED, method.name(), ": output ", output, ": got ",
        dtype_name(tensor.scalar_type()), ", expected ", dtype_name(type));
  };
  const size_t k = has_logprobs ? metadata_.logprobs : 0;
  check_output(0, expected, ScalarType::Long);
  if (has_logprobs) {
    check(outputs.size() >= 4, EXECUTORCH_MLX_FAILED, method.name(), ": returned no log probabilities");
    check_output(1, expected, ScalarType::Float);
    check_output(2, expected * k, ScalarType::Long);
    check_output(3, expected * k, ScalarType::Float);
  }
  std::vector<Drawn> drawn(count);
  for (size_t i = 0; i < count; ++i) {
    drawn[i].token = outputs[0].toTensor().const_data_ptr<int64_t>()[i];
    check_token(method, drawn[i].token);
    if (has_logprobs) {
      drawn[i].logprob = outputs[1].toTensor().const_data_ptr<float>()[i];
      const int64_t* ids = outputs[2].toTensor().const_data_ptr<int64_t>() + i * k;
      const float* logprobs = outputs[3].toTensor().const_data_ptr<float>() + i * k;
      std::for_each(ids, ids + k, [&](int64_t token) { check_token(method, token); });
      drawn[i].top_tokens.assign(ids, ids + k);
      drawn[i].top_logprobs.assign(logprobs, logprobs + k);
    }
  }
  return drawn;
}

bool LlmProgram::wants_logprobs(std::span<const RowTask> tasks) const {
  const auto wants = [](const RowTask& task) { return task.wants_logprobs; };
  return metadata_.logprobs > 0 && std::any_of(tasks.begin(), tasks.end(), wants);
}

std::span<const RowTask> LlmProgram::with_embeddings(std::span<const RowTask> tasks) {
  if (!tasks[0].embeddings.empty() || takes_tokens()) {
    return tasks;
  }
  embedded_task_ = tasks[0];
  embeddings_ = embed(tasks[0].tokens);
  rope_positions_.clear();
  for (int64_t axis = 0; metadata_.pictures.has_rope_offset && axis < PromptPictures::kRopeAxes; ++axis) {
    for (size_t i = 0; i < tasks[0].tokens.size(); ++i) {
      rope_positions_.push_back(tasks[0].position + static_cast<int64_t>(i) + tasks[0].rope_offset);
    }
  }
  embedded_task_.embeddings = embeddings_;
  embedded_task_.rope_positions = rope_positions_;
  return {&embedded_task_, 1};
}

std::vector<Drawn> LlmProgram::draw(std::span<const RowTask> tasks) {
  const Methods& methods = methods_for(tasks);
  Method& method = method_for(tasks.size(), methods, methods.draw);
  const auto outputs = method.run(with_embeddings(tasks));
  return read_drawn(method, outputs, method.max_tasks(), tasks.size(), wants_logprobs(tasks));
}

bool LlmProgram::can_defer() const {
  const auto is_one_mlx_call = [](const auto& method) { return method->is_one_mlx_call(); };
  return plain_.draw != nullptr && is_one_mlx_call(plain_.draw) &&
      std::all_of(plain_.decodes.begin(), plain_.decodes.end(), is_one_mlx_call) && profile_ == nullptr &&
      metadata_.max_rewind > 0;
}

PendingDraw LlmProgram::submit_draw(
    std::span<const RowTask> tasks, const PendingDraw* source, std::span<const size_t> sources) {
  const Methods& methods = methods_for(tasks);
  Method& method = method_for(tasks.size(), methods, methods.draw);
  Outputs outputs = method.submit(tasks, source == nullptr ? nullptr : &source->outputs, sources);
  return {&method, std::move(outputs), tasks.size(), wants_logprobs(tasks)};
}

std::vector<Drawn> LlmProgram::finish_draw(PendingDraw& draw) {
  draw.method->finish(draw.outputs);
  return read_drawn(*draw.method, draw.outputs.values, draw.method->max_tasks(), draw.count, draw.has_logprobs);
}

int64_t LlmProgram::max_draft() const {
  const int64_t most = rewind_ != nullptr ? rewind_->max_tokens() - 1 : metadata_.max_rewind;
  return std::max<int64_t>(0, std::min(max_verify() - 1, most));
}

void LlmProgram::rewind(const RowTask& task) {
  const auto outputs = rewind_->run({&task, 1});
  const int64_t expected = task.position + static_cast<int64_t>(task.tokens.size());
  const bool fits = outputs[0].toTensor().numel() == 1 && outputs[0].toTensor().scalar_type() == ScalarType::Long;
  check(fits && *outputs[0].toTensor().const_data_ptr<int64_t>() == expected, EXECUTORCH_MLX_FAILED,
      "rewind: returned another position than ", expected);
}

void LlmProgram::reset() {
  if (prompt_buffers_ != nullptr) {
    check_ok(static_cast<Error>(executorch_mlx_buffers_reset(prompt_buffers_.get())), path_, ": reset: ");
  } else { // a method that is loaded again has new buffers
    unload();
    load();
  }
  is_undefined_ = false;
}

bool LlmProgram::unload_optional_methods() {
  bool was_loaded = false;
  for (const auto* method : {&plain_.verify, &adapted_.verify, &draft_, &rewind_}) {
    was_loaded |= *method != nullptr && (*method)->unload();
  }
  return was_loaded;
}

int64_t LlmProgram::draft(const RowTask& task) {
  return read_drawn(*draft_, draft_->run({&task, 1}), 1, 1, false)[0].token;
}

std::vector<Drawn> LlmProgram::verify(const RowTask& task, std::vector<float>* target_logprobs) {
  Method& method = *methods_for({&task, 1}).verify;
  const auto outputs = method.run({&task, 1});
  const size_t count = task.tokens.size();
  if (target_logprobs == nullptr && task.wants_logprobs) {
    std::vector<EValue> of_drawn = outputs;
    of_drawn.erase(of_drawn.begin() + 1); // target_logprobs
    return read_drawn(method, of_drawn, count, count, true);
  }
  if (target_logprobs != nullptr) {
    const bool fits = outputs.size() >= 2 && static_cast<size_t>(outputs[1].toTensor().numel()) == count &&
        outputs[1].toTensor().scalar_type() == ScalarType::Float;
    check(fits, EXECUTORCH_MLX_FAILED, "verify: no log probabilities of the targets");
    const float* values = outputs[1].toTensor().const_data_ptr<float>();
    target_logprobs->assign(values, values + count);
  }
  return read_drawn(method, outputs, count, count, false);
}

std::vector<std::vector<float>> LlmProgram::logits(std::span<const RowTask> tasks) {
  const Methods& methods = methods_for(tasks);
  Method& method = method_for(tasks.size(), methods, methods.logits);
  const auto outputs = method.run(with_embeddings(tasks));
  const auto& tensor = outputs[0].toTensor();
  const auto expected = static_cast<int64_t>(method.max_tasks());
  const int64_t vocab_size = metadata_.vocab_size;
  const bool fits = (tensor.dim() == 2 || tensor.dim() == 3) && tensor.size(0) == expected &&
      tensor.size(tensor.dim() - 1) == vocab_size && tensor.numel() > 0;
  check(fits, EXECUTORCH_MLX_FAILED, method.name(), ": got logits of rank ", tensor.dim(), " with ", tensor.numel(),
      " elements, expected [", expected, ", 1, ", vocab_size, "]");
  std::vector<std::vector<float>> result;
  for (size_t i = 0; i < tasks.size(); ++i) {
    switch (tensor.scalar_type()) {
      case ScalarType::Float:
        result.push_back(last_position<float>(tensor, i, vocab_size));
        break;
      case ScalarType::Half:
        result.push_back(last_position<executorch::aten::Half>(tensor, i, vocab_size));
        break;
      case ScalarType::BFloat16:
        result.push_back(last_position<executorch::aten::BFloat16>(tensor, i, vocab_size));
        break;
      default:
        check(false, EXECUTORCH_MLX_FAILED, method.name(), ": got ", dtype_name(tensor.scalar_type()),
            ", expected Float, Half or BFloat16");
    }
  }
  return result;
}

void LlmProgram::encode(std::span<const float> samples) {
  std::vector<float> padded = padded_samples(metadata_.speech, samples);
  const auto size = static_cast<executorch::aten::SizesType>(padded.size());
  run_other("encode", {executorch::extension::make_tensor_ptr({1, size}, padded.data(), ScalarType::Float)},
      str("encode: ", padded.size(), " samples"));
}

std::vector<float> LlmProgram::run_encoder(const char* name, std::vector<executorch::extension::TensorPtr> inputs) {
  const auto outputs = run_other(name, inputs, name);
  check(outputs.size() == 1 && outputs[0].isTensor(), EXECUTORCH_MLX_FAILED, name, ": expected one tensor");
  const Tensor& result = outputs[0].toTensor();
  check(result.scalar_type() == ScalarType::Float && result.numel() > 0, EXECUTORCH_MLX_FAILED, name, ": got ",
      result.numel(), " numbers of ", dtype_name(result.scalar_type()), ", expected Float");
  const float* data = result.const_data_ptr<float>();
  return {data, data + result.numel()};
}

std::vector<float> LlmProgram::encode_picture(const Picture& picture) {
  std::vector<executorch::extension::TensorPtr> inputs;
  for (const Picture::Input& input : picture.inputs) {
    // The methods of ExecuTorch do not write to their inputs.
    inputs.push_back(executorch::extension::make_tensor_ptr(input.sizes, const_cast<char*>(input.data.data()),
        input.type)); // NOLINT(cppcoreguidelines-pro-type-const-cast)
  }
  return run_encoder(metadata_.pictures.encoder.c_str(), std::move(inputs));
}

std::vector<float> LlmProgram::embed(std::span<const int64_t> tokens) {
  std::vector<int64_t> ids(tokens.begin(), tokens.end());
  const auto size = static_cast<executorch::aten::SizesType>(ids.size());
  auto result =
      run_encoder(kTokenEmbedding, {executorch::extension::make_tensor_ptr({1, size}, ids.data(), ScalarType::Long)});
  check(result.size() % ids.size() == 0, EXECUTORCH_MLX_FAILED, kTokenEmbedding, ": got ", result.size(),
      " numbers for ", ids.size(), " tokens");
  return result;
}

void LlmProgram::write_profile(const std::string& path) {
  check_argument(profile_ != nullptr, "profile: the model was loaded without it");
  profile_->write(path);
}

} // namespace executorch_mlx::engine
