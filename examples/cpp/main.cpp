// chat MODEL.pte SECONDS IDS...
//
// Holds a conversation with a language model. Each IDS is the prompt of one turn: token ids, such as 0,354,264. A turn
// that begins with ^ replaces the previous turn. An answer that takes longer than SECONDS is cancelled.
#include <executorch_mlx/llm_runner.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

// Cancels the running answer after `seconds`, unless the Deadline is destroyed before that.
class Deadline {
 public:
  Deadline(double seconds, executorch_mlx::LlmRunner& runner)
      : thread_([seconds, &runner, done = done_.get_future()] {
          if (done.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::timeout) {
            runner.cancel(); // may be called from any thread
          }
        }) {}
  Deadline(const Deadline&) = delete;
  ~Deadline() {
    done_.set_value();
    thread_.join();
  }

 private:
  std::promise<void> done_; // set by the destructor
  std::thread thread_;
};

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::cerr << "usage: chat MODEL.pte SECONDS IDS...\n";
    return 2;
  }
  executorch_mlx::LlmRunner runner(argv[1]);
  executorch_mlx::GenerateConfig config;
  config.max_new_tokens = INT64_MAX;
  std::vector<int64_t> prompt;
  // What `prompt` and the position were before the previous turn. A turn that replaces the previous one starts there.
  std::vector<int64_t> previous_prompt;
  int64_t previous_position = 0;
  for (int turn = 3; turn < argc; ++turn) {
    std::istringstream ids(argv[turn]);
    if (ids.peek() == '^') {
      ids.get();
      runner.rewind(previous_position);
      prompt = previous_prompt;
    }
    previous_position = runner.position();
    previous_prompt = prompt;
    for (std::string id; std::getline(ids, id, ',');) {
      prompt.push_back(std::stoll(id));
    }
    const Deadline deadline(std::atof(argv[2]), runner);
    const auto result = runner.generate(prompt, config, [](int64_t, std::string_view text) {
      std::cout << text << std::flush;
      return true; // false ends the answer
    });
    std::cout << "\n";
    std::cerr << to_string(result.finish) << ", " << result.timings.decode_tokens_per_second() << " tokens/s, "
              << runner.position() << " tokens in the cache\n";
    // The last token drawn is not in the KV cache yet: the next prompt begins with it.
    prompt.clear();
    if (result.stop_id) {
      prompt.push_back(*result.stop_id);
    } else if (!result.tokens.empty()) {
      prompt.push_back(result.tokens.back());
    }
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
