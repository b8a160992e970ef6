// stress MODEL.pte FILE
//
// Prints what the methods of Engine return that do not submit a request. FILE is the file of a prefix. Then generates
// with a mask that throws for each draft token.
//
// stress MODEL.pte text
//
// Gives each token of a model without token bytes its number as text, and prints the text of the answer to token 5. In
// the model, token t is followed by t + 1. Then prints the error of a second attempt.
//
// stress MODEL.pte COUNT
//
// Submits COUNT requests from 16 threads. Some are cancelled at once, some are destroyed or replaced while they run,
// some callbacks throw. In the model, token t is followed by t + 1. Prints how many answers are complete and how many
// are wrong, how many requests the engine counted, and how many of them are left.
#include <executorch_mlx/engine.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdint>
#include <iostream>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 16;
constexpr int64_t kLength = 20;

struct Thrown : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Counts {
  std::atomic<int> next = 0, complete = 0, wrong = 0;
};

void run_request(executorch_mlx::Engine& engine, int number, Counts& counts) {
  const int64_t start = number % 150;
  const bool is_cancelled = number % 3 == 0;
  const bool throws = number % 11 == 5;
  executorch_mlx::RequestOptions options;
  options.max_new_tokens = kLength;
  options.draft = number % 3 - 1;
  options.priority = number % 4;
  std::vector<int64_t> tokens;
  auto request =
      engine.submit(std::vector<int64_t>(1 + number % 30, start), options, [&](const executorch_mlx::Event& event) {
        if (event.token >= 0) {
          tokens.push_back(event.token);
        }
        if (throws && tokens.size() == 4) {
          throw Thrown("by the callback");
        }
        return true;
      });
  if (is_cancelled) {
    request.cancel();
  }
  if (number % 14 == 0) {
    request = engine.submit(std::vector<int64_t>{start}, options); // replaces the first request while that runs
  }
  if (number % 7 == 0) {
    return; // destroys the request while it runs
  }
  bool has_thrown = false;
  try {
    request.wait();
  } catch (const Thrown&) {
    has_thrown = true;
  }
  bool is_right = has_thrown == throws || is_cancelled;
  for (size_t i = 0; i < tokens.size(); ++i) {
    is_right = is_right && tokens[i] == start + 1 + static_cast<int64_t>(i);
  }
  const bool is_complete = static_cast<int64_t>(tokens.size()) == kLength;
  counts.complete += is_complete;
  counts.wrong += !is_right || !(is_complete || is_cancelled || throws);
}

void print_methods(const executorch_mlx::Model& model, const std::string& file) {
  const std::vector<int64_t> prompt = {5, 300, 12, 7}, targets = {31, 32};
  {
    executorch_mlx::Engine engine(model);
    engine.save_prefix(prompt, file);
  }
  executorch_mlx::Engine engine(model);
  std::cout << engine.load_prefix(file) << "\n";
  for (const auto& score : engine.score(prompt, targets)) {
    std::cout << score.logprob << " " << score.is_greedy << "\n";
  }
  for (const auto& top : engine.score_top(prompt, targets, 2)) {
    std::cout << top[0].first << " " << top[0].second << " " << top[1].first << " " << top[1].second << "\n";
  }

  const std::vector<int64_t> repeated = {31, 32, 33, 31, 32, 33, 31};
  size_t drawn = 0;
  executorch_mlx::RequestOptions options;
  options.max_new_tokens = 6;
  options.ignore_eos = true;
  options.draft = 3;
  options.allowed_tokens = [&](std::span<const int64_t> answer, std::span<int32_t> mask) {
    std::fill(mask.begin(), mask.end(), 0);
    mask[0] = answer.size() % 3 == 2 ? std::numeric_limits<int32_t>::min() : 0;
    mask[1] = answer.size() % 3 == 2 ? 0 : 1 << (answer.size() % 3);
    if (answer.size() > drawn) {
      throw Thrown("for a draft token");
    }
  };
  auto request = engine.submit(repeated, options, [&](const executorch_mlx::Event&) { return ++drawn > 0; });
  request.wait();
  std::cout << drawn << "\n";
  engine.close();
  try {
    engine.submit(prompt, {});
  } catch (const executorch_mlx::LlmError& error) {
    std::cout << error.what() << "\n";
  }
}

void print_text(executorch_mlx::Model& model) {
  std::vector<std::string> tokens;
  for (int i = 0; i < 256; ++i) {
    tokens.push_back(std::to_string(i) + " ");
  }
  model.set_token_bytes(tokens);
  {
    executorch_mlx::Engine engine(model);
    executorch_mlx::RequestOptions options;
    options.stop = {"9"};
    auto request = engine.submit(std::vector<int64_t>{5}, options, [](const executorch_mlx::Event& event) {
      std::cout << event.text;
      return true;
    });
    request.wait();
  }
  try {
    model.set_token_bytes(tokens);
  } catch (const executorch_mlx::LlmArgumentError& error) {
    std::cout << error.what() << "\n";
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    return 2;
  }
  executorch_mlx::Model model(argv[1]);
  if (argv[2] == std::string("text")) {
    print_text(model);
    return 0;
  }
  if (!std::isdigit(argv[2][0])) {
    print_methods(model, argv[2]);
    return 0;
  }
  executorch_mlx::Engine engine(model);
  Counts counts;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int number; (number = counts.next++) < std::stoi(argv[2]);) {
        run_request(engine, number, counts);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const auto stats = engine.stats();
  std::cout << counts.complete << " complete, " << counts.wrong << " wrong, " << stats.requests << " requests, "
            << stats.running + stats.waiting << " left\n";
  return counts.wrong != 0;
}
