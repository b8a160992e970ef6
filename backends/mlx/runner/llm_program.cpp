#include "llm_program.h"

#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/runtime.h>
#include <executorch_mlx/delegate.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "check.h"

namespace executorch_mlx {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Program;

namespace {

// Returned by executorch_mlx_register() if another library registered an MLXBackend first.
constexpr int kOtherBackend = 1;

constexpr int64_t kNoToken = -1; // in bias_tokens: an unused entry
constexpr int32_t kAllBits = -1;
constexpr int64_t kBitsPerWord = 32;

std::unique_ptr<Module> open(const std::string& path, const std::string& device) {
  // A std::ifstream can open a directory, but it cannot read from a directory.
  check_argument(
      std::ifstream(path).peek() != std::ifstream::traits_type::eof(), path, ": the file is unreadable or empty");
  check_argument(
      device.empty() || device == "cpu" || device == "gpu", "device: got '", device, "', expected cpu or gpu");
  auto module = std::make_unique<Module>(path, Module::LoadMode::Mmap);

  executorch::runtime::BackendOptions<1> options;
  executorch::runtime::LoadBackendOptionsMap map;
  Error error = Error::Ok;
  if (!device.empty()) {
    error = options.set_option("device", device.c_str());
    error = error == Error::Ok ? map.set_options("MLXBackend", options.view()) : error;
    check(error == Error::Ok, "device: ", describe(error));
  }
  error = module->load(map, Program::Verification::InternalConsistency);
  check(error == Error::Ok, path, ": not an ExecuTorch program (", describe(error), ")");
  return module;
}

void check_has_forward(const MetadataReader& reader, const std::string& path) {
  if (!reader.has("forward")) {
    std::string list;
    for (const std::string& name : reader.method_names()) {
      list += (list.empty() ? "" : ", ") + name;
    }
    check(false, path, ": missing method forward; the methods are: ", list.empty() ? "none" : list);
  }
}

// Copies the logits of each sequence's last position from [B, S, V] or [B, V] to `out`, [B, V].
template <typename T>
void copy_last_position(const executorch::aten::Tensor& logits, int64_t vocab_size, float* out) {
  const int64_t batch = logits.size(0);
  const int64_t sequence_size = logits.numel() / batch;
  for (int64_t b = 0; b < batch; ++b) {
    const T* last = logits.const_data_ptr<T>() + (b + 1) * sequence_size - vocab_size;
    std::copy(last, last + vocab_size, out + b * vocab_size);
  }
}

} // namespace

LlmProgram::LlmProgram(
    const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer)
    : path_(path), tracer_(tracer) {
  executorch::runtime::runtime_init();
  const int registered = executorch_mlx_register();
  check(
      registered <= kOtherBackend, "cannot register the backend MLXBackend: ",
      describe(static_cast<Error>(registered)));
  module_ = open(path, device);
  MetadataReader reader(*module_, path);
  check_has_forward(reader, path);
  metadata_ = read_metadata(reader, path);
  token_table_ = read_token_table(reader, metadata_.vocab_size, path);
  metadata_.has_token_bytes = !token_table_.offsets.empty();
  logits_method_ = metadata_.has_logits ? "forward" : "";
  draw_method_ = !metadata_.has_head ? "" : metadata_.has_logits ? "sample" : "forward";

  allocate_inputs();
  std::vector<MethodInput> inputs = model_inputs();
  add_tensors(inputs, logits_arguments_);
  if (metadata_.has_logits) {
    const MethodChecker checker(*module_, path, logits_method_);
    checker.check_inputs(inputs);
    checker.check_backends();
    checker.check_returns_logits();
  }
  draw_arguments_ = logits_arguments_;
  if (metadata_.has_head) {
    const auto parameters = head_inputs();
    add_tensors(parameters, draw_arguments_);
    inputs.insert(inputs.end(), parameters.begin(), parameters.end());
    const MethodChecker checker(*module_, path, draw_method_);
    checker.check_inputs(inputs);
    checker.check_backends();
    checker.check_returns_tokens();
  }
  load_method(metadata_.has_head ? draw_method_ : logits_method_);
}

void LlmProgram::allocate_inputs() {
  values_.tokens.resize(metadata_.batch_size * metadata_.max_seq_len);
  values_.start.resize(metadata_.batch_size);
  values_.bias_tokens.assign(metadata_.logit_bias, kNoToken);
  values_.bias_values.resize(metadata_.logit_bias);
  if (metadata_.takes_allowed_tokens) {
    const int64_t mask_size = (metadata_.vocab_size + kBitsPerWord - 1) / kBitsPerWord;
    values_.allowed_tokens.assign(metadata_.batch_size * mask_size, kAllBits);
  }
}

// The inputs of the method that returns logits.
std::vector<MethodInput> LlmProgram::model_inputs() {
  const auto batch = static_cast<SizesType>(metadata_.batch_size);
  std::vector<MethodInput> inputs = {
      {"tokens", ScalarType::Long, {batch, static_cast<SizesType>(metadata_.max_seq_len)}, values_.tokens.data()},
      {"input_pos", ScalarType::Long, {1}, &values_.position}};
  if (batch > 1) {
    inputs.push_back({"start", ScalarType::Long, {batch}, values_.start.data()});
  }
  return inputs;
}

// The additional inputs of the method that returns tokens.
std::vector<MethodInput> LlmProgram::head_inputs() {
  const auto batch = static_cast<SizesType>(metadata_.batch_size);
  const auto bias = static_cast<SizesType>(metadata_.logit_bias);
  const auto mask_size = static_cast<SizesType>(values_.allowed_tokens.size()) / batch;
  const bool penalties = metadata_.takes_penalties;
  const struct {
    bool is_present;
    MethodInput input;
  } candidates[] = {
      {true, {"temperature", ScalarType::Float, {}, &values_.temperature}},
      {true, {"top_p", ScalarType::Float, {}, &values_.top_p}},
      {metadata_.takes_seed, {"seed", ScalarType::Long, {}, &values_.seed}},
      {metadata_.takes_top_k, {"top_k", ScalarType::Long, {}, &values_.top_k}},
      {metadata_.takes_min_p, {"min_p", ScalarType::Float, {}, &values_.min_p}},
      {penalties, {"repetition_penalty", ScalarType::Float, {}, &values_.repetition_penalty}},
      {penalties, {"presence_penalty", ScalarType::Float, {}, &values_.presence_penalty}},
      {penalties, {"frequency_penalty", ScalarType::Float, {}, &values_.frequency_penalty}},
      {bias > 0, {"bias_tokens", ScalarType::Long, {bias}, values_.bias_tokens.data()}},
      {bias > 0, {"bias_values", ScalarType::Float, {bias}, values_.bias_values.data()}},
      {mask_size > 0, {"allowed_tokens", ScalarType::Int, {batch, mask_size}, values_.allowed_tokens.data()}},
  };
  std::vector<MethodInput> inputs;
  for (const auto& candidate : candidates) {
    if (candidate.is_present) {
      inputs.push_back(candidate.input);
    }
  }
  return inputs;
}

// Loads a method unless it is loaded already.
void LlmProgram::load_method(const std::string& method) {
  if (!module_->is_method_loaded(method)) {
    const Error error = module_->load_method(method, nullptr, tracer_);
    check_status(error, path_, ": cannot load the method ", method, ": ");
  }
}

// Makes a tensor for each input and appends it to `arguments`.
void LlmProgram::add_tensors(const std::vector<MethodInput>& inputs, std::vector<EValue>& arguments) {
  for (const MethodInput& input : inputs) {
    tensors_.push_back(make_tensor_ptr(input.sizes, input.data, input.type));
    arguments.emplace_back(*tensors_.back());
  }
}

std::string_view LlmProgram::token_bytes(int64_t token) const {
  check_argument(metadata_.has_token_bytes, path_, ": the program has no token bytes");
  check_argument(
      0 <= token && token < metadata_.vocab_size,
      "token_bytes: id ", token, " is out of range [0, ", metadata_.vocab_size, ")");
  const int64_t begin = token_table_.offsets[token];
  return {
      reinterpret_cast<const char*>(token_table_.bytes.data()) + begin,
      static_cast<size_t>(token_table_.offsets[token + 1] - begin)};
}

const char* LlmProgram::unsupported_parameter(const SamplingParameters& s) const {
  const LlmMetadata& m = metadata_;
  const struct {
    const char* name;
    bool is_enabled;
    bool is_supported;
  } parameters[] = {
      {"seed", s.seed.has_value(), m.takes_seed},
      {"top_k", s.top_k > 0, m.takes_top_k},
      {"min_p", s.min_p > 0, m.takes_min_p},
      {"repetition_penalty", s.repetition_penalty != 1, m.takes_penalties},
      {"presence_penalty", s.presence_penalty != 0, m.takes_penalties},
      {"frequency_penalty", s.frequency_penalty != 0, m.takes_penalties},
      {"logit_bias", !s.logit_bias.empty(), m.logit_bias > 0},
      {"allowed_tokens", static_cast<bool>(s.allowed_tokens), m.takes_allowed_tokens},
  };
  for (const auto& parameter : parameters) {
    if (parameter.is_enabled && !parameter.is_supported) {
      return parameter.name;
    }
  }
  return nullptr;
}

void LlmProgram::set_sampling(const SamplingParameters& sampling) {
  values_.temperature = sampling.temperature;
  values_.top_p = sampling.top_p;
  values_.top_k = sampling.top_k;
  values_.min_p = sampling.min_p;
  values_.repetition_penalty = sampling.repetition_penalty;
  values_.presence_penalty = sampling.presence_penalty;
  values_.frequency_penalty = sampling.frequency_penalty;
  std::fill(values_.bias_tokens.begin(), values_.bias_tokens.end(), kNoToken);
  std::fill(values_.bias_values.begin(), values_.bias_values.end(), 0.0f);
  for (size_t i = 0; i < sampling.logit_bias.size(); ++i) {
    std::tie(values_.bias_tokens[i], values_.bias_values[i]) = sampling.logit_bias[i];
  }
}

// Copies the chunk to the inputs and runs a method. Returns its first output, a tensor whose memory belongs to the
// method.
EValue LlmProgram::execute(const std::string& method, const Chunk& chunk, const std::vector<EValue>& arguments) {
  load_method(method);
  const int64_t count = static_cast<int64_t>(chunk.tokens.size()) / metadata_.batch_size;
  const std::array<SizesType, 2> sizes = {
      static_cast<SizesType>(metadata_.batch_size), static_cast<SizesType>(count)};
  const Error error = executorch::runtime::resize_tensor(*tensors_[0], {sizes.data(), sizes.size()});
  check(error == Error::Ok, method, ": ", count, " tokens: ", describe(error));
  std::copy(chunk.tokens.begin(), chunk.tokens.end(), values_.tokens.begin());
  std::copy(chunk.padding.begin(), chunk.padding.end(), values_.start.begin());
  values_.position = chunk.position;

  const auto outputs = module_->execute(method, arguments);
  check_status(outputs.error(), method, ": ", count, " tokens at position ", chunk.position, ": ");
  check(outputs->size() > 0 && (*outputs)[0].isTensor(), method, ": the first output is not a tensor");
  return (*outputs)[0];
}

std::vector<int64_t> LlmProgram::draw(const Chunk& chunk, int64_t seed) {
  values_.seed = seed;
  const EValue out = execute(draw_method_, chunk, draw_arguments_);
  std::fill(values_.allowed_tokens.begin(), values_.allowed_tokens.end(), kAllBits);
  const auto& tensor = out.toTensor();
  check(
      tensor.numel() == metadata_.batch_size,
      draw_method_, ": got ", tensor.numel(), " tokens, expected ", metadata_.batch_size, " (the batch size)");
  const int64_t* data = tensor.const_data_ptr<int64_t>();
  const std::vector<int64_t> tokens(data, data + tensor.numel());
  for (const int64_t token : tokens) {
    check(
        0 <= token && token < metadata_.vocab_size,
        draw_method_, ": returned the token ", token, ", which is outside the vocabulary [0, ",
        metadata_.vocab_size, ")");
  }
  return tokens;
}

std::vector<float> LlmProgram::logits(const Chunk& chunk) {
  const EValue out = execute(logits_method_, chunk, logits_arguments_);
  const auto& tensor = out.toTensor();
  const int64_t vocab_size = metadata_.vocab_size;
  const bool fits = (tensor.dim() == 2 || tensor.dim() == 3) && tensor.size(0) == metadata_.batch_size &&
      tensor.size(tensor.dim() - 1) == vocab_size && tensor.numel() > 0;
  check(
      fits, logits_method_, ": got logits of rank ", tensor.dim(), " with ", tensor.numel(), " elements, expected [",
      metadata_.batch_size, ", 1, ", vocab_size, "]");
  std::vector<float> result(metadata_.batch_size * vocab_size);
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      copy_last_position<float>(tensor, vocab_size, result.data());
      break;
    case ScalarType::Half:
      copy_last_position<executorch::aten::Half>(tensor, vocab_size, result.data());
      break;
    case ScalarType::BFloat16:
      copy_last_position<executorch::aten::BFloat16>(tensor, vocab_size, result.data());
      break;
    default:
      check(false, logits_method_, ": got ", dtype_name(tensor.scalar_type()), ", expected Float, Half or BFloat16");
  }
  return result;
}

} // namespace executorch_mlx
