// The C++ API of the LLM engine: the C API of executorch_mlx.h with objects that free themselves, and exceptions.
//
//   executorch_mlx::Model model("model.pte");
//   executorch_mlx::Engine engine(model);
//   executorch_mlx::RequestOptions options;
//   options.temperature = 0.8f;
//   auto request = engine.submit(prompt_ids, options, [](const executorch_mlx::Event& event) {
//     std::cout << event.text << std::flush;
//     return true; // false cancels the request
//   });
//   request.wait();
//
// Everything here is defined in this header, so that a program and the library may come from different compilers.
#pragma once

#include <executorch_mlx/executorch_mlx.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace executorch_mlx {

// Thrown by the functions here that can fail. The message is that of executorch_mlx_last_error().
class LlmError : public std::runtime_error {
 public:
  LlmError(executorch_mlx_status reason, const std::string& message) : std::runtime_error(message), status(reason) {}

  executorch_mlx_status status;
};

// The request or an argument is invalid for this program, or the file does not exist.
class LlmArgumentError : public LlmError {
 public:
  using LlmError::LlmError;
};

// The program or a step does not fit into the memory limit (see memory.h) or into the memory of the machine.
class LlmMemoryError : public LlmError {
 public:
  using LlmError::LlmError;
};

// The queue of the engine is full.
class LlmBusyError : public LlmError {
 public:
  using LlmError::LlmError;
};

[[noreturn]] inline void throw_error(executorch_mlx_status status, const std::string& message) {
  switch (status) {
    case EXECUTORCH_MLX_INVALID_ARGUMENT:
    case EXECUTORCH_MLX_NOT_FOUND:
      throw LlmArgumentError(status, message);
    case EXECUTORCH_MLX_OUT_OF_MEMORY:
      throw LlmMemoryError(status, message);
    case EXECUTORCH_MLX_BUSY:
      throw LlmBusyError(status, message);
    default:
      throw LlmError(status, message);
  }
}

inline void check_status(executorch_mlx_status status) {
  if (status != EXECUTORCH_MLX_OK) {
    throw_error(status, executorch_mlx_last_error());
  }
}

// Why an answer ended: executorch_mlx_finish. The Python API and the CLI use the same names.
inline const char* to_string(int32_t finish) {
  constexpr const char* kNames[] = {"running", "stop", "length", "context", "cancelled", "error"};
  return 0 <= finish && finish <= EXECUTORCH_MLX_FINISH_ERROR ? kNames[finish] : "unknown";
}

class Model {
 public:
  // `device` is "cpu", "gpu" or "" for the default: that of the environment variable EXECUTORCH_MLX_DEVICE, or MLX's.
  // `draft` is the path of a draft model, or "". With `low_priority`, the engine yields to other threads.
  explicit Model(const std::string& path, const std::string& device = "", bool profile = false,
      const std::string& draft = "", bool low_priority = false) {
    executorch_mlx_load_options options = EXECUTORCH_MLX_LOAD_OPTIONS;
    options.device = device.empty() ? nullptr : device.c_str();
    options.profile = profile;
    options.draft = draft.empty() ? nullptr : draft.c_str();
    options.low_priority = low_priority;
    executorch_mlx_model* model = nullptr;
    check_status(executorch_mlx_model_load(path.c_str(), &options, &model));
    handle_.reset(model);
  }

  // An integer of the metadata, or nullopt if the program has none of this name.
  std::optional<int64_t> get_int(const char* name) const {
    int64_t value = 0;
    const auto status = executorch_mlx_model_get_int(handle_.get(), name, &value);
    return status == EXECUTORCH_MLX_NOT_FOUND ? std::nullopt : (check_status(status), std::optional(value));
  }

  // An array of the metadata, as bytes; empty if the program has none of this name.
  std::span<const uint8_t> get_data(const char* name) const {
    const void* data = nullptr;
    size_t size = 0;
    const auto status = executorch_mlx_model_get_data(handle_.get(), name, &data, &size);
    if (status != EXECUTORCH_MLX_NOT_FOUND) {
      check_status(status);
    }
    return {static_cast<const uint8_t*>(data), size};
  }

  // Gives the bytes of its tokens to a program that has none, see executorch_mlx_model_set_token_bytes(). Without them,
  // an answer has no text, and stop strings are refused.
  void set_token_bytes(std::span<const std::string> tokens) {
    std::string bytes;
    std::vector<int64_t> offsets = {0};
    for (const std::string& token : tokens) {
      bytes += token;
      offsets.push_back(static_cast<int64_t>(bytes.size()));
    }
    check_status(executorch_mlx_model_set_token_bytes(handle_.get(), bytes.data(), offsets.data(), tokens.size()));
  }

  void write_profile(const std::string& path) {
    check_status(executorch_mlx_model_write_profile(handle_.get(), path.c_str()));
  }

  executorch_mlx_model* handle() const { return handle_.get(); }

 private:
  struct Free {
    void operator()(executorch_mlx_model* model) const { executorch_mlx_model_free(model); }
  };
  std::unique_ptr<executorch_mlx_model, Free> handle_;
};

// The fields of executorch_mlx_request_options, with the same default values.
struct RequestOptions {
  float temperature = 0;
  float top_p = 1;
  int64_t top_k = 0;
  float min_p = 0;
  std::optional<int64_t> seed;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::vector<std::pair<int64_t, float>> logit_bias; // token id, and the value added to its logit
  // Clears the bits of the tokens that may not be drawn. An exception ends the request.
  std::function<void(std::span<const int64_t> answer, std::span<int32_t> mask)> allowed_tokens;
  int64_t max_new_tokens = 0;
  std::vector<int64_t> stop_ids;
  bool ignore_eos = false;
  std::vector<std::string> stop;
  int32_t logprobs = -1;
  int32_t priority = 0;
  int32_t draft = -1;
  std::span<const float> samples;
  bool timestamps = false;
  bool allow_suppressed = false;
  int64_t min_new_tokens = 0;
  std::string adapter; // the name of a LoRA adapter, or ""
  std::span<const executorch_mlx_picture> pictures;
};

// The fields of executorch_mlx_event.
struct Event {
  int64_t token; // -1 if the answer ends without a new token
  std::string_view text;
  int32_t finish; // executorch_mlx_finish
  int32_t stop_index;
  float logprob;
  std::span<const int64_t> top_tokens;
  std::span<const float> top_logprobs;
};

// Called on the engine's thread. Returns whether to continue. An exception cancels the request; wait() throws it.
using OnEvent = std::function<bool(const Event&)>;

// A submitted request. The destructor cancels it and waits for its end. It must not be called by a callback of the
// request.
class Request {
 public:
  Request(Request&&) = default;

  // Ends the request that this object held, as the destructor does.
  Request& operator=(Request&& other) noexcept {
    handle_ = std::move(other.handle_); // before state_: callbacks of the old request use the old state
    state_ = std::move(other.state_);
    return *this;
  }

  void cancel() noexcept { executorch_mlx_request_cancel(handle_.get()); }

  // Waits for the end of the request, at most `seconds`; negative: without limit. Returns whether it has ended. If it
  // ended by an error or by an exception in a callback, throws that. In a callback of its engine, returns at once.
  bool wait(double seconds = -1) {
    if (!executorch_mlx_request_wait(handle_.get(), seconds)) {
      return false;
    }
    if (state_->error) {
      std::rethrow_exception(state_->error);
    }
    if (const auto i = info(); i.finish == EXECUTORCH_MLX_FINISH_ERROR) {
      // With another status, allowed_tokens() has thrown for a draft token only, which does not end the request.
      if (state_->mask_error && i.status == EXECUTORCH_MLX_INVALID_ARGUMENT) {
        std::rethrow_exception(state_->mask_error);
      }
      throw_error(i.status, executorch_mlx_request_error(handle_.get()));
    }
    return true;
  }

  executorch_mlx_request_info info() const {
    executorch_mlx_request_info info = {};
    info.size = sizeof(info);
    executorch_mlx_request_get_info(handle_.get(), &info);
    return info;
  }

 private:
  friend class Engine;

  Request() = default;

  struct State {
    OnEvent on_event;
    decltype(RequestOptions::allowed_tokens) allowed_tokens;
    std::exception_ptr error; // of on_event()
    std::exception_ptr mask_error; // of allowed_tokens()
  };
  struct Free {
    void operator()(executorch_mlx_request* request) const { executorch_mlx_request_free(request); }
  };

  static bool call_on_event(void* user_data, const executorch_mlx_event* e) {
    auto& state = *static_cast<State*>(user_data);
    const auto count = static_cast<size_t>(e->top_count);
    try {
      return state.on_event({e->token, {e->text, e->text_length}, e->finish, e->stop_index, e->logprob,
          {e->top_tokens, count}, {e->top_logprobs, count}});
    } catch (...) {
      state.error = std::current_exception();
      return false;
    }
  }

  static bool call_allowed_tokens(
      void* user_data, const int64_t* answer, size_t answer_length, int32_t* mask, size_t words) {
    auto& state = *static_cast<State*>(user_data);
    try {
      state.allowed_tokens({answer, answer_length}, {mask, words});
      return true;
    } catch (...) {
      state.mask_error = std::current_exception();
      return false;
    }
  }

  std::unique_ptr<State> state_; // outlives the handle
  std::unique_ptr<executorch_mlx_request, Free> handle_;
};

// How likely a token is.
struct Score {
  float logprob;
  bool is_greedy; // whether it is the most likely token
};

// Runs the requests of one model. Destroy it before the model. Its requests may be destroyed later.
class Engine {
 public:
  explicit Engine(const Model& model, executorch_mlx_engine_options options = EXECUTORCH_MLX_ENGINE_OPTIONS) {
    executorch_mlx_engine* engine = nullptr;
    check_status(executorch_mlx_engine_create(model.handle(), &options, &engine));
    handle_.reset(engine);
  }

  Request submit(std::span<const int64_t> prompt, const RequestOptions& options, OnEvent on_event = {}) {
    Request request;
    request.state_ = std::make_unique<Request::State>(std::move(on_event), options.allowed_tokens);
    std::vector<int64_t> bias_tokens;
    std::vector<float> bias_values;
    for (const auto& [token, value] : options.logit_bias) {
      bias_tokens.push_back(token);
      bias_values.push_back(value);
    }
    std::vector<const char*> stop;
    for (const std::string& string : options.stop) {
      stop.push_back(string.c_str());
    }
    executorch_mlx_request_options o = EXECUTORCH_MLX_REQUEST_OPTIONS;
    o.prompt = prompt.data();
    o.prompt_length = prompt.size();
    o.temperature = options.temperature;
    o.top_p = options.top_p;
    o.top_k = options.top_k;
    o.min_p = options.min_p;
    o.has_seed = options.seed.has_value();
    o.seed = options.seed.value_or(0);
    o.repetition_penalty = options.repetition_penalty;
    o.presence_penalty = options.presence_penalty;
    o.frequency_penalty = options.frequency_penalty;
    o.bias_tokens = bias_tokens.data();
    o.bias_values = bias_values.data();
    o.bias_count = bias_tokens.size();
    o.allowed_tokens = options.allowed_tokens ? Request::call_allowed_tokens : nullptr;
    o.max_new_tokens = options.max_new_tokens;
    o.stop_ids = options.stop_ids.data();
    o.stop_id_count = options.stop_ids.size();
    o.ignore_eos = options.ignore_eos;
    o.stop = stop.data();
    o.stop_count = stop.size();
    o.logprobs = options.logprobs;
    o.priority = options.priority;
    o.draft = options.draft;
    o.samples = options.samples.data();
    o.sample_count = options.samples.size();
    o.timestamps = options.timestamps;
    o.allow_suppressed = options.allow_suppressed;
    o.min_new_tokens = options.min_new_tokens;
    o.adapter = options.adapter.empty() ? nullptr : options.adapter.c_str();
    o.pictures = options.pictures.data();
    o.picture_count = options.pictures.size();
    o.on_event = request.state_->on_event ? Request::call_on_event : nullptr;
    o.user_data = request.state_.get();
    executorch_mlx_request* handle = nullptr;
    check_status(executorch_mlx_engine_submit(handle_.get(), &o, &handle));
    request.handle_.reset(handle);
    return request;
  }

  // See executorch_mlx_engine_close().
  void close() { check_status(executorch_mlx_engine_close(handle_.get())); }

  // Writes the cache of a prompt to a file, see executorch_mlx_engine_save_prefix(). `adapter` is the name of an
  // adapter, or "".
  void save_prefix(std::span<const int64_t> prompt, const std::string& path, const std::string& adapter = "") {
    check_status(executorch_mlx_engine_save_adapter_prefix(
        handle_.get(), adapter.c_str(), prompt.data(), prompt.size(), path.c_str()));
  }
  // Reads the cache of a prompt from a file. Returns the number of its tokens.
  int64_t load_prefix(const std::string& path) {
    int64_t length = 0;
    check_status(executorch_mlx_engine_load_prefix(handle_.get(), path.c_str(), &length));
    return length;
  }

  // Reads a prompt into the cache, see executorch_mlx_engine_prefill().
  void prefill(std::span<const int64_t> prompt) {
    check_status(executorch_mlx_engine_prefill(handle_.get(), prompt.data(), prompt.size()));
  }
  // Copies the cache of a conversation to another row, see executorch_mlx_engine_clone().
  void clone(std::span<const int64_t> ids) {
    check_status(executorch_mlx_engine_clone(handle_.get(), ids.data(), ids.size()));
  }
  // Returns the logits after the last token of a prompt, see executorch_mlx_engine_logits().
  std::vector<float> logits(std::span<const int64_t> prompt, size_t vocab_size) {
    std::vector<float> result(vocab_size);
    check_status(executorch_mlx_engine_logits(handle_.get(), prompt.data(), prompt.size(), result.data(), vocab_size));
    return result;
  }

  // See executorch_mlx_engine_suspend(), _resume() and _release_memory().
  void suspend() { check_status(executorch_mlx_engine_suspend(handle_.get())); }
  void resume() { check_status(executorch_mlx_engine_resume(handle_.get())); }
  void release_memory() { check_status(executorch_mlx_engine_release_memory(handle_.get())); }

  // See executorch_mlx_engine_load_adapter() and executorch_mlx_engine_unload_adapter().
  void load_adapter(const std::string& name, std::span<const executorch_mlx_adapter_weights> layers) {
    check_status(executorch_mlx_engine_load_adapter(handle_.get(), name.c_str(), layers.data(), layers.size()));
  }
  void unload_adapter(const std::string& name) {
    check_status(executorch_mlx_engine_unload_adapter(handle_.get(), name.c_str()));
  }
  // The names of the adapters, sorted.
  std::vector<std::string> adapters() const {
    std::string list;
    for (size_t size = 0;; list.resize(size)) { // others may load adapters meanwhile
      check_status(executorch_mlx_engine_list_adapters(handle_.get(), list.data(), list.size(), &size));
      if (size <= list.size()) {
        list.resize(size);
        break;
      }
    }
    std::vector<std::string> names;
    for (size_t begin = 0; begin < list.size(); begin += names.back().size() + 1) {
      names.emplace_back(list.c_str() + begin);
    }
    return names;
  }

  // Returns the log probability of each target, see executorch_mlx_engine_score().
  std::vector<Score> score(std::span<const int64_t> prompt, std::span<const int64_t> targets) {
    std::vector<float> logprobs(targets.size());
    const auto is_greedy = std::make_unique<bool[]>(targets.size());
    check_status(executorch_mlx_engine_score(
        handle_.get(), prompt.data(), prompt.size(), targets.data(), targets.size(), logprobs.data(), is_greedy.get()));
    std::vector<Score> scores;
    for (size_t i = 0; i < targets.size(); ++i) {
      scores.push_back({logprobs[i], is_greedy[i]});
    }
    return scores;
  }
  // Returns the `count` most likely tokens in the place of each target, and their log probabilities, see
  // executorch_mlx_engine_score_top().
  std::vector<std::vector<std::pair<int64_t, float>>> score_top(
      std::span<const int64_t> prompt, std::span<const int64_t> targets, size_t count) {
    std::vector<int64_t> tokens(targets.size() * count);
    std::vector<float> logprobs(tokens.size());
    check_status(executorch_mlx_engine_score_top(handle_.get(), prompt.data(), prompt.size(), targets.data(),
        targets.size(), count, tokens.data(), logprobs.data()));
    std::vector<std::vector<std::pair<int64_t, float>>> result(targets.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      result[i / count].emplace_back(tokens[i], logprobs[i]);
    }
    return result;
  }

  executorch_mlx_engine_stats stats() const {
    executorch_mlx_engine_stats stats = {};
    stats.size = sizeof(stats);
    check_status(executorch_mlx_engine_get_stats(handle_.get(), &stats));
    return stats;
  }

  executorch_mlx_engine* handle() const { return handle_.get(); }

 private:
  struct Free {
    void operator()(executorch_mlx_engine* engine) const { executorch_mlx_engine_free(engine); }
  };
  std::unique_ptr<executorch_mlx_engine, Free> handle_;
};

} // namespace executorch_mlx
