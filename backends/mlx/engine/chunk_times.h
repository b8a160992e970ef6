// How long the chunks of prompts take, and how large the next chunk should be.
#pragma once

#include <cstdint>
#include <deque>

namespace executorch_mlx::engine {

// Learns the time of a prompt token from the chunks so far. The time of a token grows with its position, because its
// attention reads all tokens before it: expected seconds = base + growth * position.
class ChunkTimes {
 public:
  static constexpr int64_t kMinChunk = 16; // tokens; the time of a smaller chunk says little about a large one

  // Records that a chunk of `tokens` tokens from `position` took `seconds`. Ignores chunks below kMinChunk.
  void record(int64_t position, int64_t tokens, double seconds);

  // Returns the size of the next chunk of a prompt of which `rest` tokens, from `position`, are not yet read: at most
  // `limit`. The rest is divided into chunks that are expected to take the same time, at most `seconds`. Where the time
  // is unknown, the size is kMinChunk, to measure it.
  int64_t next_size(int64_t position, int64_t rest, int64_t limit, double seconds) const;

 private:
  struct Measurement {
    double tokens;
    double position; // of the middle of the chunk
    double token_seconds;
  };

  double measured_growth() const;

  std::deque<Measurement> recent_;
  double base_ = 0; // seconds
  double growth_ = 0; // seconds for each position; never negative
};

} // namespace executorch_mlx::engine
