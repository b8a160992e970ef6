// What a request asks for.
#pragma once

#include <executorch_mlx/executorch_mlx.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pictures.h"

namespace executorch_mlx::engine {

// How the next token is chosen, besides seed and allowed tokens. With the default values, decoding is greedy and the
// logits are not changed. The fields are described in executorch_mlx.h.
struct SamplingParameters {
  float temperature = 0;
  float top_p = 1;
  int64_t top_k = 0;
  float min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::vector<std::pair<int64_t, float>> logit_bias = {}; // token id, and the value added to its logit

  // Whether penalties or biases have an effect.
  bool changes_logits() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0 || !logit_bias.empty();
  }
};

// A copy of executorch_mlx_request_options that owns its memory.
struct RequestOptions {
  std::vector<int64_t> prompt = {};
  std::shared_ptr<const std::vector<float>> samples = nullptr; // null: none
  std::shared_ptr<const std::vector<Picture>> pictures = nullptr; // null: none
  bool timestamps = false;
  bool allow_suppressed = false;
  SamplingParameters sampling = {};
  std::optional<int64_t> seed = {};
  executorch_mlx_allowed_tokens allowed_tokens = nullptr;
  int64_t max_new_tokens = 0;
  int64_t min_new_tokens = 0;
  std::vector<int64_t> stop_ids = {};
  bool ignore_eos = false;
  std::vector<std::string> stop = {};
  int32_t logprobs = -1;
  int32_t priority = 0;
  int32_t draft = -1;
  executorch_mlx_on_event on_event = nullptr;
  void* user_data = nullptr;
};

} // namespace executorch_mlx::engine
