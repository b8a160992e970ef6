// consumer MODEL.pte COMMAND: one use of the library each, one line of output for
// each thing that the tests look at.
#include <executorch_mlx/llm_runner.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

using namespace executorch_mlx;

namespace {

void print_token(int64_t id, std::string_view text) {
  std::printf("token %lld '", static_cast<long long>(id));
  for (const unsigned char c : text) {
    std::printf("%02x", c);
  }
  std::printf("'\n");
}

void print_end(const LlmRunner& runner, const GenerateResult& result) {
  std::printf(
      "end %s, %zu tokens, position %lld\n", to_string(result.finish), result.tokens.size(),
      static_cast<long long>(runner.position()));
}

// What each token completes.
void stream(LlmRunner& runner) {
  const std::vector<int64_t> prompt = {0};
  const auto result = runner.generate(prompt, {}, [](int64_t id, std::string_view text) {
    print_token(id, text);
    return true;
  });
  print_end(runner, result);
}

void stop_in_callback(LlmRunner& runner) {
  const std::vector<int64_t> prompt = {0};
  int seen = 0;
  print_end(runner, runner.generate(prompt, {}, [&](int64_t, std::string_view) { return ++seen < 3; }));
}

// Cancels from another thread, twice, to show that the runner goes on working.
void cancel(LlmRunner& runner) {
  for (int i = 0; i < 2; ++i) {
    runner.reset();
    GenerateConfig config;
    config.max_new_tokens = INT64_MAX;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      runner.cancel();
    });
    const std::vector<int64_t> prompt = {0};
    const auto result = runner.generate(prompt, config);
    other.join();
    std::printf("end %s\n", to_string(result.finish));
  }
  runner.reset();
  runner.cancel();  // nothing runs: of no effect
  GenerateConfig config;
  config.max_new_tokens = 2;
  const std::vector<int64_t> prompt = {0};
  print_end(runner, runner.generate(prompt, config));
}

// Two turns that keep the context, then the same by hand, then from the start.
void turns(LlmRunner& runner) {
  GenerateConfig config;
  config.max_new_tokens = 2;
  const auto print = [](std::string_view what, int64_t id) {
    std::printf("%.*s %lld\n", static_cast<int>(what.size()), what.data(), static_cast<long long>(id));
  };
  for (const std::vector<int64_t>& prompt : {std::vector<int64_t>{3, 1}, {2, 5, 4}}) {
    for (const int64_t id : runner.generate(prompt, config).tokens) {
      print("drew", id);
    }
    print("position", runner.position());
  }
  runner.reset();
  runner.start({});
  const std::vector<int64_t> prompt = {3, 1};
  const int64_t token = runner.prefill(prompt);
  print("prefill", token);
  print("step", runner.step(token));
  print("position", runner.position());
}

} // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void(LlmRunner&)>> commands = {
      {"stream", stream}, {"stop_in_callback", stop_in_callback}, {"cancel", cancel}, {"turns", turns}};
  if (argc != 3 || !commands.contains(argv[2])) {
    return 2;
  }
  try {
    LlmRunner runner(argv[1]);
    commands.at(argv[2])(runner);
  } catch (const LlmError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
