// mlx_llm_runner MODEL.pte --prompt-ids 1,2,3: see usage() in arguments.cpp.
#include <executorch_mlx/llm_runner.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>

#include "arguments.h"
#include "profile.h"

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

void print_timings(const GenerateResult& result) {
  const Timings& t = result.timings;
  std::fprintf(
      stderr, "prompt: %lld tokens in %.4f s, %.2f tokens/s\n",
      static_cast<long long>(t.prompt_tokens), t.prefill, t.prefill_tokens_per_second());
  std::fprintf(stderr, "time to first token: %.4f s\n", t.time_to_first_token);
  std::fprintf(
      stderr, "decode: %lld tokens in %.4f s, %.2f tokens/s\n",
      static_cast<long long>(t.decoded_tokens), t.decode, t.decode_tokens_per_second());
  std::fprintf(stderr, "finish: %s\n", to_string(result.finish));
}

void generate_once(LlmRunner& runner, const Arguments& arguments) {
  size_t printed = 0;
  const GenerateResult result =
      runner.generate(arguments.prompt, arguments.config, [&](int64_t id, std::string_view text) {
        if (arguments.ids) {
          print_text(std::to_string(id) + "\n");
        } else {
          print_text(text);
          printed += text.size();
        }
        return !interrupted;
      });
  if (!arguments.ids) {
    print_text(result.text.substr(printed) + "\n");
  }
  print_timings(result);
}

int run(const Arguments& arguments) {
  std::optional<executorch::etdump::ETDumpGen> tracer;
  if (!arguments.profile.empty()) {
    tracer.emplace();
  }
  LlmRunner runner(arguments.model, arguments.device, tracer ? &*tracer : nullptr);
  if (!arguments.ids && !runner.metadata().has_tokens) {
    throw LlmArgumentError(arguments.model + ": carries no bytes of its tokens, use --ids");
  }
  std::fprintf(stderr, "load: %.4f s\n", runner.load_seconds());

  Arguments all = arguments;
  running = &runner;
  std::signal(SIGINT, on_interrupt);
  if (const auto seed = runner.start(all.config.sampling)) {
    std::fprintf(stderr, "seed: %lld\n", static_cast<long long>(*seed));
    all.config.sampling.seed = seed;
  }
  for (int64_t i = 0; i < all.repeat && !interrupted; ++i) {
    runner.reset();
    generate_once(runner, all);
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
