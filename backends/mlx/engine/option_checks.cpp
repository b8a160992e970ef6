#include "option_checks.h"

#include <cmath>
#include <string_view>

#include "check.h"

namespace executorch_mlx::engine {

namespace {

// The option of the export that gives a program a parameter, for messages.
const char* remedy(std::string_view parameter) {
  return parameter.ends_with("_penalty") ? "; export it with --penalties N"
      : parameter == "logit_bias"        ? "; export it with --logit-bias K"
      : parameter == "allowed_tokens"    ? "; export it with --allowed-tokens"
      : parameter == "logprobs"          ? "; export it with --logprobs K"
      : parameter == "seed"              ? "; export it without --unseeded"
                                         : "";
}

void check_token(const char* argument, int64_t id, int64_t vocab_size) {
  check_argument(0 <= id && id < vocab_size, argument, ": id ", id, " is outside the vocabulary [0, ", vocab_size, ")");
}

void check_stop_conditions(const LlmProgram& program, const RequestOptions& options) {
  check_argument(options.max_new_tokens >= 0, "max_new_tokens: got ", options.max_new_tokens, ", expected at least 0");
  check_argument(options.min_new_tokens >= 0, "min_new_tokens: got ", options.min_new_tokens, ", expected at least 0");
  check_argument(options.max_new_tokens == 0 || options.min_new_tokens <= options.max_new_tokens,
      "min_new_tokens: got ", options.min_new_tokens, ", expected at most max_new_tokens, which is ",
      options.max_new_tokens);
  for (const int64_t id : options.stop_ids) {
    check_token("stop_ids", id, program.metadata().vocab_size);
  }
  check_argument(options.stop.empty() || program.has_token_bytes(),
      "stop: the program has no token bytes, which stop strings need");
  for (const std::string& stop : options.stop) {
    check_argument(!stop.empty(), "stop: got an empty string, expected at least one character");
  }
}

void check_values(const LlmMetadata& meta, const SamplingParameters& s) {
  const auto check_finite = [](const char* name, float value) {
    check_argument(std::isfinite(value), name, ": got ", value, ", expected a finite number");
  };
  check_finite("temperature", s.temperature);
  check_finite("top_p", s.top_p);
  check_finite("min_p", s.min_p);
  check_finite("presence_penalty", s.presence_penalty);
  check_finite("frequency_penalty", s.frequency_penalty);
  check_argument(std::isfinite(s.repetition_penalty) && s.repetition_penalty > 0, "repetition_penalty: got ",
      s.repetition_penalty, ", expected a finite number greater than 0");
  for (const auto& [token, value] : s.logit_bias) {
    check_token("logit_bias", token, meta.vocab_size);
    check_argument(!std::isnan(value), "logit_bias: got NaN for id ", token, ", expected a number");
  }
}

// Checks that the head accepts all parameters that the request enables, or that the program returns logits, so that the
// host can sample.
void check_supported(const LlmProgram& program, const RequestOptions& options) {
  const LlmMetadata& meta = program.metadata();
  if (!meta.has_head) {
    return;
  }
  const char* unsupported = program.unsupported_parameter(options);
  if (unsupported == nullptr || meta.has_logits) {
    return;
  }
  const auto check_at_most = [&](const char* name, auto got, int64_t most) {
    check_argument(most == 0 || std::string_view(unsupported) != name, name, ": got ", got, ", expected at most ", most,
        ", the number that the program was exported with");
  };
  check_at_most("logit_bias", str(options.sampling.logit_bias.size(), " tokens"), meta.logit_bias);
  check_at_most("logprobs", options.logprobs, meta.logprobs);
  check_argument(std::string_view(unsupported) != "min_new_tokens",
      "min_new_tokens: the program was exported without allowed_tokens, which prevents stop ids; export it with "
      "--allowed-tokens");
  check_argument(false, unsupported, ": the program was exported without this parameter", remedy(unsupported));
}

} // namespace

void check_prompt(const LlmMetadata& metadata, std::span<const int64_t> prompt, const char* argument) {
  check_argument(!prompt.empty(), argument, ": got 0 tokens, expected at least 1");
  check_argument(static_cast<int64_t>(prompt.size()) <= metadata.max_context_len, argument, ": got ", prompt.size(),
      " tokens, expected at most ", metadata.max_context_len, " (the context of the program)");
  for (const int64_t id : prompt) {
    check_token(argument, id, metadata.vocab_size);
  }
}

void check_options(const LlmProgram& program, const RequestOptions& options) {
  check_prompt(program.metadata(), options.prompt);
  check_samples(program.metadata().speech, options.samples ? *options.samples : std::vector<float>());
  check_pictures(program.metadata(), options);
  const bool has_timestamps = program.metadata().speech.timestamp_begin >= 0;
  check_argument(!options.timestamps || has_timestamps, "timestamps: the model has no timestamp tokens");
  check_stop_conditions(program, options);
  check_values(program.metadata(), options.sampling);
  check_argument(options.logprobs >= -1, "logprobs: got ", options.logprobs, ", expected at least -1");
  check_argument(options.draft >= -1, "draft: got ", options.draft, ", expected at least -1");
  check_supported(program, options);
}

} // namespace executorch_mlx::engine
