// The C API. No exception leaves this file.
#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/executorch_mlx.h>
#pragma GCC visibility pop
#include <executorch_mlx/delegate.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>

#include "c_api.h"
#include "check.h"
#include "draft_model.h"
#include "fork_check.h"
#include "llm_program.h"
#include "option_checks.h"
#include "request.h"
#include "row_state.h"
#include "scheduler.h"
#include "scoring.h"

using namespace executorch_mlx::engine;

namespace {

// Exists as long as its model or its engine.
struct Programs {
  std::shared_ptr<LlmProgram> program; // requests that still exist keep it
  std::unique_ptr<LlmProgram> draft; // null: no draft model
  std::atomic<bool> has_engine = false;
};

} // namespace

struct executorch_mlx_model {
  const std::shared_ptr<Programs> programs = std::make_shared<Programs>();
};

struct executorch_mlx_engine {
  std::shared_ptr<Programs> programs;
  std::unique_ptr<Scheduler> scheduler;
};

struct executorch_mlx_request {
  std::shared_ptr<LlmProgram> program; // outlives the request
  std::shared_ptr<Request> request;
  std::thread::id engine_thread; // which runs the callbacks

  bool is_on_engine_thread() const { return std::this_thread::get_id() == engine_thread; }
};

namespace {

thread_local std::string last_error;

} // namespace

executorch_mlx_status executorch_mlx::engine::report(executorch_mlx_status status, const char* message) {
  last_error = message;
  return status;
}

namespace {

void check_language_model(const LlmProgram& program, const char* function) {
  check_argument(!program.metadata().speech.is_speech(), function, ": the program is a speech model");
}

// Returns `*given` with the default values for the fields that its header does not have.
template <typename T>
T read_struct(const T* given, const T& defaults) {
  T result = defaults;
  if (given != nullptr) {
    check_argument(given->size >= sizeof(size_t), "options: got size ", given->size, ", expected that of the struct");
    std::memcpy(&result, given, std::min(given->size, sizeof(T)));
  }
  return result;
}

// Fills the fields that the caller's header has.
template <typename T>
void write_struct(T* out, T value) {
  value.size = out->size;
  std::memcpy(out, &value, std::min(out->size, sizeof(T)));
}

// Checks the size of an array, before a pointer to its end is computed. A negative number, for example, becomes a size
// that no array can have.
template <typename T>
void check_array(const T* data, size_t count, const char* argument) {
  check_argument(data != nullptr || count == 0, argument, ": got null, expected ", count, " values");
  constexpr size_t kMost = PTRDIFF_MAX / sizeof(T);
  check_argument(count <= kMost, argument, ": got ", count, " values, expected at most ", kMost);
}

template <typename T>
std::vector<T> read_array(const T* data, size_t count, const char* argument) {
  check_array(data, count, argument);
  return {data, data + count};
}

std::vector<int64_t> read_prompt(const executorch_mlx_engine& engine, const int64_t* prompt, size_t length) {
  auto ids = read_array(prompt, length, "prompt");
  check_prompt(engine.programs->program->metadata(), ids);
  check_not_forked();
  return ids;
}

void wait_for_scores(executorch_mlx_engine& engine, const int64_t* prompt, size_t prompt_length, const int64_t* targets,
    size_t target_count, const Scores& scores, const char* function) {
  check_argument(!engine.scheduler->is_on_thread(), "engine: a callback must not wait for it");
  const auto request =
      submit_score(*engine.programs->program, *engine.scheduler, read_array(prompt, prompt_length, "prompt"),
          read_array(targets, target_count, "targets"), scores, nullptr, function);
  engine.scheduler->wait(*request);
}

std::shared_ptr<const Adapter> find_adapter(executorch_mlx_engine& engine, const char* name) {
  return engine.scheduler->adapters().find(name == nullptr ? "" : name);
}

Picture read_picture(const executorch_mlx_picture& p) {
  Picture result;
  for (const executorch_mlx_array& array : read_array(p.inputs, p.input_count, "pictures")) {
    constexpr size_t kMostBytes = size_t{1} << 30;
    const bool is_float = array.dtype == EXECUTORCH_MLX_FLOAT32;
    check_argument(is_float || array.dtype == EXECUTORCH_MLX_INT64, "pictures: got dtype ", array.dtype,
        ", expected float32 or int64");
    check_argument(0 <= array.rank && array.rank <= EXECUTORCH_MLX_MAX_RANK, "pictures: got rank ", array.rank);
    Picture::Input& input = result.inputs.emplace_back();
    input.type = is_float ? executorch::aten::ScalarType::Float : executorch::aten::ScalarType::Long;
    size_t bytes = is_float ? sizeof(float) : sizeof(int64_t);
    for (const int64_t size : std::span(array.shape, static_cast<size_t>(array.rank))) {
      check_argument(0 < size && static_cast<size_t>(size) <= kMostBytes / bytes, "pictures: got an array of size ",
          size, ", expected at most 1 GiB");
      bytes *= static_cast<size_t>(size);
      input.sizes.push_back(static_cast<executorch::aten::SizesType>(size));
    }
    input.data = read_array(static_cast<const char*>(array.data), bytes, "pictures");
  }
  result.hash = p.hash;
  result.position = static_cast<int64_t>(p.position);
  result.rows = read_array(p.rows, p.length, "pictures");
  result.rope_positions = read_array(p.rope_positions, p.rope_positions == nullptr ? 0 : 3 * p.length, "pictures");
  result.rope_length = p.rope_length;
  return result;
}

RequestOptions read_options(const executorch_mlx_request_options* given) {
  check_not_null(given, "options");
  const auto o = read_struct<executorch_mlx_request_options>(given, EXECUTORCH_MLX_REQUEST_OPTIONS);
  RequestOptions result;
  result.prompt = read_array(o.prompt, o.prompt_length, "prompt");
  result.sampling = {.temperature = o.temperature,
      .top_p = o.top_p,
      .top_k = o.top_k,
      .min_p = o.min_p,
      .repetition_penalty = o.repetition_penalty,
      .presence_penalty = o.presence_penalty,
      .frequency_penalty = o.frequency_penalty};
  const auto tokens = read_array(o.bias_tokens, o.bias_count, "bias_tokens");
  const auto values = read_array(o.bias_values, o.bias_count, "bias_values");
  for (size_t i = 0; i < tokens.size(); ++i) {
    result.sampling.logit_bias.emplace_back(tokens[i], values[i]);
  }
  if (o.has_seed) {
    result.seed = o.seed;
  }
  result.allowed_tokens = o.allowed_tokens;
  result.max_new_tokens = o.max_new_tokens;
  result.min_new_tokens = o.min_new_tokens;
  result.stop_ids = read_array(o.stop_ids, o.stop_id_count, "stop_ids");
  result.ignore_eos = o.ignore_eos;
  for (const char* stop : read_array(o.stop, o.stop_count, "stop")) {
    check_not_null(stop, "stop");
    result.stop.emplace_back(stop);
  }
  result.logprobs = o.logprobs;
  result.priority = o.priority;
  result.draft = o.draft;
  if (o.sample_count > 0) {
    result.samples = std::make_shared<const std::vector<float>>(read_array(o.samples, o.sample_count, "samples"));
  }
  if (o.picture_count > 0) {
    auto pictures = std::make_shared<std::vector<Picture>>();
    for (const executorch_mlx_picture& picture : read_array(o.pictures, o.picture_count, "pictures")) {
      pictures->push_back(read_picture(picture));
    }
    result.pictures = std::move(pictures);
  }
  result.timestamps = o.timestamps;
  result.allow_suppressed = o.allow_suppressed;
  result.on_event = o.on_event;
  result.user_data = o.user_data;
  return result;
}

} // namespace

extern "C" {

const char* executorch_mlx_last_error(void) { return last_error.c_str(); }

executorch_mlx_status executorch_mlx_model_load(
    const char* path, const executorch_mlx_load_options* options, executorch_mlx_model** model) {
  return guarded([&] {
    check_not_null(path, "path");
    check_not_null(model, "model");
    auto o = read_struct<executorch_mlx_load_options>(options, EXECUTORCH_MLX_LOAD_OPTIONS);
    auto result = std::make_unique<executorch_mlx_model>();
    result->programs->program = std::make_shared<LlmProgram>(path, o);
    if (o.draft != nullptr) {
      o.profile = false;
      o.on_progress = nullptr;
      result->programs->draft = std::make_unique<LlmProgram>(o.draft, o);
      check_draft(*result->programs->program, *result->programs->draft);
    }
    *model = result.release();
  });
}

void executorch_mlx_model_free(executorch_mlx_model* model) {
  if (model != nullptr && !executorch_mlx_is_forked()) {
    delete model;
  }
}

executorch_mlx_status executorch_mlx_model_get_int(
    const executorch_mlx_model* model, const char* name, int64_t* value) {
  return guarded([&] {
    check_not_null(model, "model");
    check_not_null(name, "name");
    check_not_null(value, "value");
    const LlmMetadata& meta = model->programs->program->metadata();
    const std::string key = name;
    const auto found = key == "has_head" ? std::optional<int64_t>(meta.has_head)
        : key == "has_logits"            ? std::optional<int64_t>(meta.has_logits)
        : key == "has_verify"            ? std::optional<int64_t>(meta.has_verify)
                                         : model->programs->program->metadata_reader().find_integer(key);
    check(found.has_value(), EXECUTORCH_MLX_NOT_FOUND, "name: the program has no integer ", key);
    *value = *found;
  });
}

executorch_mlx_status executorch_mlx_model_get_data(
    const executorch_mlx_model* model, const char* name, const void** data, size_t* size) {
  return guarded([&] {
    check_not_null(model, "model");
    check_not_null(name, "name");
    check_not_null(data, "data");
    check_not_null(size, "size");
    const auto& eos = model->programs->program->metadata().eos_ids;
    const auto found = std::string(name) == "get_eos_ids"
        ? std::span(reinterpret_cast<const uint8_t*>(eos.data()), eos.size() * sizeof(int64_t))
        : model->programs->program->metadata_reader().find_bytes(name);
    check(found.has_value(), EXECUTORCH_MLX_NOT_FOUND, "name: the program has no data ", name);
    *data = found->data();
    *size = found->size();
  });
}

executorch_mlx_status executorch_mlx_model_set_token_bytes(
    executorch_mlx_model* model, const void* bytes, const int64_t* offsets, size_t count) {
  return guarded([&] {
    check_not_null(model, "model");
    check_not_null(offsets, "offsets");
    check_array(offsets, count, "offsets");
    check_argument(!model->programs->has_engine, "model: it has an engine already");
    check_argument(bytes != nullptr || offsets[count] == 0, "bytes: got null");
    check_argument(offsets[count] >= 0, "offsets: expected ascending values from 0 on");
    const auto size = static_cast<size_t>(offsets[count]);
    model->programs->program->set_token_bytes({static_cast<const uint8_t*>(bytes), size}, {offsets, count + 1});
  });
}

executorch_mlx_status executorch_mlx_model_write_profile(executorch_mlx_model* model, const char* path) {
  return guarded([&] {
    check_not_null(model, "model");
    check_not_null(path, "path");
    model->programs->program->write_profile(path);
  });
}

executorch_mlx_status executorch_mlx_engine_create(
    executorch_mlx_model* model, const executorch_mlx_engine_options* options, executorch_mlx_engine** engine) {
  return guarded([&] {
    check_not_null(model, "model");
    check_not_null(engine, "engine");
    const auto o = read_struct<executorch_mlx_engine_options>(options, EXECUTORCH_MLX_ENGINE_OPTIONS);
    check_argument(o.queue_limit >= 0, "queue_limit: got ", o.queue_limit, ", expected at least 0");
    check_argument(o.chunk >= 0, "chunk: got ", o.chunk, ", expected at least 0");
    check_argument(o.chunk_seconds >= 0, "chunk_seconds: got ", o.chunk_seconds, ", expected at least 0");
    check_argument(-1 <= o.overlap && o.overlap <= 1, "overlap: got ", o.overlap, ", expected -1, 0 or 1");
    check_argument(!model->programs->has_engine.exchange(true), "model: it has an engine already");
    try {
      *engine = new executorch_mlx_engine{
          model->programs, std::make_unique<Scheduler>(*model->programs->program, model->programs->draft.get(), o)};
    } catch (...) {
      model->programs->has_engine = false;
      throw;
    }
  });
}

executorch_mlx_status executorch_mlx_engine_close(executorch_mlx_engine* engine) {
  return guarded([&] {
    if (engine != nullptr && !executorch_mlx_is_forked()) {
      check_argument(!engine->scheduler->is_on_thread(), "engine: a callback must not wait for its end");
      engine->scheduler->close();
    }
  });
}

void executorch_mlx_engine_free(executorch_mlx_engine* engine) {
  if (engine != nullptr && !executorch_mlx_is_forked()) {
    if (executorch_mlx_engine_close(engine) != EXECUTORCH_MLX_OK) { // callbacks may use the engine until then
      return;
    }
    engine->programs->has_engine = false;
    delete engine;
  }
}

executorch_mlx_status executorch_mlx_engine_get_stats(
    executorch_mlx_engine* engine, executorch_mlx_engine_stats* stats) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(stats, "stats");
    write_struct(stats, engine->scheduler->stats());
  });
}

executorch_mlx_status executorch_mlx_engine_save_prefix(
    executorch_mlx_engine* engine, const int64_t* prompt, size_t length, const char* path) {
  return executorch_mlx_engine_save_adapter_prefix(engine, nullptr, prompt, length, path);
}

executorch_mlx_status executorch_mlx_engine_save_adapter_prefix(
    executorch_mlx_engine* engine, const char* adapter, const int64_t* prompt, size_t length, const char* path) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(path, "path");
    const LlmProgram& program = *engine->programs->program;
    check_language_model(program, "save_prefix");
    auto ids = read_array(prompt, length, "prompt");
    check_prompt(program.metadata(), ids);
    check_not_forked();
    auto found = find_adapter(*engine, adapter);
    RowWriter writer(program, path, found.get()); // on this thread, because it may read the whole file of the program
    engine->scheduler->run(std::move(ids), std::move(found), [&](Row& row) { return writer.write_next(row); });
  });
}

executorch_mlx_status executorch_mlx_engine_load_prefix(
    executorch_mlx_engine* engine, const char* path, int64_t* length) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(path, "path");
    check_language_model(*engine->programs->program, "load_prefix");
    check_not_forked();
    // Before a row is given up for it.
    RowReader reader(*engine->programs->program, path, engine->scheduler->adapters());
    std::optional<uint64_t> resets;
    engine->scheduler->run({}, reader.adapter(), [&](Row& row) {
      const uint64_t now = engine->scheduler->resets();
      check(resets.value_or(now) == now, EXECUTORCH_MLX_FAILED, "prefix: another call has failed and reset the row");
      resets = now;
      const bool has_more = reader.read_next(row);
      if (!has_more && length != nullptr) {
        *length = static_cast<int64_t>(row.ids.size());
      }
      return has_more;
    });
  });
}

executorch_mlx_status executorch_mlx_engine_prefill(
    executorch_mlx_engine* engine, const int64_t* prompt, size_t length) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_language_model(*engine->programs->program, "prefill");
    engine->scheduler->run(read_prompt(*engine, prompt, length), nullptr, [](Row&) { return false; });
  });
}

executorch_mlx_status executorch_mlx_engine_clone(executorch_mlx_engine* engine, const int64_t* ids, size_t length) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_language_model(*engine->programs->program, "clone");
    engine->scheduler->clone(read_prompt(*engine, ids, length));
  });
}

executorch_mlx_status executorch_mlx_engine_logits(
    executorch_mlx_engine* engine, const int64_t* prompt, size_t length, float* logits, size_t count) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(logits, "logits");
    LlmProgram& program = *engine->programs->program;
    check_language_model(program, "logits");
    const auto vocab_size = static_cast<size_t>(program.metadata().vocab_size);
    check_argument(program.metadata().has_logits, "logits: the program does not return logits");
    check_argument(
        count == vocab_size, "count: got ", count, ", expected ", vocab_size, ", the size of the vocabulary");
    auto ids = read_prompt(*engine, prompt, length);
    const std::vector<int64_t> last = {ids.back()};
    ids.pop_back();
    engine->scheduler->run(std::move(ids), nullptr, [&](Row& row) {
      const RowTask task = {.tokens = last, .position = static_cast<int64_t>(row.ids.size()), .row = row.index};
      row.expect(task);
      const auto result = program.logits({&task, 1});
      row.append(last);
      std::copy(result[0].begin(), result[0].end(), logits);
      return false;
    });
  });
}

executorch_mlx_status executorch_mlx_engine_suspend(executorch_mlx_engine* engine) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_forked();
    engine->scheduler->suspend();
  });
}

executorch_mlx_status executorch_mlx_engine_resume(executorch_mlx_engine* engine) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_forked();
    engine->scheduler->resume();
  });
}

executorch_mlx_status executorch_mlx_engine_release_memory(executorch_mlx_engine* engine) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_forked();
    engine->scheduler->release_memory();
  });
}

executorch_mlx_status executorch_mlx_engine_load_adapter(
    executorch_mlx_engine* engine, const char* name, const executorch_mlx_adapter_weights* layers, size_t count) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_argument(name != nullptr && *name != '\0', "adapter: got no name");
    check_array(layers, count, "adapter");
    Adapters& adapters = engine->scheduler->adapters();
    auto weights = adapters.read({layers, count});
    engine->scheduler->call_between_steps([&] { adapters.load(name, std::move(weights)); });
  });
}

executorch_mlx_status executorch_mlx_engine_unload_adapter(executorch_mlx_engine* engine, const char* name) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_argument(name != nullptr && *name != '\0', "adapter: got no name");
    check_not_forked();
    engine->scheduler->adapters().unload(name);
  });
}

executorch_mlx_status executorch_mlx_engine_list_adapters(
    executorch_mlx_engine* engine, char* names, size_t capacity, size_t* size) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(size, "size");
    check_array(names, capacity, "names");
    check_not_forked();
    std::string list;
    for (const std::string& name : engine->scheduler->adapters().names()) {
      list.append(name).push_back('\0');
    }
    *size = list.size();
    if (list.size() <= capacity) {
      list.copy(names, list.size());
    }
  });
}

executorch_mlx_status executorch_mlx_engine_score(executorch_mlx_engine* engine, const int64_t* prompt,
    size_t prompt_length, const int64_t* targets, size_t target_count, float* logprobs, bool* is_greedy) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(logprobs, "logprobs");
    wait_for_scores(
        *engine, prompt, prompt_length, targets, target_count, {.logprobs = logprobs, .is_greedy = is_greedy}, "score");
  });
}

executorch_mlx_status executorch_mlx_engine_score_top(executorch_mlx_engine* engine, const int64_t* prompt,
    size_t prompt_length, const int64_t* targets, size_t target_count, size_t top_count, int64_t* top_tokens,
    float* top_logprobs) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(top_tokens, "top_tokens");
    check_not_null(top_logprobs, "top_logprobs");
    wait_for_scores(*engine, prompt, prompt_length, targets, target_count,
        {.top_count = top_count, .top_tokens = top_tokens, .top_logprobs = top_logprobs}, "score_top");
  });
}

executorch_mlx_status executorch_mlx_engine_submit_score(
    executorch_mlx_engine* engine, const executorch_mlx_score_options* options, executorch_mlx_request** request) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(options, "options");
    check_not_null(request, "request");
    const auto o = read_struct<executorch_mlx_score_options>(options, EXECUTORCH_MLX_SCORE_OPTIONS);
    const Scores scores = {.logprobs = o.logprobs,
        .is_greedy = o.is_greedy,
        .top_count = o.top_count,
        .top_tokens = o.top_tokens,
        .top_logprobs = o.top_logprobs};
    const auto& program = engine->programs->program;
    *request = new executorch_mlx_request{program,
        submit_score(*program, *engine->scheduler, read_array(o.prompt, o.prompt_length, "prompt"),
            read_array(o.targets, o.target_count, "targets"), scores, find_adapter(*engine, o.adapter), "submit_score"),
        engine->scheduler->thread_id()};
  });
}

executorch_mlx_status executorch_mlx_engine_submit(
    executorch_mlx_engine* engine, const executorch_mlx_request_options* options, executorch_mlx_request** request) {
  return guarded([&] {
    check_not_null(engine, "engine");
    check_not_null(request, "request");
    const auto& program = engine->programs->program;
    RequestOptions o = read_options(options);
    check_options(*program, o);
    auto adapter = find_adapter(
        *engine, read_struct<executorch_mlx_request_options>(options, EXECUTORCH_MLX_REQUEST_OPTIONS).adapter);
    std::unique_ptr<executorch_mlx_request> result(new executorch_mlx_request{
        program, std::make_shared<Request>(*program, std::move(o)), engine->scheduler->thread_id()});
    result->request->adapter = std::move(adapter);
    // Callbacks may run before this function returns. They can already use the request.
    *request = result.get();
    try {
      engine->scheduler->submit(result->request);
    } catch (...) {
      *request = nullptr;
      throw;
    }
    result.release();
  });
}

void executorch_mlx_request_cancel(executorch_mlx_request* request) {
  if (request != nullptr) {
    request->request->cancel();
  }
}

bool executorch_mlx_request_wait(executorch_mlx_request* request, double seconds) {
  if (request == nullptr || executorch_mlx_is_forked()) {
    return request == nullptr;
  }
  return request->request->wait(request->is_on_engine_thread() ? 0 : seconds);
}

void executorch_mlx_request_get_info(const executorch_mlx_request* request, executorch_mlx_request_info* info) {
  if (request != nullptr && info != nullptr) {
    write_struct(info, request->request->info());
  }
}

const char* executorch_mlx_request_error(const executorch_mlx_request* request) {
  return request == nullptr ? "" : request->request->error();
}

void executorch_mlx_request_free(executorch_mlx_request* request) {
  if (request == nullptr || executorch_mlx_is_forked()) {
    return;
  }
  if (!request->request->wait(0)) {
    request->request->cancel();
    if (request->is_on_engine_thread()) {
      request->request->detach();
    } else {
      request->request->wait(-1);
    }
  }
  delete request;
}

} // extern "C"
