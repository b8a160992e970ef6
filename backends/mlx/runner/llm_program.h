// One loaded .pte with a sampling head: checked at load, called with plain values.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace executorch_mlx {

class LlmProgram {
 public:
  LlmProgram(const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer);
  LlmProgram(const LlmProgram&) = delete;
  LlmProgram& operator=(const LlmProgram&) = delete;

  const LlmMetadata& metadata() const {
    return metadata_;
  }
  std::string_view token_bytes(int64_t token) const;

  // Throws LlmArgumentError for a parameter that `forward` does not take.
  void set_sampling(const Sampling& sampling);

  // One call of `forward`: `tokens`, at most max_seq_len of them, at `position`.
  int64_t call(std::span<const int64_t> tokens, int64_t position, int64_t seed);

 private:
  // The inputs of `forward` for the life of the program; the tensors are views.
  struct Inputs {
    std::vector<int64_t> tokens;
    int64_t position = 0;
    float temperature = 0;
    float top_p = 1;
    int64_t seed = 0;
    int64_t top_k = 0;
    float min_p = 0;
  };

  void open(const std::string& device);
  void read_metadata();
  void read_token_table();
  void check_forward();
  void load_forward(executorch::runtime::EventTracer* tracer);
  void bind_inputs();

  // Constant methods, by name.
  bool has_method(const std::string& name) const;
  std::vector<executorch::runtime::EValue> constants(const std::string& name);
  int64_t integer(const std::string& name);
  bool flag(const std::string& name);
  std::vector<int64_t> integers(const std::string& name);
  template <typename T>
  std::span<const T> array(const std::string& name, executorch::aten::ScalarType type);

  std::string path_;
  std::unique_ptr<executorch::extension::Module> module_;
  std::vector<std::string> methods_;
  LlmMetadata metadata_;
  std::span<const uint8_t> token_bytes_; // in the program
  std::span<const int64_t> token_offsets_;

  Inputs inputs_;
  std::vector<executorch::extension::TensorPtr> tensors_;
  std::vector<executorch::runtime::EValue> values_;
};

} // namespace executorch_mlx
