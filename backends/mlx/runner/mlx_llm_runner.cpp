// The executable mlx_llm_runner. command_line.cpp defines its options.
#include <executorch_mlx/llm_runner.h>
#include <executorch_mlx/memory.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "command_line.h"
#include "json_lines.h"
#include "profile.h"

namespace executorch_mlx {

namespace {

// Exit status.
constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kInvalid = 2;
constexpr int kInterrupted = 128 + SIGINT;

std::atomic<bool> interrupted = false;
std::atomic<LlmRunner*> running = nullptr;

// The first Ctrl-C ends the answer after the current step, the second one ends the process.
void on_interrupt(int) {
  std::signal(SIGINT, SIG_DFL);
  interrupted = true;
  if (LlmRunner* runner = running) {
    runner->cancel();
  }
}

void print_text(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void print_timings(const GenerateResult& result, const std::string& label) {
  const Timings& t = result.timings;
  std::fprintf(
      stderr, "%sprompt: %lld tokens in %.4f s, %.2f tokens/s\n", label.c_str(),
      static_cast<long long>(t.prompt_tokens), t.prefill, t.prefill_tokens_per_second());
  std::fprintf(stderr, "%stime to first token: %.4f s\n", label.c_str(), t.time_to_first_token);
  std::fprintf(
      stderr, "%sdecode: %lld tokens in %.4f s, %.2f tokens/s\n", label.c_str(),
      static_cast<long long>(t.decoded_tokens), t.decode, t.decode_tokens_per_second());
  std::fprintf(stderr, "%sfinish: %s\n", label.c_str(), to_string(result.finish));
}

// Prints answers as text, token ids or JSON lines. For a batch, the text or the ids are printed at the end, because the
// tokens of the sequences are drawn in turn.
class Printer {
 public:
  explicit Printer(const RunnerOptions& options) : options_(options), is_batch_(options.prompts.size() > 1) {}

  void token(size_t sequence, int64_t id, std::string_view text) {
    if (options_.json) {
      print_text(token_line(sequence, id, text));
    } else if (is_batch_) {
      return;
    } else if (options_.ids) {
      print_text(std::to_string(id) + "\n");
    } else {
      print_text(text);
      printed_ += text.size();
    }
  }

  void answer(size_t sequence, const GenerateResult& result, double load_seconds) {
    if (options_.json) {
      return print_text(answer_line(sequence, result, load_seconds));
    }
    const std::string label = is_batch_ ? str("[", sequence, "] ") : "";
    if (is_batch_) {
      print_text(label + (options_.ids ? joined(result.tokens) : result.text) + "\n");
    } else if (!options_.ids) {
      print_text(result.text.substr(printed_) + "\n");
    }
    print_timings(result, label);
  }

 private:
  static std::string joined(const std::vector<int64_t>& ids) {
    std::string text;
    for (const int64_t id : ids) {
      text += str(text.empty() ? "" : " ", id);
    }
    return text;
  }

  const RunnerOptions& options_;
  bool is_batch_;
  size_t printed_ = 0; // how many bytes of the answer's text are already printed
};

std::vector<GenerateResult> generate(LlmRunner& runner, const RunnerOptions& options, Printer& printer) {
  const auto on_token = [&](size_t sequence, int64_t id, std::string_view text) {
    printer.token(sequence, id, text);
    return !interrupted;
  };
  if (options.prompts.size() > 1) {
    return runner.generate_batch(options.prompts, options.config, on_token);
  }
  runner.reset();
  std::vector<GenerateResult> results;
  results.push_back(runner.generate(
      options.prompts[0], options.config, [&](int64_t id, std::string_view text) { return on_token(0, id, text); }));
  return results;
}

void generate_and_print(LlmRunner& runner, const RunnerOptions& options) {
  Printer printer(options);
  std::vector<GenerateResult> results;
  try {
    results = generate(runner, options, printer);
  } catch (const LlmArgumentError&) {
    throw; // the request was refused before anything ran, so that there is no finish reason
  } catch (const LlmError&) {
    std::fprintf(stderr, "finish: %s\n", to_string(FinishReason::kError));
    throw;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    printer.answer(i, results[i], runner.load_seconds());
  }
  if (!options.json) {
    std::fprintf(stderr, "peak memory: %.1f MB\n", static_cast<double>(peak_resident_bytes()) / 1e6);
  }
}

int run(RunnerOptions options) {
  std::optional<executorch::etdump::ETDumpGen> tracer;
  if (!options.profile.empty()) {
    tracer.emplace();
  }
  if (options.memory_limit) {
    executorch_mlx_set_memory_limit(*options.memory_limit);
  }
  LlmRunner runner(options.model, options.device, tracer ? &*tracer : nullptr);
  const LlmMetadata& meta = runner.metadata();
  if (!options.ids && !options.json && !meta.has_token_bytes) {
    throw LlmArgumentError(options.model + ": the program has no token bytes, use --ids");
  }
  auto& seed = options.config.sampling.seed;
  if (!seed && (meta.takes_seed || !meta.has_head)) {
    seed = random_seed();
  }
  if (!options.json) {
    std::fprintf(stderr, "load: %.4f s\n", runner.load_seconds());
    if (seed) {
      std::fprintf(stderr, "seed: %lld\n", static_cast<long long>(*seed));
    }
  }

  running = &runner;
  std::signal(SIGINT, on_interrupt);
  for (int64_t i = 0; i < options.repeat && !interrupted; ++i) {
    generate_and_print(runner, options);
  }
  std::signal(SIGINT, SIG_DFL);
  running = nullptr;
  if (tracer) {
    write_profile(*tracer, options.profile);
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

} // namespace executorch_mlx

int main(int argc, char** argv) {
  return executorch_mlx::run_command_line(argc, argv);
}
