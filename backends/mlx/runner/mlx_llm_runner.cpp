// mlx_llm_runner MODEL.pte --prompt-ids 1,2,3: see usage() in arguments.cpp.
#include <executorch_mlx/llm_runner.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "json.h"
#include "profile.h"
#include "text.h"

namespace executorch_mlx {

namespace {

constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;
constexpr int kInterrupted = 128 + SIGINT;

std::atomic<bool> interrupted = false;
std::atomic<LlmRunner*> running = nullptr;

// The first Ctrl-C ends the answer after the step it is in, the second the process.
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

// Writes what comes in one of the three ways; the rows of a batch do not come apart, and
// are written when all are there.
class Printer {
 public:
  explicit Printer(const Arguments& arguments)
      : arguments_(arguments), is_batch_(arguments.prompts.size() > 1) {}

  void token(size_t row, int64_t id, std::string_view text) {
    if (arguments_.json) {
      print_text(token_line(row, id, text));
    } else if (is_batch_) {
      return;
    } else if (arguments_.ids) {
      print_text(std::to_string(id) + "\n");
    } else {
      print_text(text);
      printed_ += text.size();
    }
  }

  void answer(size_t row, const GenerateResult& result, double load_seconds) {
    if (arguments_.json) {
      return print_text(answer_line(row, result, load_seconds));
    }
    const std::string label = is_batch_ ? str("[", row, "] ") : "";
    if (is_batch_) {
      print_text(label + (arguments_.ids ? joined(result.tokens) : result.text) + "\n");
    } else if (!arguments_.ids) {
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

  const Arguments& arguments_;
  bool is_batch_;
  size_t printed_ = 0;
};

void generate_once(LlmRunner& runner, const Arguments& arguments) {
  Printer printer(arguments);
  const auto on_token = [&](size_t row, int64_t id, std::string_view text) {
    printer.token(row, id, text);
    return !interrupted;
  };
  std::vector<GenerateResult> results;
  if (arguments.prompts.size() > 1) {
    results = runner.generate_batch(arguments.prompts, arguments.config, on_token);
  } else {
    runner.reset();
    results.push_back(runner.generate(
        arguments.prompts[0], arguments.config,
        [&](int64_t id, std::string_view text) { return on_token(0, id, text); }));
  }
  for (size_t row = 0; row < results.size(); ++row) {
    printer.answer(row, results[row], runner.load_seconds());
  }
  if (!arguments.json) {
    std::fprintf(stderr, "peak memory: %.1f MB\n", static_cast<double>(peak_resident_bytes()) / 1e6);
  }
}

int run(Arguments arguments) {
  std::optional<executorch::etdump::ETDumpGen> tracer;
  if (!arguments.profile.empty()) {
    tracer.emplace();
  }
  LlmRunner runner(arguments.model, arguments.device, tracer ? &*tracer : nullptr);
  const LlmMetadata& meta = runner.metadata();
  if (!arguments.ids && !arguments.json && !meta.has_tokens) {
    throw LlmArgumentError(arguments.model + ": carries no bytes of its tokens, use --ids");
  }
  auto& seed = arguments.config.sampling.seed;
  if (!seed && (meta.takes_seed || !meta.has_head)) {
    seed = random_seed();
  }
  if (!arguments.json) {
    std::fprintf(stderr, "load: %.4f s\n", runner.load_seconds());
    if (seed) {
      std::fprintf(stderr, "seed: %lld\n", static_cast<long long>(*seed));
    }
  }

  running = &runner;
  std::signal(SIGINT, on_interrupt);
  for (int64_t i = 0; i < arguments.repeat && !interrupted; ++i) {
    generate_once(runner, arguments);
  }
  std::signal(SIGINT, SIG_DFL);
  running = nullptr;
  if (tracer) {
    write_profile(*tracer, arguments.profile);
  }
  return interrupted ? kInterrupted : kOk;
}

int main_(int argc, char** argv) {
  try {
    const Arguments arguments = parse_arguments(argc, argv);
    if (arguments.help) {
      print_text(usage());
      return kOk;
    }
    return run(arguments);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "mlx_llm_runner: %s\n\n%s", error.what(), usage().c_str());
    return kUsage;
  } catch (const LlmArgumentError& error) {
    std::fprintf(stderr, "mlx_llm_runner: %s\n", error.what());
    return kUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mlx_llm_runner: %s\n", error.what());
    return kFailed;
  }
}

} // namespace

} // namespace executorch_mlx

int main(int argc, char** argv) {
  return executorch_mlx::main_(argc, argv);
}
