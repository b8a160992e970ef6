#include "metadata.h"

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

#include <algorithm>
#include <limits>

#include "check.h"

namespace executorch_mlx::engine {

using executorch::aten::ScalarType;
using executorch::runtime::EValue;

MetadataReader::MetadataReader(executorch::extension::Module& module, std::string path) : path_(std::move(path)) {
  const auto names = module.method_names();
  check_program(names.ok(), path_, ": cannot list the methods: ", describe(names.error()));
  method_names_.assign(names->begin(), names->end());
  std::sort(method_names_.begin(), method_names_.end());
  for (const std::string& name : method_names_) {
    const auto meta = module.method_meta(name);
    if (meta.ok() && meta->num_inputs() == 0 && meta->num_backends() == 0) {
      auto values = module.execute(name);
      check_program(values.ok(), path_, ": ", name, ": ", describe(values.error()));
      for (const EValue& value : *values) {
        check_program(
            !value.isTensor() || has_memory(value.toTensor()), path_, ": ", name, ": the tensor has no memory");
      }
      values_[name] = std::move(*values);
    }
  }
}

bool MetadataReader::has_method(const std::string& name) const {
  return std::binary_search(method_names_.begin(), method_names_.end(), name);
}

std::string MetadataReader::describe_methods() const {
  std::string list;
  for (const std::string& name : method_names_) {
    list += (list.empty() ? "" : ", ") + name;
  }
  return list.empty() ? "none" : list;
}

const std::vector<EValue>& MetadataReader::values(const std::string& name) const {
  const auto found = values_.find(name);
  check_program(found != values_.end(), path_, ": missing method ", name);
  return found->second;
}

std::optional<int64_t> MetadataReader::find_integer(const std::string& name) const {
  const auto found = values_.find(name);
  if (found == values_.end() || found->second.size() != 1) {
    return std::nullopt;
  }
  const EValue& value = found->second[0];
  return value.isInt() ? std::optional(value.toInt())
      : value.isBool() ? std::optional<int64_t>(value.toBool())
                       : std::nullopt;
}

std::optional<std::span<const uint8_t>> MetadataReader::find_bytes(const std::string& name) const {
  const auto found = values_.find(name);
  if (found == values_.end() || found->second.size() != 1 || !found->second[0].isTensor()) {
    return std::nullopt;
  }
  const auto& tensor = found->second[0].toTensor();
  return std::span(static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes());
}

int64_t MetadataReader::integer(const std::string& name) const {
  const std::vector<EValue>& found = values(name);
  check_program(found.size() == 1 && found[0].isInt(), path_, ": ", name, ": expected one integer");
  return found[0].toInt();
}

int64_t MetadataReader::integer(const std::string& name, int64_t default_value) const {
  return has_value(name) ? integer(name) : default_value;
}

bool MetadataReader::boolean(const std::string& name, bool default_value) const {
  if (!has_value(name)) {
    return default_value;
  }
  const std::vector<EValue>& found = values(name);
  check_program(found.size() == 1 && found[0].isBool(), path_, ": ", name, ": expected one bool");
  return found[0].toBool();
}

// The method may have one int output for each id, as ExecuTorch's own runner expects, or a single output that is a
// tensor of ids.
std::vector<int64_t> MetadataReader::integers(const std::string& name) const {
  const std::vector<EValue>& found = values(name);
  if (found.size() == 1 && found[0].isTensor()) {
    const std::span<const int64_t> ids = array<int64_t>(name, ScalarType::Long);
    return {ids.begin(), ids.end()};
  }
  std::vector<int64_t> ids;
  for (const EValue& value : found) {
    check_program(value.isInt(), path_, ": ", name, ": expected integers or a tensor of integers");
    ids.push_back(value.toInt());
  }
  return ids;
}

template <typename T>
std::span<const T> MetadataReader::array(const std::string& name, ScalarType type) const {
  const std::vector<EValue>& found = values(name);
  check_program(found.size() == 1 && found[0].isTensor(), path_, ": ", name, ": expected one tensor");
  const auto& tensor = found[0].toTensor();
  check_program(tensor.scalar_type() == type && tensor.dim() == 1, path_, ": ", name, ": got ",
      dtype_name(tensor.scalar_type()), " of rank ", tensor.dim(), ", expected ", dtype_name(type), " of rank 1");
  return {tensor.const_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

namespace {

std::vector<std::string> read_lines(std::span<const uint8_t> text) {
  std::vector<std::string> lines(1);
  for (const uint8_t byte : text) {
    byte == '\n' ? (void)lines.emplace_back() : lines.back().push_back(static_cast<char>(byte));
  }
  return lines;
}

void check_metadata(const LlmMetadata& m, const std::string& path) {
  // The sizes of the tensors of ExecuTorch have 32 bits.
  constexpr int64_t kMost = std::numeric_limits<executorch::aten::SizesType>::max();
  const auto check_size = [&](const char* name, int64_t value, int64_t minimum) {
    check_program(value >= minimum, path, ": ", name, ": got ", value, ", expected at least ", minimum);
    check_program(value <= kMost, path, ": ", name, ": got ", value, ", expected at most ", kMost);
  };
  check_size("get_vocab_size", m.vocab_size, 1);
  check_size("get_max_batch_size", m.rows, 1);
  check_size("sampling_logit_bias", m.logit_bias, 0);
  check_size("sampling_logprobs", m.logprobs, 0);
  check_size("adapter_slots", m.adapter_slots, 0);
  check_size("adapter_rank", m.adapter_rank, m.adapter_slots > 0 ? 1 : 0);
  check_program(!m.speech.is_speech() || (m.rows == 1 && m.has_head && m.takes_allowed_tokens), path,
      ": encode: expected one row and a sampling head with a mask of allowed tokens");
  check_program(0 < m.max_seq_len && m.max_seq_len <= m.max_context_len, path, ": get_max_seq_len: got ", m.max_seq_len,
      ", expected 1 to ", m.max_context_len, " (get_max_context_len)");
  check_size("get_max_seq_len", m.max_seq_len, 1);
}

} // namespace

LlmMetadata read_metadata(const MetadataReader& reader, const std::string& path) {
  check_program(reader.integer("tensor_parallel_size", 1) <= 1, path,
      ": the model was exported in parts by an earlier version; export it again");
  check_program(reader.has_value("get_max_seq_len"), path, ": got a program with the methods ",
      reader.describe_methods(), ", expected a language or speech model");
  LlmMetadata m;
  m.max_seq_len = reader.integer("get_max_seq_len");
  m.max_context_len = reader.integer("get_max_context_len", m.max_seq_len);
  m.max_rewind = reader.integer("get_max_rewind", m.max_context_len);
  m.rows = reader.integer("get_max_batch_size", 1);
  m.vocab_size = reader.integer("get_vocab_size");
  if (reader.has_value("get_eos_ids")) {
    m.eos_ids = reader.integers("get_eos_ids");
  }
  m.has_head = reader.boolean("sampling_head", false);
  m.has_logits = !m.has_head || reader.has_method(m.rows == 1 ? "sample" : "logits");
  m.has_verify = m.has_head && reader.has_method("verify");
  m.takes_seed = m.has_head && reader.boolean("sampling_seed", false);
  m.takes_top_k = m.has_head && reader.boolean("sampling_top_k", false);
  m.takes_min_p = m.has_head && reader.boolean("sampling_min_p", false);
  m.takes_penalties = m.has_head && reader.boolean("sampling_penalties", false);
  m.takes_allowed_tokens = m.has_head && reader.boolean("sampling_allowed_tokens", false);
  m.takes_adjusts = m.has_head && reader.boolean("sampling_adjusts", false);
  m.logit_bias = m.has_head ? reader.integer("sampling_logit_bias", 0) : 0;
  m.logprobs = m.has_head ? reader.integer("sampling_logprobs", 0) : 0;
  m.history = reader.integer("sampling_history", 0);
  m.adapter_slots = reader.integer("adapter_slots", 0);
  if (m.adapter_slots > 0) {
    m.adapter_rank = reader.integer("adapter_rank");
    m.adapter_layers = read_lines(reader.array<uint8_t>("adapter_layers", ScalarType::Byte));
  }
  m.speech = read_speech_metadata(reader, m.vocab_size, path);
  m.pictures = read_picture_metadata(reader);
  check_metadata(m, path);
  return m;
}

TokenTable read_token_table(const MetadataReader& reader, int64_t vocab_size, const std::string& path) {
  if (!reader.has_value("token_bytes") || !reader.has_value("token_offsets")) {
    return {};
  }
  const TokenTable table = {
      reader.array<uint8_t>("token_bytes", ScalarType::Byte), reader.array<int64_t>("token_offsets", ScalarType::Long)};
  check_program(table.offsets.size() == static_cast<size_t>(vocab_size) + 1, path, ": token_offsets: got ",
      table.offsets.size(), " entries, expected ", vocab_size + 1, " (get_vocab_size + 1)");
  check_program(table.offsets.front() == 0 && table.offsets.back() == static_cast<int64_t>(table.bytes.size()) &&
          std::is_sorted(table.offsets.begin(), table.offsets.end()),
      path, ": token_offsets: expected ascending values from 0 to ", table.bytes.size(), " (the size of token_bytes)");
  return table;
}

} // namespace executorch_mlx::engine
