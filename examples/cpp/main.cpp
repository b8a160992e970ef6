// chat MODEL.pte SECONDS IDS...
//
// Holds a conversation with a language model. Each IDS is the prompt of one turn: token ids, such as 0,354,264. A turn
// that begins with ^ replaces the previous turn. An answer that takes longer than SECONDS is cancelled.
#include <executorch_mlx/engine.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::cerr << "usage: chat MODEL.pte SECONDS IDS...\n";
    return 2;
  }
  const executorch_mlx::Model model(argv[1]);
  executorch_mlx::Engine engine(model);
  std::vector<int64_t> conversation;
  size_t previous_length = 0; // the length of the conversation before the previous turn
  for (int turn = 3; turn < argc; ++turn) {
    std::istringstream ids(argv[turn]);
    if (ids.peek() == '^') {
      ids.get();
      conversation.resize(previous_length);
    }
    previous_length = conversation.size();
    for (std::string id; std::getline(ids, id, ',');) {
      conversation.push_back(std::stoll(id));
    }
    // The prompt is the whole conversation. The engine reuses what is in its cache.
    std::vector<int64_t> answer;
    auto request = engine.submit(conversation, {}, [&](const executorch_mlx::Event& event) {
      std::cout << event.text << std::flush;
      if (event.token >= 0) {
        answer.push_back(event.token);
      }
      return true; // false cancels the request
    });
    if (!request.wait(std::atof(argv[2]))) {
      request.cancel(); // may be called from any thread
      request.wait();
    }
    conversation.insert(conversation.end(), answer.begin(), answer.end());
    const auto info = request.info();
    const double seconds = info.generation_seconds;
    std::cout << "\n";
    std::cerr << executorch_mlx::to_string(info.finish) << ", "
              << (seconds > 0 ? static_cast<double>(info.generated_tokens - 1) / seconds : 0) << " tokens/s, "
              << info.reused_tokens << " tokens reused\n";
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
