// chat MODEL.pte SECONDS IDS...: every IDS, such as 0,354,264, is a turn of one
// conversation, or one in the place of the last if it begins with ^; an answer has to do
// with so many seconds.
#include <executorch_mlx/llm_runner.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

// cancel() may come from any thread: this one waits for the time to be over, or to be stopped.
std::jthread cancel_after(double seconds, executorch_mlx::LlmRunner& runner) {
  return std::jthread([seconds, &runner](std::stop_token stop) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any().wait_for(lock, stop, std::chrono::duration<double>(seconds), [] { return false; });
    if (!stop.stop_requested()) {
      runner.cancel();
    }
  });
}

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::cerr << "usage: chat MODEL.pte SECONDS IDS...\n";
    return 2;
  }
  executorch_mlx::LlmRunner runner(argv[1]);
  executorch_mlx::GenerateConfig config;
  config.max_new_tokens = INT64_MAX;
  std::vector<int64_t> prompt;
  std::vector<int64_t> prompt_before;
  int64_t position_before = 0;
  for (int turn = 3; turn < argc; ++turn) {
    std::istringstream ids(argv[turn]);
    if (ids.peek() == '^') {
      ids.get();
      runner.rewind(position_before);
      prompt = prompt_before;
    }
    position_before = runner.position();
    prompt_before = prompt;
    for (std::string id; std::getline(ids, id, ',');) {
      prompt.push_back(std::stoll(id));
    }
    const auto clock = cancel_after(std::atof(argv[2]), runner);
    const auto result = runner.generate(prompt, config, [](int64_t, std::string_view text) {
      std::cout << text << std::flush;
      return true;  // false ends the answer
    });
    std::cout << "\n";
    std::cerr << to_string(result.finish) << ", " << result.timings.decode_tokens_per_second() << " tokens/s, "
              << runner.position() << " tokens in the cache\n";
    // The last token has not been in the model yet: the next turn begins with it.
    prompt.clear();
    if (result.stop_id || !result.tokens.empty()) {
      prompt.push_back(result.stop_id.value_or(result.tokens.empty() ? 0 : result.tokens.back()));
    }
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
