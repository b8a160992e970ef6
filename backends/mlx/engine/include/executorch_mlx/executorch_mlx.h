// The C API of the LLM engine, for C, Swift, Rust, Go and Python. Token ids in, token ids and text out.
//
//   executorch_mlx_model* model;
//   executorch_mlx_engine* engine;
//   executorch_mlx_request* request;
//   executorch_mlx_request_options options = EXECUTORCH_MLX_REQUEST_OPTIONS;
//   options.prompt = ids; options.prompt_length = count; options.on_event = print;
//   executorch_mlx_model_load("model.pte", NULL, &model);
//   executorch_mlx_engine_create(model, NULL, &engine);
//   executorch_mlx_engine_submit(engine, &options, &request);
//   executorch_mlx_request_wait(request, -1);
//
// The engine runs the model on a thread of its own and serves many requests at once. All functions are thread-safe,
// except that nothing may use an object while or after another thread frees it. No function throws.
//
// A process that is forked after this library was loaded lacks the threads of the engine and of MLX. There, functions
// that need them return FAILED, and functions that free an object do nothing.
//
// ABI: fields are only appended to structs. Every struct begins with its size, which the initializer macros set; the
// library reads no field beyond that size, so that a program built with an older header keeps working.
#pragma once

#include <executorch_mlx/array.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct executorch_mlx_model executorch_mlx_model;
typedef struct executorch_mlx_engine executorch_mlx_engine;
typedef struct executorch_mlx_request executorch_mlx_request;

// Every function that can fail returns a status. executorch_mlx_last_error() then has one line about it.
typedef int32_t executorch_mlx_status;
enum {
  EXECUTORCH_MLX_OK = 0,
  EXECUTORCH_MLX_INVALID_ARGUMENT = 1, // the request or the argument is invalid for this program
  EXECUTORCH_MLX_OUT_OF_MEMORY = 2, // the memory limit, or the machine's memory
  EXECUTORCH_MLX_INVALID_PROGRAM = 3, // the file is not a language model of this project
  EXECUTORCH_MLX_FAILED = 4, // a step of the model failed
  EXECUTORCH_MLX_BUSY = 5, // the queue of the engine is full, or no slot is free for an adapter
  EXECUTORCH_MLX_NOT_FOUND = 6, // the file does not exist, or the model has no such value
  EXECUTORCH_MLX_ABORTED = 7, // a callback has ended the load
};

// The message of the last failure on this thread, or "". It begins with the name of the argument and a colon if one
// argument is the cause. Valid until the next failure on this thread.
const char* executorch_mlx_last_error(void);

// Called while a model is loaded, with the part of its weights that is loaded: more than 0 and up to 1. Returning false
// ends the load, which then returns ABORTED.
typedef bool (*executorch_mlx_on_progress)(void* user_data, double part);

// Models --------------------------------------------------------------------------------------------------------

typedef struct {
  size_t size;
  const char* device; // "cpu", "gpu", or NULL for the default
  bool profile; // time every instruction, for executorch_mlx_model_write_profile(); slower
  const char* draft; // path of a program with the same tokenizer that guesses tokens, or NULL; the tokens of answers
                     // do not depend on it. INVALID_ARGUMENT if it does not fit, or if the model has no method verify
  executorch_mlx_on_progress on_progress; // or NULL; for the model, not the draft
  void* user_data; // for on_progress
  bool low_priority; // for work that nobody waits for: the engine and the CPU yield to other threads, by the quality of
                     // service "utility" on Apple's systems and the nice value on Linux
} executorch_mlx_load_options;
#define EXECUTORCH_MLX_LOAD_OPTIONS {sizeof(executorch_mlx_load_options), NULL, false, NULL, NULL, NULL, false}

// The initializers as functions, for Swift, which cannot use the macros.
static inline executorch_mlx_load_options executorch_mlx_default_load_options(void) {
  executorch_mlx_load_options options = EXECUTORCH_MLX_LOAD_OPTIONS;
  return options;
}

// Loads a program that `executorch-mlx export` wrote. `options` may be NULL.
executorch_mlx_status executorch_mlx_model_load(
    const char* path, const executorch_mlx_load_options* options, executorch_mlx_model** model);

// Frees a model. An engine of the model keeps what it needs until it is freed. NULL is allowed.
void executorch_mlx_model_free(executorch_mlx_model* model);

// Reads an integer of the program's metadata: a method name of docs/llm-program.md, such as "get_vocab_size", or
// "has_head", "has_logits", "has_verify" (0 or 1). NOT_FOUND if the program has none.
executorch_mlx_status executorch_mlx_model_get_int(const executorch_mlx_model* model, const char* name, int64_t* value);

// Reads an array of the metadata: "get_eos_ids" (int64), "token_bytes", "tokenizer_json", "tokenizer_config" (bytes),
// "token_offsets" (int64). `data` is valid as long as the model; `size` is in bytes.
executorch_mlx_status executorch_mlx_model_get_data(
    const executorch_mlx_model* model, const char* name, const void** data, size_t* size);

// Gives the bytes of `count` tokens to a program that has none. The bytes of token i begin at bytes[offsets[i]] and end
// before bytes[offsets[i + 1]]. `offsets` has count + 1 elements. Token ids from `count` on have no text. Copies both
// arrays. Only before the engine is created.
executorch_mlx_status executorch_mlx_model_set_token_bytes(
    executorch_mlx_model* model, const void* bytes, const int64_t* offsets, size_t count);

// Writes the times of all calls since the last profile as an ETDump. Only for a model loaded with `profile`.
executorch_mlx_status executorch_mlx_model_write_profile(executorch_mlx_model* model, const char* path);

// Engines -------------------------------------------------------------------------------------------------------

typedef struct {
  size_t size;
  int64_t queue_limit; // requests that may wait; submit() returns BUSY beyond; 0: no limit
  int64_t chunk; // largest prefill chunk in tokens; 0: the program's, but 512 on a CPU
  double chunk_seconds; // while answers run, a prefill chunk should take about this long; 0: 0.25 s
                        // on a CPU, any time on a GPU; INFINITY: any time
  bool reuse_prompts; // keep the rows of finished requests for prompts that begin like them
  int64_t overlap; // submit a step before the previous one's tokens are read; 0: no, 1: yes, -1: on a GPU
} executorch_mlx_engine_options;
#define EXECUTORCH_MLX_ENGINE_OPTIONS {sizeof(executorch_mlx_engine_options), 0, 0, 0, true, -1}

static inline executorch_mlx_engine_options executorch_mlx_default_engine_options(void) {
  executorch_mlx_engine_options options = EXECUTORCH_MLX_ENGINE_OPTIONS;
  return options;
}

// Creates the engine of a model. A model has one engine at a time. `options` may be NULL.
executorch_mlx_status executorch_mlx_engine_create(
    executorch_mlx_model* model, const executorch_mlx_engine_options* options, executorch_mlx_engine** engine);

// Cancels all requests, and waits for the running step. The engine then only returns its stats: other functions return
// FAILED, also those that other threads have called and that still wait. To free an engine that other threads use,
// close it, wait until their calls have returned, and free it. Not for callbacks. NULL is allowed.
executorch_mlx_status executorch_mlx_engine_close(executorch_mlx_engine* engine);

// Closes the engine and frees it. Requests stay valid until they are freed. In a callback of the engine, does nothing.
void executorch_mlx_engine_free(executorch_mlx_engine* engine);

typedef struct {
  size_t size;
  int64_t running; // requests that have a row
  int64_t waiting; // requests in the queue
  int64_t rows; // rows of the program
  int64_t requests; // requests that have ended; this and the counts below begin when the engine is created
  int64_t failed; // of these, by an error
  int64_t prompt_tokens; // tokens of prompts
  int64_t reused_tokens; // of these, already in the cache
  int64_t generated_tokens;
  int64_t steps; // calls of the decode, verify and logits methods
  int64_t drafted_tokens; // by speculation
  int64_t accepted_tokens; // of these, equal to the drawn token
  double busy_seconds; // time in the model
} executorch_mlx_engine_stats;

// Fills `stats`, whose field `size` the caller has set.
executorch_mlx_status executorch_mlx_engine_get_stats(
    executorch_mlx_engine* engine, executorch_mlx_engine_stats* stats);

// Writes the cache of a prompt to a file. Positions that are not in the cache yet are computed first. load_prefix()
// puts the cache into a row, as if a request with this prompt had just ended. Both do their work between two steps, and
// wait until it is done. load_prefix() refuses a damaged file, and one of another program or format version:
// INVALID_ARGUMENT. save_adapter_prefix() writes the cache of a prompt with the adapter of this name, which has the
// same weights when the file is loaded, under any name; NULL stands for none.
executorch_mlx_status executorch_mlx_engine_save_prefix(
    executorch_mlx_engine* engine, const int64_t* prompt, size_t length, const char* path);
executorch_mlx_status executorch_mlx_engine_save_adapter_prefix(
    executorch_mlx_engine* engine, const char* adapter, const int64_t* prompt, size_t length, const char* path);
executorch_mlx_status executorch_mlx_engine_load_prefix(
    executorch_mlx_engine* engine, const char* path, int64_t* length);

// Reads a prompt into the cache, and waits until it is read. A request whose prompt begins with these tokens then
// begins with the next one, if the engine reuses prompts.
executorch_mlx_status executorch_mlx_engine_prefill(
    executorch_mlx_engine* engine, const int64_t* prompt, size_t length);

// Copies the cache of a conversation, whose tokens so far are `ids`, to another row. Two requests that begin with `ids`
// and go on differently then both find it, at once or one after the other. Tokens that are not in the cache are
// computed first. BUSY if no other row is free; INVALID_ARGUMENT if the program has one row, or keeps state that cannot
// be copied.
executorch_mlx_status executorch_mlx_engine_clone(executorch_mlx_engine* engine, const int64_t* ids, size_t length);

// Writes the logits after the last token of a prompt: `logits` [count], where `count` is the size of the vocabulary.
// Needs a program that returns logits, also beside tokens; else INVALID_ARGUMENT.
executorch_mlx_status executorch_mlx_engine_logits(
    executorch_mlx_engine* engine, const int64_t* prompt, size_t length, float* logits, size_t count);

// Waits for the running step, and starts no other one until resume(): the device has no work then, as iOS and macOS
// require of an app in the background. Requests stay, and can be submitted and cancelled. Both functions may be called
// repeatedly. Not for callbacks.
executorch_mlx_status executorch_mlx_engine_suspend(executorch_mlx_engine* engine);
executorch_mlx_status executorch_mlx_engine_resume(executorch_mlx_engine* engine);

// Frees the memory that the engine can do without, between two steps, also while it is suspended: what only drafts and
// scores need, and the freed memory that MLX keeps. If no request runs, the program is unloaded, too, with its caches
// and its packed copies of weights, unless it has slots for adapters; the next request loads it again, and reads its
// whole prompt. Not for callbacks.
executorch_mlx_status executorch_mlx_engine_release_memory(executorch_mlx_engine* engine);

// The weights of a LoRA adapter for one layer.
typedef struct {
  const char* layer; // its path, one of the lines of the data "adapter_layers" of the model
  size_t rank; // at most the integer "adapter_rank" of the model
  size_t inputs;
  size_t outputs;
  const float* a; // [rank, inputs]
  const float* b; // [outputs, rank], multiplied by the scale of the adapter
} executorch_mlx_adapter_weights;

// Gives an adapter a name, which requests can use from then on. Copies the weights, which the program adds to those of
// its layers, and waits until they are written, between two steps. Layers without weights stay unchanged. If there is
// an adapter of this name, the new one takes its place; requests that were submitted before keep the old one until they
// end. An adapter takes a slot as long as it has a name, or a request that has not ended: BUSY if all of the
// "adapter_slots" are in use. INVALID_ARGUMENT if the weights do not fit the program. Not for callbacks.
executorch_mlx_status executorch_mlx_engine_load_adapter(
    executorch_mlx_engine* engine, const char* name, const executorch_mlx_adapter_weights* layers, size_t count);

// Takes the name away from an adapter. Requests that were submitted before keep the adapter until they end.
executorch_mlx_status executorch_mlx_engine_unload_adapter(executorch_mlx_engine* engine, const char* name);

// Stores the names of the adapters in `names`, each with a 0 at its end, and their size in `size`. If `capacity` is
// less than this size, stores only the size.
executorch_mlx_status executorch_mlx_engine_list_adapters(
    executorch_mlx_engine* engine, char* names, size_t capacity, size_t* size);

// Computes the log probability of each target, given `prompt` and the earlier targets, under the model's own
// distribution (temperature 1, no filters). Writes `logprobs` [target_count] and, unless it is NULL, `is_greedy`
// [target_count]: whether the target is the most likely token. Needs a program with the method verify and logprobs;
// else INVALID_ARGUMENT.
executorch_mlx_status executorch_mlx_engine_score(executorch_mlx_engine* engine, const int64_t* prompt,
    size_t prompt_length, const int64_t* targets, size_t target_count, float* logprobs, bool* is_greedy);

// Like score(), but writes the `top_count` most likely tokens in the place of each target and their log probabilities,
// in descending order: `top_tokens` and `top_logprobs` [target_count, top_count]. `top_count` is at most the number of
// most likely tokens that the program was exported with.
executorch_mlx_status executorch_mlx_engine_score_top(executorch_mlx_engine* engine, const int64_t* prompt,
    size_t prompt_length, const int64_t* targets, size_t target_count, size_t top_count, int64_t* top_tokens,
    float* top_logprobs);

// Requests ------------------------------------------------------------------------------------------------------

typedef enum {
  EXECUTORCH_MLX_RUNNING = 0,
  EXECUTORCH_MLX_STOP = 1, // a stop id was drawn, or a stop string occurred
  EXECUTORCH_MLX_LENGTH = 2, // max_new_tokens
  EXECUTORCH_MLX_CONTEXT = 3, // the row is full
  EXECUTORCH_MLX_CANCELLED = 4,
  EXECUTORCH_MLX_FINISH_ERROR = 5, // see executorch_mlx_request_get_info() and executorch_mlx_request_error()
} executorch_mlx_finish;

// One drawn token, or the end of the answer. Pointers are valid during the call.
typedef struct {
  size_t size;
  // -1 if the answer ends without a new token. A stop id has finish STOP and stop_index -1: it is not part of the
  // answer.
  int64_t token;
  const char* text; // UTF-8, whole characters; a possible beginning of a stop string is held back
  size_t text_length;
  int32_t finish; // executorch_mlx_finish; RUNNING in every event of a request but the last
  int32_t stop_index; // the stop string that ended the answer, or -1
  float logprob; // of the token; only if options.logprobs >= 0
  int64_t top_count; // the most likely tokens: options.logprobs, at most the size of the vocabulary
  const int64_t* top_tokens;
  const float* top_logprobs;
} executorch_mlx_event;

// Called on the engine's thread, for every token and at the end. Returning false cancels the request. Must not call
// functions of the same engine other than executorch_mlx_request_cancel() and executorch_mlx_engine_submit(), which
// returns FAILED while the engine is closed.
typedef bool (*executorch_mlx_on_event)(void* user_data, const executorch_mlx_event* event);

// Selects the tokens that may be drawn next: clears the bits of all other tokens in `mask`. The mask has `words` =
// ceil(V / 32) words, and all its bits are set before the call. Bit v % 32 of mask[v / 32] is token v. `answer` holds
// the tokens of the answer so far (with speculation, followed by draft tokens, of which none is a stop id). Returns
// false to end the request with ERROR: the status is then INVALID_ARGUMENT. A mask that selects no token has the same
// effect. After draft tokens, both only end the draft.
typedef bool (*executorch_mlx_allowed_tokens)(
    void* user_data, const int64_t* answer, size_t answer_length, int32_t* mask, size_t words);

// A picture in a prompt, or a part of one that the model's method vision_encoder takes by itself; or a sound, which the
// method audio_encoder takes. The result has a row for each embedding. These replace the embeddings of the tokens at
// the positions of the picture in the prompt.
typedef struct {
  const executorch_mlx_array* inputs; // of the method: FLOAT32 or INT64
  size_t input_count;
  uint64_t hash; // of the content: prompts whose pictures have equal hashes share their caches
  size_t position; // of its first token in the prompt
  const int64_t* rows; // [length], of the result, for each token; -1: the embedding of the token itself
  size_t length; // in tokens
  const int64_t* rope_positions; // [3, length] from the first token on, for models with three rotary axes; else NULL
  int64_t rope_length; // of such a model: how many rotary positions the picture takes
} executorch_mlx_picture;

typedef struct {
  size_t size;
  const int64_t* prompt;
  size_t prompt_length;

  float temperature; // 0 or less: greedy
  float top_p; // 1: all
  int64_t top_k; // 0: all
  float min_p; // 0: all
  bool has_seed; // false: a random seed
  int64_t seed; // step i draws with seed + i
  float repetition_penalty; // 1: off
  float presence_penalty; // 0: off
  float frequency_penalty; // 0: off
  const int64_t* bias_tokens;
  const float* bias_values;
  size_t bias_count;
  executorch_mlx_allowed_tokens allowed_tokens; // NULL: all

  int64_t max_new_tokens; // 0: until the row is full
  const int64_t* stop_ids; // in addition to the model's
  size_t stop_id_count;
  bool ignore_eos; // do not stop at the model's stop ids
  const char* const* stop; // stop strings, UTF-8, terminated by 0
  size_t stop_count;

  int32_t logprobs; // -1: none; k: the log probability of the token, and the k most likely tokens
  int32_t priority; // requests with a higher priority start first
  int32_t draft; // tokens to draft per step; -1: the engine chooses, 0: none
  executorch_mlx_on_event on_event;
  void* user_data; // for both callbacks

  // For speech models. A request must have samples: sound from one channel, at most "speech_max_samples" values at
  // "speech_sample_rate". Requests with equal samples share the encoder's work.
  const float* samples;
  size_t sample_count;
  bool timestamps; // draw timestamp tokens, by Whisper's rules
  bool allow_suppressed; // no rules for the tokens: tokens that the model suppresses may be drawn too

  // The answer has at least so many tokens. Until then, no stop id is drawn, and stop strings are ordinary text. If
  // there are stop ids, the program must take allowed_tokens or return logits. 0: no minimum.
  int64_t min_new_tokens;

  const char* adapter; // the name of a LoRA adapter, or NULL

  // Of a vision-language model, in the order of their positions.
  const executorch_mlx_picture* pictures;
  size_t picture_count;
} executorch_mlx_request_options;
#define EXECUTORCH_MLX_REQUEST_OPTIONS                                                                              \
  {sizeof(executorch_mlx_request_options), NULL, 0, 0, 1, 0, 0, false, 0, 1, 0, 0, NULL, NULL, 0, NULL, 0, NULL, 0, \
      false, NULL, 0, -1, 0, -1, NULL, NULL, NULL, 0, false, false, 0, NULL, NULL, 0}

static inline executorch_mlx_request_options executorch_mlx_default_request_options(void) {
  executorch_mlx_request_options options = EXECUTORCH_MLX_REQUEST_OPTIONS;
  return options;
}

// Checks a request and queues it. Copies everything that `options` points to. Free the request with
// executorch_mlx_request_free().
executorch_mlx_status executorch_mlx_engine_submit(
    executorch_mlx_engine* engine, const executorch_mlx_request_options* options, executorch_mlx_request** request);

// What engine_submit_score() computes: like score(), `logprobs` and, unless it is NULL, `is_greedy`; or like
// score_top(), `top_tokens` and `top_logprobs`. The others are NULL. The arrays must stay valid until the request has
// ended.
typedef struct {
  size_t size;
  const int64_t* prompt;
  size_t prompt_length;
  const int64_t* targets;
  size_t target_count;
  size_t top_count;
  float* logprobs; // [target_count]
  bool* is_greedy; // [target_count]
  int64_t* top_tokens; // [target_count, top_count]
  float* top_logprobs; // [target_count, top_count]
  const char* adapter; // the name of a LoRA adapter, or NULL
} executorch_mlx_score_options;
#define EXECUTORCH_MLX_SCORE_OPTIONS \
  {sizeof(executorch_mlx_score_options), NULL, 0, NULL, 0, 0, NULL, NULL, NULL, NULL, NULL}

// Checks a request for scores and queues it. Between the calls of the program, which score up to 64 tokens each, other
// requests have their turns, and the request can be cancelled. It ends with LENGTH, and has no events. Copies `prompt`
// and `targets`. Free the request with executorch_mlx_request_free().
executorch_mlx_status executorch_mlx_engine_submit_score(
    executorch_mlx_engine* engine, const executorch_mlx_score_options* options, executorch_mlx_request** request);

// Ends a request before its next step. Its last event follows. May be called from any thread, callback or signal
// handler.
void executorch_mlx_request_cancel(executorch_mlx_request* request);

// Waits for the last event of a request, at most `seconds`; negative: without limit. Returns whether it has ended. In a
// callback of its engine, returns at once.
bool executorch_mlx_request_wait(executorch_mlx_request* request, double seconds);

typedef struct {
  size_t size;
  int32_t finish; // executorch_mlx_finish
  int32_t status; // executorch_mlx_status; not OK if finish is ERROR
  bool has_seed; // false if the program takes no seed
  int64_t seed; // of the first draw
  int64_t stop_id; // the stop id that ended the answer, or -1
  int64_t prompt_tokens;
  int64_t reused_tokens; // of the prompt, already in the cache
  int64_t generated_tokens; // including a stop id
  int64_t drafted_tokens;
  int64_t accepted_tokens;
  double queue_seconds; // from submit to the first chunk
  double prompt_seconds; // from the first chunk to the first token
  double generation_seconds; // from the first token to the last
  int64_t calls; // calls that drew its tokens: without speculation, one for each token
} executorch_mlx_request_info;

// Fills `info`, whose field `size` the caller has set. Complete from the last event on, also within its callback.
void executorch_mlx_request_get_info(const executorch_mlx_request* request, executorch_mlx_request_info* info);

// The message if the request ended with ERROR, else "". Valid as long as the request.
const char* executorch_mlx_request_error(const executorch_mlx_request* request);

// Cancels a request that still runs, waits for its last event unless called from a callback, and frees it. NULL is
// allowed.
void executorch_mlx_request_free(executorch_mlx_request* request);

#ifdef __cplusplus
}
#endif
