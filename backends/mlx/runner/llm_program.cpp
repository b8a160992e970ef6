#include "llm_program.h"

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/runtime.h>
#include <executorch_mlx/delegate.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "text.h"

namespace executorch_mlx {

using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Program;
using executorch::runtime::Tag;

namespace {

// What executorch_mlx_register() says of an MLXBackend that was there before.
constexpr int kOtherBackend = 1;

constexpr int64_t kNoToken = -1;
constexpr int32_t kAllBits = -1;
constexpr int64_t kBitsOfWord = 32;

std::unique_ptr<Module> open(const std::string& path, const std::string& device) {
  // A directory opens like a file; only reading tells.
  check_argument(
      std::ifstream(path).peek() != std::ifstream::traits_type::eof(), path, ": cannot be read, or is empty");
  check_argument(
      device.empty() || device == "cpu" || device == "gpu", "device: '", device, "', expected cpu or gpu");
  auto module = std::make_unique<Module>(path, Module::LoadMode::Mmap);

  executorch::runtime::BackendOptions<1> options;
  executorch::runtime::LoadBackendOptionsMap map;
  Error error = Error::Ok;
  if (!device.empty()) {
    error = options.set_option("device", device.c_str());
    error = error == Error::Ok ? map.set_options("MLXBackend", options.view()) : error;
    check(error == Error::Ok, "device: ", because(error));
  }
  error = module->load(map, Program::Verification::InternalConsistency);
  check(error == Error::Ok, path, ": not an ExecuTorch program (", because(error), ")");
  return module;
}

void check_forward(const Constants& constants, const std::string& path) {
  if (!constants.has("forward")) {
    std::string list;
    for (const std::string& name : constants.names()) {
      list += (list.empty() ? "" : ", ") + name;
    }
    check(false, path, ": no method forward; it has ", list.empty() ? "none" : list);
  }
}

template <typename T>
void read_last_row(const executorch::aten::Tensor& logits, int64_t vocab_size, float* to) {
  const int64_t batch = logits.size(0);
  const int64_t row = logits.numel() / batch;
  for (int64_t b = 0; b < batch; ++b) {
    const T* last = logits.const_data_ptr<T>() + (b + 1) * row - vocab_size;
    std::copy(last, last + vocab_size, to + b * vocab_size);
  }
}

} // namespace

LlmProgram::LlmProgram(
    const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer)
    : path_(path), tracer_(tracer) {
  executorch::runtime::runtime_init();
  const int registered = executorch_mlx_register();
  check(
      registered <= kOtherBackend, "MLXBackend cannot be registered: ",
      because(static_cast<Error>(registered)));
  module_ = open(path, device);
  Constants constants(*module_, path);
  check_forward(constants, path);
  metadata_ = read_metadata(constants, path);
  table_ = read_token_table(constants, metadata_, path);
  metadata_.has_tokens = !table_.offsets.empty();
  logits_ = metadata_.has_logits ? "forward" : "";
  head_ = !metadata_.has_head ? "" : metadata_.has_logits ? "sample" : "forward";

  inputs_.tokens.resize(metadata_.batch_size * metadata_.max_seq_len);
  inputs_.start.resize(metadata_.batch_size);
  inputs_.bias_tokens.assign(metadata_.logit_bias, kNoToken);
  inputs_.bias_values.resize(metadata_.logit_bias);
  if (metadata_.takes_allowed_tokens) {
    const int64_t words = (metadata_.vocab_size + kBitsOfWord - 1) / kBitsOfWord;
    inputs_.allowed_tokens.assign(metadata_.batch_size * words, kAllBits);
  }
  std::vector<Input> inputs = position_inputs();
  bind(inputs, logits_values_);
  if (!logits_.empty()) {
    check_method(logits_, inputs);
    check_output(logits_, /*is_token=*/false);
  }
  head_values_ = logits_values_;
  if (!head_.empty()) {
    const auto more = head_inputs();
    bind(more, head_values_);
    inputs.insert(inputs.end(), more.begin(), more.end());
    check_method(head_, inputs);
    check_output(head_, /*is_token=*/true);
  }
  load(head_.empty() ? logits_ : head_);
}

std::vector<LlmProgram::Input> LlmProgram::position_inputs() {
  const auto batch = static_cast<SizesType>(metadata_.batch_size);
  std::vector<Input> rows = {
      {"tokens", ScalarType::Long, {batch, static_cast<SizesType>(metadata_.max_seq_len)}, inputs_.tokens.data()},
      {"input_pos", ScalarType::Long, {1}, &inputs_.position}};
  if (batch > 1) {
    rows.push_back({"start", ScalarType::Long, {batch}, inputs_.start.data()});
  }
  return rows;
}

std::vector<LlmProgram::Input> LlmProgram::head_inputs() {
  const auto batch = static_cast<SizesType>(metadata_.batch_size);
  const auto bias = static_cast<SizesType>(metadata_.logit_bias);
  const auto words = static_cast<SizesType>(inputs_.allowed_tokens.size()) / batch;
  const bool penalties = metadata_.takes_penalties;
  const struct {
    bool is_there;
    Input input;
  } rows[] = {
      {true, {"temperature", ScalarType::Float, {}, &inputs_.temperature}},
      {true, {"top_p", ScalarType::Float, {}, &inputs_.top_p}},
      {metadata_.takes_seed, {"seed", ScalarType::Long, {}, &inputs_.seed}},
      {metadata_.takes_top_k, {"top_k", ScalarType::Long, {}, &inputs_.top_k}},
      {metadata_.takes_min_p, {"min_p", ScalarType::Float, {}, &inputs_.min_p}},
      {penalties, {"repetition_penalty", ScalarType::Float, {}, &inputs_.repetition_penalty}},
      {penalties, {"presence_penalty", ScalarType::Float, {}, &inputs_.presence_penalty}},
      {penalties, {"frequency_penalty", ScalarType::Float, {}, &inputs_.frequency_penalty}},
      {bias > 0, {"bias_tokens", ScalarType::Long, {bias}, inputs_.bias_tokens.data()}},
      {bias > 0, {"bias_values", ScalarType::Float, {bias}, inputs_.bias_values.data()}},
      {words > 0, {"allowed_tokens", ScalarType::Int, {batch, words}, inputs_.allowed_tokens.data()}},
  };
  std::vector<Input> result;
  for (const auto& row : rows) {
    if (row.is_there) {
      result.push_back(row.input);
    }
  }
  return result;
}

void LlmProgram::check_method(const std::string& name, const std::vector<Input>& inputs) const {
  const auto meta = module_->method_meta(name);
  check(meta.ok(), path_, ": ", name, ": ", because(meta.error()));
  check(
      meta->num_inputs() == inputs.size(),
      path_, ": ", name, " has ", meta->num_inputs(), " inputs, expected ", inputs.size(),
      " by its sampling_* methods");
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Input& input = inputs[i];
    const auto tag = meta->input_tag(i);
    check(
        tag.ok() && *tag == Tag::Tensor, path_, ": ", name, ": input ", i, " (", input.name, ") is no tensor");
    const auto info = meta->input_tensor_meta(i);
    const auto sizes = info->sizes();
    check(
        info->scalar_type() == input.type && sizes.size() == input.sizes.size(),
        path_, ": ", name, ": input ", i, " (", input.name, ") is ", dtype(info->scalar_type()), " of rank ",
        sizes.size(), ", expected ", dtype(input.type), " of rank ", input.sizes.size());
    for (size_t d = 0; d < sizes.size(); ++d) {
      // The tokens' is a bound.
      const bool fits = i == 0 && d == 1 ? sizes[d] >= input.sizes[d] : sizes[d] == input.sizes[d];
      check(
          fits, path_, ": ", name, ": input ", i, " (", input.name, ") is of size ", sizes[d], " on axis ", d,
          ", expected ", input.sizes[d], " by the program's metadata");
    }
  }
  for (size_t i = 0; i < meta->num_backends(); ++i) {
    const char* backend = meta->get_backend_name(i).get();
    check(
        executorch::runtime::get_backend_class(backend) != nullptr,
        path_, ": ", name, " needs the backend ", backend, ", which this process has not");
  }
}

void LlmProgram::check_output(const std::string& name, bool is_token) const {
  const auto meta = module_->method_meta(name);
  const auto tag = meta->num_outputs() > 0 ? meta->output_tag(0) : Error::NotFound;
  const bool is_tensor = tag.ok() && *tag == Tag::Tensor;
  const ScalarType type = is_tensor ? meta->output_tensor_meta(0)->scalar_type() : ScalarType::Undefined;
  if (is_token) {
    check(type == ScalarType::Long, path_, ": ", name, " does not return a token, Long [", metadata_.batch_size, "]");
    return;
  }
  const bool is_float = type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
  check(
      is_float, path_, ": ", name, " returns ", is_tensor ? dtype(type) : "no tensor",
      ", expected logits (Float, Half or BFloat16), as there is no sampling_head");
}

void LlmProgram::load(const std::string& method) {
  if (!module_->is_method_loaded(method)) {
    const Error error = module_->load_method(method, nullptr, tracer_);
    check(error == Error::Ok, path_, ": ", method, " cannot be loaded: ", because(error));
  }
}

void LlmProgram::bind(const std::vector<Input>& inputs, std::vector<EValue>& values) {
  for (const Input& input : inputs) {
    tensors_.push_back(make_tensor_ptr(input.sizes, input.data, input.type));
    values.emplace_back(*tensors_.back());
  }
}

std::string_view LlmProgram::token_bytes(int64_t token) const {
  check_argument(metadata_.has_tokens, path_, ": carries no bytes of its tokens");
  check_argument(
      0 <= token && token < metadata_.vocab_size,
      "token_bytes: id ", token, " is outside [0, ", metadata_.vocab_size, ")");
  const int64_t begin = table_.offsets[token];
  return {
      reinterpret_cast<const char*>(table_.bytes.data()) + begin,
      static_cast<size_t>(table_.offsets[token + 1] - begin)};
}

const char* LlmProgram::not_taken(const Sampling& s) const {
  const LlmMetadata& m = metadata_;
  const struct {
    const char* name;
    bool is_on;
    bool is_taken;
  } rows[] = {
      {"seed", s.seed.has_value(), m.takes_seed},
      {"top_k", s.top_k > 0, m.takes_top_k},
      {"min_p", s.min_p > 0, m.takes_min_p},
      {"repetition_penalty", s.repetition_penalty != 1, m.takes_penalties},
      {"presence_penalty", s.presence_penalty != 0, m.takes_penalties},
      {"frequency_penalty", s.frequency_penalty != 0, m.takes_penalties},
      {"logit_bias", !s.logit_bias.empty(), m.logit_bias > 0},
      {"allowed_tokens", static_cast<bool>(s.allowed_tokens), m.takes_allowed_tokens},
  };
  for (const auto& row : rows) {
    if (row.is_on && !row.is_taken) {
      return row.name;
    }
  }
  return nullptr;
}

void LlmProgram::set_sampling(const Sampling& sampling) {
  inputs_.temperature = sampling.temperature;
  inputs_.top_p = sampling.top_p;
  inputs_.top_k = sampling.top_k;
  inputs_.min_p = sampling.min_p;
  inputs_.repetition_penalty = sampling.repetition_penalty;
  inputs_.presence_penalty = sampling.presence_penalty;
  inputs_.frequency_penalty = sampling.frequency_penalty;
  std::fill(inputs_.bias_tokens.begin(), inputs_.bias_tokens.end(), kNoToken);
  std::fill(inputs_.bias_values.begin(), inputs_.bias_values.end(), 0.0f);
  for (size_t i = 0; i < sampling.logit_bias.size(); ++i) {
    std::tie(inputs_.bias_tokens[i], inputs_.bias_values[i]) = sampling.logit_bias[i];
  }
}

EValue LlmProgram::execute(const std::string& method, const Piece& piece, const std::vector<EValue>& values) {
  load(method);
  const int64_t count = static_cast<int64_t>(piece.tokens.size()) / metadata_.batch_size;
  const std::array<SizesType, 2> sizes = {
      static_cast<SizesType>(metadata_.batch_size), static_cast<SizesType>(count)};
  const Error error = executorch::runtime::resize_tensor(*tensors_[0], {sizes.data(), sizes.size()});
  check(error == Error::Ok, method, ": ", count, " tokens: ", because(error));
  std::copy(piece.tokens.begin(), piece.tokens.end(), inputs_.tokens.begin());
  std::copy(piece.start.begin(), piece.start.end(), inputs_.start.begin());
  inputs_.position = piece.position;

  const auto outputs = module_->execute(method, values);
  check(
      outputs.ok(), method, ": ", count, " tokens at position ", piece.position, ": ", because(outputs.error()));
  check(outputs->size() > 0 && (*outputs)[0].isTensor(), method, ": returned no tensor");
  return (*outputs)[0];
}

std::vector<int64_t> LlmProgram::draw(const Piece& piece, int64_t seed) {
  inputs_.seed = seed;
  const EValue out = execute(head_, piece, head_values_);
  std::fill(inputs_.allowed_tokens.begin(), inputs_.allowed_tokens.end(), kAllBits);
  const auto& tensor = out.toTensor();
  check(
      tensor.numel() == metadata_.batch_size,
      head_, ": returned ", tensor.numel(), " elements, expected a token for each of ", metadata_.batch_size, " rows");
  const int64_t* data = tensor.const_data_ptr<int64_t>();
  const std::vector<int64_t> tokens(data, data + tensor.numel());
  for (const int64_t token : tokens) {
    check(
        0 <= token && token < metadata_.vocab_size,
        head_, ": returned token ", token, ", outside the vocabulary [0, ", metadata_.vocab_size, ")");
  }
  return tokens;
}

std::vector<float> LlmProgram::logits(const Piece& piece) {
  const EValue out = execute(logits_, piece, logits_values_);
  const auto& tensor = out.toTensor();
  const int64_t vocab_size = metadata_.vocab_size;
  const bool fits = (tensor.dim() == 2 || tensor.dim() == 3) && tensor.size(0) == metadata_.batch_size &&
      tensor.size(tensor.dim() - 1) == vocab_size && tensor.numel() > 0;
  check(
      fits, logits_, ": returned logits of rank ", tensor.dim(), " with ", tensor.numel(), " elements, expected [",
      metadata_.batch_size, ", 1, ", vocab_size, "]");
  std::vector<float> result(metadata_.batch_size * vocab_size);
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      read_last_row<float>(tensor, vocab_size, result.data());
      break;
    case ScalarType::Half:
      read_last_row<executorch::aten::Half>(tensor, vocab_size, result.data());
      break;
    case ScalarType::BFloat16:
      read_last_row<executorch::aten::BFloat16>(tensor, vocab_size, result.data());
      break;
    default:
      check(false, logits_, ": returned ", dtype(tensor.scalar_type()), ", expected Float, Half or BFloat16");
  }
  return result;
}

} // namespace executorch_mlx
