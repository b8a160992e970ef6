// Runs ChunkTimes for test_engine_chunks.py. Reads lines "record POSITION TOKENS SECONDS" and
// "size POSITION REST LIMIT SECONDS", and prints each size.
#include <iostream>
#include <string>

#include "chunk_times.h"

int main() {
  executorch_mlx::engine::ChunkTimes times;
  for (std::string command; std::cin >> command;) {
    int64_t position, tokens, limit;
    double seconds;
    std::cin >> position >> tokens;
    if (command == "record") {
      std::cin >> seconds;
      times.record(position, tokens, seconds);
    } else {
      std::cin >> limit >> seconds;
      std::cout << times.next_size(position, tokens, limit, seconds) << std::endl;
    }
  }
}
