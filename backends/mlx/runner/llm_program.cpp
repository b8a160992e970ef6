#include "llm_program.h"

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
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

// ExecuTorch has logged the details of an error by the time it returns one.
std::string because(Error error) {
  return str(executorch::runtime::to_string(error), ", see the log");
}

std::string dtype(ScalarType type) {
  return executorch::runtime::toString(type);
}

// What executorch_mlx_register() says of an MLXBackend that was there before.
constexpr int kOtherBackend = 1;

struct Expected {
  const char* name;
  ScalarType type;
  size_t rank;
};

// What `forward` takes. The order is that of mlx::sample.
std::vector<Expected> expected_inputs(const LlmMetadata& metadata) {
  std::vector<Expected> rows = {
      {"tokens", ScalarType::Long, 2},
      {"input_pos", ScalarType::Long, 1},
      {"temperature", ScalarType::Float, 0},
      {"top_p", ScalarType::Float, 0}};
  if (metadata.takes_seed) {
    rows.push_back({"seed", ScalarType::Long, 0});
  }
  if (metadata.takes_top_k) {
    rows.push_back({"top_k", ScalarType::Long, 0});
  }
  if (metadata.takes_min_p) {
    rows.push_back({"min_p", ScalarType::Float, 0});
  }
  return rows;
}

} // namespace

LlmProgram::LlmProgram(
    const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer)
    : path_(path) {
  executorch::runtime::runtime_init();
  const int registered = executorch_mlx_register();
  check(
      registered <= kOtherBackend, "MLXBackend cannot be registered: ",
      because(static_cast<Error>(registered)));
  open(device);
  read_metadata();
  read_token_table();
  check_forward();
  load_forward(tracer);
  bind_inputs();
}

void LlmProgram::open(const std::string& device) {
  const std::string& path = path_;
  // A directory opens like a file; only reading tells.
  check_argument(
      std::ifstream(path).peek() != std::ifstream::traits_type::eof(),
      path, ": cannot be read, or is empty");
  check_argument(
      device.empty() || device == "cpu" || device == "gpu",
      "device: '", device, "', expected cpu or gpu");
  module_ = std::make_unique<Module>(path, Module::LoadMode::Mmap);

  executorch::runtime::BackendOptions<1> options;
  executorch::runtime::LoadBackendOptionsMap map;
  Error error = Error::Ok;
  if (!device.empty()) {
    error = options.set_option("device", device.c_str());
    error = error == Error::Ok ? map.set_options("MLXBackend", options.view()) : error;
    check(error == Error::Ok, "device: ", because(error));
  }
  error = module_->load(map, Program::Verification::InternalConsistency);
  check(error == Error::Ok, path, ": not an ExecuTorch program (", because(error), ")");

  const auto names = module_->method_names();
  check(names.ok(), path, ": method names: ", because(names.error()));
  methods_.assign(names->begin(), names->end());
  std::sort(methods_.begin(), methods_.end());

  if (!has_method("forward")) {
    std::string list;
    for (const std::string& name : methods_) {
      list += (list.empty() ? "" : ", ") + name;
    }
    check(false, path, ": no method forward; it has ", list.empty() ? "none" : list);
  }
  check(
      has_method("sampling_head") && flag("sampling_head"),
      path, ": samples no token inside (",
      has_method("sampling_head") ? "sampling_head is false" : "no method sampling_head",
      "); expected a language model exported with its sampling head");
}

void LlmProgram::read_metadata() {
  metadata_.max_seq_len = integer("get_max_seq_len");
  metadata_.max_context_len =
      has_method("get_max_context_len") ? integer("get_max_context_len") : metadata_.max_seq_len;
  metadata_.vocab_size = integer("get_vocab_size");
  if (has_method("get_bos_id") && integer("get_bos_id") >= 0) {
    metadata_.bos_id = integer("get_bos_id");
  }
  if (has_method("get_eos_ids")) {
    metadata_.eos_ids = integers("get_eos_ids");
  }
  metadata_.takes_seed = has_method("sampling_seed") && flag("sampling_seed");
  metadata_.takes_top_k = has_method("sampling_top_k") && flag("sampling_top_k");
  metadata_.takes_min_p = has_method("sampling_min_p") && flag("sampling_min_p");

  check(metadata_.vocab_size > 0, path_, ": get_vocab_size is ", metadata_.vocab_size);
  check(
      0 < metadata_.max_seq_len && metadata_.max_seq_len <= metadata_.max_context_len,
      path_, ": get_max_seq_len is ", metadata_.max_seq_len, ", expected 1 to get_max_context_len = ",
      metadata_.max_context_len);
}

void LlmProgram::read_token_table() {
  if (!has_method("token_bytes") || !has_method("token_offsets")) {
    return;
  }
  token_bytes_ = array<uint8_t>("token_bytes", ScalarType::Byte);
  token_offsets_ = array<int64_t>("token_offsets", ScalarType::Long);
  check(
      token_offsets_.size() == static_cast<size_t>(metadata_.vocab_size) + 1,
      path_, ": token_offsets has ", token_offsets_.size(), " entries, expected get_vocab_size + 1 = ",
      metadata_.vocab_size + 1);
  check(
      token_offsets_.front() == 0 &&
          token_offsets_.back() == static_cast<int64_t>(token_bytes_.size()) &&
          std::is_sorted(token_offsets_.begin(), token_offsets_.end()),
      path_, ": token_offsets do not rise from 0 to the ", token_bytes_.size(), " bytes of token_bytes");
  metadata_.has_tokens = true;
}

void LlmProgram::check_forward() {
  const auto meta = module_->method_meta("forward");
  check(meta.ok(), path_, ": forward: ", because(meta.error()));

  const std::vector<Expected> rows = expected_inputs(metadata_);
  check(
      meta->num_inputs() == rows.size(),
      path_, ": forward has ", meta->num_inputs(), " inputs, expected ", rows.size(),
      " by its sampling_* methods");
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto tag = meta->input_tag(i);
    check(
        tag.ok() && *tag == Tag::Tensor,
        path_, ": forward: input ", i, " (", rows[i].name, ") is no tensor");
    const auto info = meta->input_tensor_meta(i);
    check(
        info->scalar_type() == rows[i].type && info->sizes().size() == rows[i].rank,
        path_, ": forward: input ", i, " (", rows[i].name, ") is ", dtype(info->scalar_type()),
        " of rank ", info->sizes().size(), ", expected ", dtype(rows[i].type), " of rank ",
        rows[i].rank);
  }
  const auto tokens = meta->input_tensor_meta(0)->sizes();
  check(
      tokens[0] == 1 && tokens[1] >= metadata_.max_seq_len,
      path_, ": forward: tokens is at most [", tokens[0], ", ", tokens[1],
      "], expected [1, get_max_seq_len = ", metadata_.max_seq_len, "]");

  const auto out = meta->num_outputs() > 0 ? meta->output_tag(0) : Error::NotFound;
  check(
      out.ok() && *out == Tag::Tensor &&
          meta->output_tensor_meta(0)->scalar_type() == ScalarType::Long,
      path_, ": forward does not return a token, Long [1]");

  for (size_t i = 0; i < meta->num_backends(); ++i) {
    const char* name = meta->get_backend_name(i).get();
    check(
        executorch::runtime::get_backend_class(name) != nullptr,
        path_, ": forward needs the backend ", name, ", which this process has not");
  }
}

void LlmProgram::load_forward(executorch::runtime::EventTracer* tracer) {
  const Error error = module_->load_method("forward", nullptr, tracer);
  check(error == Error::Ok, path_, ": forward cannot be loaded: ", because(error));
}

void LlmProgram::bind_inputs() {
  inputs_.tokens.resize(metadata_.max_seq_len);
  const auto add = [&](std::vector<SizesType> sizes, void* data, ScalarType type) {
    tensors_.push_back(make_tensor_ptr(std::move(sizes), data, type));
    values_.emplace_back(*tensors_.back());
  };
  const std::vector<SizesType> scalar;
  add({1, static_cast<SizesType>(metadata_.max_seq_len)}, inputs_.tokens.data(), ScalarType::Long);
  add({1}, &inputs_.position, ScalarType::Long);
  add(scalar, &inputs_.temperature, ScalarType::Float);
  add(scalar, &inputs_.top_p, ScalarType::Float);
  if (metadata_.takes_seed) {
    add(scalar, &inputs_.seed, ScalarType::Long);
  }
  if (metadata_.takes_top_k) {
    add(scalar, &inputs_.top_k, ScalarType::Long);
  }
  if (metadata_.takes_min_p) {
    add(scalar, &inputs_.min_p, ScalarType::Float);
  }
}

std::string_view LlmProgram::token_bytes(int64_t token) const {
  check_argument(metadata_.has_tokens, path_, ": carries no bytes of its tokens");
  check_argument(
      0 <= token && token < metadata_.vocab_size,
      "token_bytes: id ", token, " is outside [0, ", metadata_.vocab_size, ")");
  const int64_t begin = token_offsets_[token];
  return {
      reinterpret_cast<const char*>(token_bytes_.data()) + begin,
      static_cast<size_t>(token_offsets_[token + 1] - begin)};
}

void LlmProgram::set_sampling(const Sampling& sampling) {
  const auto taken = [&](bool set, bool takes, const char* name) {
    check_argument(!set || takes, name, ": the program was exported without it");
  };
  taken(sampling.seed.has_value(), metadata_.takes_seed, "seed");
  taken(sampling.top_k.has_value(), metadata_.takes_top_k, "top_k");
  taken(sampling.min_p.has_value(), metadata_.takes_min_p, "min_p");
  inputs_.temperature = sampling.temperature;
  inputs_.top_p = sampling.top_p;
  inputs_.top_k = sampling.top_k.value_or(0);
  inputs_.min_p = sampling.min_p.value_or(0);
}

int64_t LlmProgram::call(std::span<const int64_t> tokens, int64_t position, int64_t seed) {
  const std::array<SizesType, 2> sizes = {1, static_cast<SizesType>(tokens.size())};
  Error error = executorch::runtime::resize_tensor(*tensors_[0], {sizes.data(), sizes.size()});
  check(error == Error::Ok, "forward: ", tokens.size(), " tokens: ", because(error));
  std::copy(tokens.begin(), tokens.end(), inputs_.tokens.begin());
  inputs_.position = position;
  inputs_.seed = seed;

  const auto outputs = module_->execute("forward", values_);
  check(
      outputs.ok(), "forward: ", tokens.size(), " tokens at position ", position, ": ",
      because(outputs.error()));
  const auto& out = (*outputs)[0];
  check(
      out.isTensor() && out.toTensor().numel() == 1,
      "forward: returned ", out.isTensor() ? out.toTensor().numel() : 0, " elements, expected 1 token");
  const int64_t token = *out.toTensor().const_data_ptr<int64_t>();
  check(
      0 <= token && token < metadata_.vocab_size,
      "forward: returned token ", token, ", outside the vocabulary [0, ", metadata_.vocab_size, ")");
  return token;
}

bool LlmProgram::has_method(const std::string& name) const {
  return std::binary_search(methods_.begin(), methods_.end(), name);
}

std::vector<EValue> LlmProgram::constants(const std::string& name) {
  check(has_method(name), path_, ": no method ", name);
  auto values = module_->execute(name);
  check(values.ok(), path_, ": ", name, ": ", because(values.error()));
  return std::move(*values);
}

int64_t LlmProgram::integer(const std::string& name) {
  const std::vector<EValue> values = constants(name);
  check(values.size() == 1 && values[0].isInt(), path_, ": ", name, " is not one integer");
  return values[0].toInt();
}

bool LlmProgram::flag(const std::string& name) {
  const std::vector<EValue> values = constants(name);
  check(values.size() == 1 && values[0].isBool(), path_, ": ", name, " is not one bool");
  return values[0].toBool();
}

// ExecuTorch's own runner wants one int output per id; a tensor is as clear.
std::vector<int64_t> LlmProgram::integers(const std::string& name) {
  const std::vector<EValue> values = constants(name);
  if (values.size() == 1 && values[0].isTensor()) {
    const std::span<const int64_t> ids = array<int64_t>(name, ScalarType::Long);
    return {ids.begin(), ids.end()};
  }
  std::vector<int64_t> ids;
  for (const EValue& value : values) {
    check(value.isInt(), path_, ": ", name, " is neither integers nor a tensor of them");
    ids.push_back(value.toInt());
  }
  return ids;
}

// A view of the program's own memory.
template <typename T>
std::span<const T> LlmProgram::array(const std::string& name, ScalarType type) {
  const std::vector<EValue> values = constants(name);
  check(values.size() == 1 && values[0].isTensor(), path_, ": ", name, " is not one tensor");
  const auto& tensor = values[0].toTensor();
  check(
      tensor.scalar_type() == type && tensor.dim() == 1,
      path_, ": ", name, " is ", dtype(tensor.scalar_type()), " of rank ", tensor.dim(),
      ", expected ", dtype(type), " of rank 1");
  return {tensor.const_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

} // namespace executorch_mlx
