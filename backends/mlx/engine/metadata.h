// Reads the metadata methods of a program: methods without inputs that return constants.
#pragma once

#include <executorch/extension/module/module.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pictures.h"
#include "speech.h"

namespace executorch_mlx::engine {

// The properties of a program, read from its metadata methods. docs/llm-program.md lists these methods.
struct LlmMetadata {
  int64_t max_seq_len = 0; // largest chunk: tokens of one call
  int64_t max_context_len = 0; // positions of a row
  int64_t max_rewind = 0; // how many positions a row can rewind; it can always rewind to position 0
  int64_t rows = 1;
  int64_t vocab_size = 0; // number of token ids
  std::vector<int64_t> eos_ids; // the tokens that end an answer
  bool has_head = false; // the program has a sampling head, and can return tokens
  bool has_logits = false; // the program can return logits, so that the host can sample
  bool has_verify = false;

  // Which sampling parameters the head accepts, besides temperature and top_p.
  bool takes_seed = false; // if false, the draws of the head differ from run to run
  bool takes_top_k = false;
  bool takes_min_p = false;
  bool takes_penalties = false;
  bool takes_allowed_tokens = false;
  bool takes_adjusts = false; // whether calls say if penalties, biases and masks have an effect
  int64_t logit_bias = 0; // the largest number of tokens whose logits the head can bias; 0: no logit bias
  int64_t logprobs = 0; // how many of the most likely tokens the head returns; 0: no log probabilities
  // The penalties consider this number of tokens, counted from the end of the prompt and answer so far. 0 means that
  // the program does not give a number; the host then considers all tokens.
  int64_t history = 0;

  // Adapters that are loaded while the program runs.
  int64_t adapter_slots = 0; // how many fit at once; 0: the program takes none
  int64_t adapter_rank = 0; // their largest rank
  std::vector<std::string> adapter_layers; // the paths of the layers, in the order of the inputs of load_adapter

  SpeechMetadata speech;
  PictureMetadata pictures;
};

// The values of the metadata methods. boolean(), integer(), integers() and array() return the value of the method
// `name`. They throw EngineError if that value has another type. A function without the parameter `default_value` also
// throws if the method is missing.
class MetadataReader {
 public:
  // Runs all methods that have neither inputs nor delegates. `path` is the name of the file in error messages. `module`
  // must outlive the reader and the spans that array() returns.
  MetadataReader(executorch::extension::Module& module, std::string path);

  // The names of all methods, sorted.
  const std::vector<std::string>& method_names() const { return method_names_; }

  // The same for messages.
  std::string describe_methods() const;

  bool has_method(const std::string& name) const;
  bool has_value(const std::string& name) const { return values_.contains(name); }
  bool boolean(const std::string& name, bool default_value) const;
  int64_t integer(const std::string& name) const;
  int64_t integer(const std::string& name, int64_t default_value) const;
  std::vector<int64_t> integers(const std::string& name) const;
  template <typename T>
  std::span<const T> array(const std::string& name, executorch::aten::ScalarType type) const;

  // The value if it is one integer or bool, else nullopt.
  std::optional<int64_t> find_integer(const std::string& name) const;
  // The bytes of the value if it is one tensor, else nullopt.
  std::optional<std::span<const uint8_t>> find_bytes(const std::string& name) const;

 private:
  const std::vector<executorch::runtime::EValue>& values(const std::string& name) const;

  std::string path_;
  std::vector<std::string> method_names_;
  std::map<std::string, std::vector<executorch::runtime::EValue>> values_;
};

// Reads and validates the metadata. `path` is for error messages.
LlmMetadata read_metadata(const MetadataReader& reader, const std::string& path);

// The bytes of all tokens, in the memory of the program. The bytes of token i begin at bytes[offsets[i]] and end before
// bytes[offsets[i + 1]]. Both spans are empty if the program contains no token bytes.
struct TokenTable {
  std::span<const uint8_t> bytes;
  std::span<const int64_t> offsets; // [vocab_size + 1]
};
TokenTable read_token_table(const MetadataReader& reader, int64_t vocab_size, const std::string& path);

} // namespace executorch_mlx::engine
