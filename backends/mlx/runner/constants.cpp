#include "constants.h"

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

#include <algorithm>

#include "text.h"

namespace executorch_mlx {

using executorch::aten::ScalarType;
using executorch::runtime::EValue;

Constants::Constants(executorch::extension::Module& module, std::string path)
    : module_(module), path_(std::move(path)) {
  const auto names = module_.method_names();
  check(names.ok(), path_, ": method names: ", because(names.error()));
  names_.assign(names->begin(), names->end());
  std::sort(names_.begin(), names_.end());
}

bool Constants::has(const std::string& name) const {
  return std::binary_search(names_.begin(), names_.end(), name);
}

std::vector<EValue> Constants::values(const std::string& name) {
  check(has(name), path_, ": no method ", name);
  auto values = module_.execute(name);
  check(values.ok(), path_, ": ", name, ": ", because(values.error()));
  return std::move(*values);
}

int64_t Constants::integer(const std::string& name) {
  const std::vector<EValue> found = values(name);
  check(found.size() == 1 && found[0].isInt(), path_, ": ", name, " is not one integer");
  return found[0].toInt();
}

int64_t Constants::integer(const std::string& name, int64_t otherwise) {
  return has(name) ? integer(name) : otherwise;
}

bool Constants::flag(const std::string& name, bool otherwise) {
  if (!has(name)) {
    return otherwise;
  }
  const std::vector<EValue> found = values(name);
  check(found.size() == 1 && found[0].isBool(), path_, ": ", name, " is not one bool");
  return found[0].toBool();
}

// ExecuTorch's own runner wants one int output per id; a tensor is as clear.
std::vector<int64_t> Constants::integers(const std::string& name) {
  const std::vector<EValue> found = values(name);
  if (found.size() == 1 && found[0].isTensor()) {
    const std::span<const int64_t> ids = array<int64_t>(name, ScalarType::Long);
    return {ids.begin(), ids.end()};
  }
  std::vector<int64_t> ids;
  for (const EValue& value : found) {
    check(value.isInt(), path_, ": ", name, " is neither integers nor a tensor of them");
    ids.push_back(value.toInt());
  }
  return ids;
}

// A view of the program's own memory.
template <typename T>
std::span<const T> Constants::array(const std::string& name, ScalarType type) {
  const std::vector<EValue> found = values(name);
  check(found.size() == 1 && found[0].isTensor(), path_, ": ", name, " is not one tensor");
  const auto& tensor = found[0].toTensor();
  check(
      tensor.scalar_type() == type && tensor.dim() == 1,
      path_, ": ", name, " is ", dtype(tensor.scalar_type()), " of rank ", tensor.dim(),
      ", expected ", dtype(type), " of rank 1");
  return {tensor.const_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

LlmMetadata read_metadata(Constants& constants, const std::string& path) {
  LlmMetadata m;
  m.max_seq_len = constants.integer("get_max_seq_len");
  m.max_context_len = constants.integer("get_max_context_len", m.max_seq_len);
  m.max_rewind = constants.integer("get_max_rewind", m.max_context_len);
  m.batch_size = constants.integer("get_max_batch_size", 1);
  m.vocab_size = constants.integer("get_vocab_size");
  if (const int64_t bos = constants.integer("get_bos_id", -1); bos >= 0) {
    m.bos_id = bos;
  }
  if (constants.has("get_eos_ids")) {
    m.eos_ids = constants.integers("get_eos_ids");
  }
  m.has_head = constants.flag("sampling_head", false);
  m.has_logits = !m.has_head || constants.has("sample");
  m.takes_seed = m.has_head && constants.flag("sampling_seed", false);
  m.takes_top_k = m.has_head && constants.flag("sampling_top_k", false);
  m.takes_min_p = m.has_head && constants.flag("sampling_min_p", false);
  m.takes_penalties = m.has_head && constants.flag("sampling_penalties", false);
  m.takes_allowed_tokens = m.has_head && constants.flag("sampling_allowed_tokens", false);
  m.logit_bias = m.has_head ? constants.integer("sampling_logit_bias", 0) : 0;
  m.history = constants.integer("sampling_history", 0);

  const auto positive = [&](const char* name, int64_t value) {
    check(value > 0, path, ": ", name, " is ", value, ", expected at least 1");
  };
  positive("get_vocab_size", m.vocab_size);
  positive("get_max_batch_size", m.batch_size);
  check(m.logit_bias >= 0, path, ": sampling_logit_bias is ", m.logit_bias, ", expected at least 0");
  check(
      0 < m.max_seq_len && m.max_seq_len <= m.max_context_len,
      path, ": get_max_seq_len is ", m.max_seq_len, ", expected 1 to get_max_context_len = ", m.max_context_len);
  return m;
}

TokenTable read_token_table(Constants& constants, const LlmMetadata& metadata, const std::string& path) {
  if (!constants.has("token_bytes") || !constants.has("token_offsets")) {
    return {};
  }
  const TokenTable table = {
      constants.array<uint8_t>("token_bytes", ScalarType::Byte),
      constants.array<int64_t>("token_offsets", ScalarType::Long)};
  check(
      table.offsets.size() == static_cast<size_t>(metadata.vocab_size) + 1,
      path, ": token_offsets has ", table.offsets.size(), " entries, expected get_vocab_size + 1 = ",
      metadata.vocab_size + 1);
  check(
      table.offsets.front() == 0 && table.offsets.back() == static_cast<int64_t>(table.bytes.size()) &&
          std::is_sorted(table.offsets.begin(), table.offsets.end()),
      path, ": token_offsets do not rise from 0 to the ", table.bytes.size(), " bytes of token_bytes");
  return table;
}

} // namespace executorch_mlx
