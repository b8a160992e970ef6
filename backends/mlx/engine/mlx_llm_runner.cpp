// The executable mlx_llm_runner. command_line.cpp defines its options.
#include <executorch_mlx/engine.h>
#include <executorch_mlx/memory.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "command_line.h"
#include "json_lines.h"
#include "str.h"

namespace executorch_mlx::engine {

namespace {

// Exit status.
constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kInvalid = 2;
constexpr int kInterrupted = 128 + SIGINT;

constexpr double kPollSeconds = 0.1; // how often an answer looks for Ctrl-C if it has no events

std::atomic<bool> interrupted = false;

// The first Ctrl-C ends the answer after the current step, the second one ends the process.
void on_interrupt(int) {
  std::signal(SIGINT, SIG_DFL);
  interrupted = true;
}

void print_text(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void print_timings(const Answer& answer, const std::string& label) {
  const executorch_mlx_request_info& i = answer.info;
  std::fprintf(stderr, "%sprompt: %lld tokens in %.4f s, %.2f tokens/s\n", label.c_str(),
      static_cast<long long>(i.prompt_tokens), i.prompt_seconds, answer.prompt_tokens_per_second());
  std::fprintf(stderr, "%stime to first token: %.4f s\n", label.c_str(), i.queue_seconds + i.prompt_seconds);
  std::fprintf(stderr, "%sdecode: %lld tokens in %.4f s, %.2f tokens/s\n", label.c_str(),
      static_cast<long long>(i.generated_tokens > 0 ? i.generated_tokens - 1 : 0), i.generation_seconds,
      answer.decode_tokens_per_second());
  if (i.drafted_tokens > 0) {
    std::fprintf(stderr, "%sspeculation: %lld of %lld tokens accepted, %.2f tokens per call\n", label.c_str(),
        static_cast<long long>(i.accepted_tokens), static_cast<long long>(i.drafted_tokens),
        static_cast<double>(i.generated_tokens) / static_cast<double>(i.calls));
  }
  std::fprintf(stderr, "%sfinish: %s\n", label.c_str(), to_string(i.finish));
}

std::string joined(const std::vector<int64_t>& ids) {
  std::string text;
  for (const int64_t id : ids) {
    text += str(text.empty() ? "" : " ", id);
  }
  return text;
}

// Collects answers, and prints them as text, token ids or JSON lines. JSON lines and a single answer are printed token
// by token. Of several answers, each is printed when it is complete, because their tokens are drawn interleaved.
class Printer {
 public:
  explicit Printer(const RunnerOptions& options) : options_(options), answers_(options.prompts.size()) {}

  // Called by the engine's thread.
  void take(size_t index, const Event& event) {
    Answer& answer = answers_[index];
    answer.text += event.text;
    if (event.stop_index >= 0) {
      answer.stop_string = options_.request.stop[event.stop_index];
    }
    const bool is_stop_id = event.finish == EXECUTORCH_MLX_STOP && event.stop_index < 0;
    if (event.token >= 0 && !is_stop_id) {
      answer.tokens.push_back(event.token);
      if (options_.json) {
        print_text(token_line(index, event.token, event.text));
      } else if (options_.ids && answers_.size() == 1) {
        print_text(std::to_string(event.token) + "\n");
      }
    }
    if (!options_.json && !options_.ids && answers_.size() == 1) {
      print_text(event.text);
    }
  }

  void finish(size_t index, const executorch_mlx_request_info& info, double load_seconds) {
    Answer& answer = answers_[index];
    answer.info = info;
    if (options_.json) {
      return print_text(answer_line(index, answer, load_seconds));
    }
    const bool is_alone = answers_.size() == 1;
    const std::string label = is_alone ? "" : str("[", index, "] ");
    if (!is_alone) {
      print_text(label + (options_.ids ? joined(answer.tokens) : answer.text) + "\n");
    } else if (!options_.ids) {
      print_text("\n");
    }
    print_timings(answer, label);
  }

 private:
  const RunnerOptions& options_;
  std::vector<Answer> answers_;
};

void generate_and_print(Engine& engine, const RunnerOptions& options, double load_seconds) {
  Printer printer(options);
  std::vector<Request> requests;
  for (size_t i = 0; i < options.prompts.size(); ++i) {
    requests.push_back(engine.submit(options.prompts[i], options.request, [&printer, i](const Event& event) {
      printer.take(i, event);
      return !interrupted;
    }));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    try {
      while (!requests[i].wait(kPollSeconds)) {
        if (interrupted) {
          requests[i].cancel();
        }
      }
    } catch (const LlmError&) {
      std::fprintf(stderr, "finish: %s\n", to_string(EXECUTORCH_MLX_FINISH_ERROR));
      throw;
    }
    printer.finish(i, requests[i].info(), load_seconds);
  }
  if (!options.json) {
    std::fprintf(stderr, "peak memory: %.1f MB\n", static_cast<double>(peak_resident_bytes()) / 1e6);
  }
}

int run(RunnerOptions options) {
  if (options.memory_limit) {
    executorch_mlx_set_memory_limit(*options.memory_limit);
  }
  const auto begin = std::chrono::steady_clock::now();
  Model model(options.model, options.device, !options.profile.empty(), options.draft_model);
  const double load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!options.ids && !options.json && model.get_data("token_offsets").empty()) {
    throw LlmArgumentError(
        EXECUTORCH_MLX_INVALID_ARGUMENT, options.model + ": the program has no token bytes, use --ids");
  }
  executorch_mlx_engine_options engine_options = EXECUTORCH_MLX_ENGINE_OPTIONS;
  engine_options.reuse_prompts = false; // so that --repeat repeats the prefill
  Engine engine(model, engine_options);
  auto& seed = options.request.seed;
  // A draw needs a seed if the head takes one, or if there is no head and the host draws.
  if (!seed && (model.get_int("sampling_seed").value_or(0) || !*model.get_int("has_head"))) {
    seed = static_cast<int64_t>((uint64_t{std::random_device()()} << 31) ^ std::random_device()());
  }
  if (!options.json) {
    std::fprintf(stderr, "load: %.4f s\n", load_seconds);
    if (seed) {
      std::fprintf(stderr, "seed: %lld\n", static_cast<long long>(*seed));
    }
  }

  std::signal(SIGINT, on_interrupt);
  for (int64_t i = 0; i < options.repeat && !interrupted; ++i) {
    generate_and_print(engine, options, load_seconds);
  }
  std::signal(SIGINT, SIG_DFL);
  if (!options.profile.empty()) {
    model.write_profile(options.profile);
  }
  return interrupted ? kInterrupted : kOk;
}

int run_command_line(int argc, char** argv) {
  try {
    const RunnerOptions options = parse_command_line(argc, argv);
    if (options.help) {
      print_text(usage());
      return kOk;
    }
    return run(options);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "mlx_llm_runner: %s\n\n%s", error.what(), usage().c_str());
    return kInvalid;
  } catch (const LlmArgumentError& error) {
    std::fprintf(stderr, "mlx_llm_runner: %s\n", error.what());
    return kInvalid;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mlx_llm_runner: %s\n", error.what());
    return kFailed;
  }
}

} // namespace

} // namespace executorch_mlx::engine

int main(int argc, char** argv) { return executorch_mlx::engine::run_command_line(argc, argv); }
