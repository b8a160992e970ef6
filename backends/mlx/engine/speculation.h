// Speculation: several tokens per call without a change of the answer.
//
// A draft guesses the next tokens. The method `verify` draws the token after each of them with the seed of its step. A
// draft token is accepted if it equals the token drawn in its place, so that the answer is that of plain steps.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace executorch_mlx {

struct Draft {
  std::vector<int64_t> tokens;
  size_t level = 0; // of the n-gram that was found
};

// Drafts the tokens of one answer: looks up the last n tokens earlier in prompt and answer, and continues as there.
class Drafter {
 public:
  static constexpr std::array<size_t, 3> kSizes = {8, 4, 2}; // n, by level

  // Returns a draft of `count` tokens after `ids`, or an empty one. Between calls, tokens are only appended to `ids`.
  Draft propose(std::span<const int64_t> ids, int64_t count);

  // Of a draft, `accepted` tokens were right, and the one after them was wrong if `accepted` is less than `proposed`.
  void learn(size_t level, int64_t proposed, int64_t accepted);

  // The probability that a draft token is accepted if all before it are.
  double acceptance(size_t level) const {
    return levels_[level].accepted / levels_[level].judged;
  }

 private:
  struct Level {
    std::unordered_map<uint64_t, size_t> next; // by the hash of an n-gram: the index after its last occurrence
    double accepted;
    double judged;
  };
  // The statistics begin with two drafts' worth of experience.
  std::array<Level, kSizes.size()> levels_ = {{{{}, 1.6, 2}, {{}, 1.0, 2}, {{}, 0.5, 2}}};
  size_t indexed_ = 0; // n-grams that end before this index are in the maps
};

// The measured seconds of calls, and the draft lengths that pay.
class StepCosts {
 public:
  static constexpr int64_t kMaxDraft = 31;

  // A call of `verify` or, for one token, a plain step of one row.
  void record_one_row(int64_t tokens, double seconds);
  // A step of all rows.
  void record_all_rows(double seconds);

  // Whether single steps of `count` rows take less time than one step of all rows. Now and then returns false in any
  // case, so that the time of a step of all rows stays known.
  bool prefers_single_steps(size_t count);

  // Returns how many of at most `most` tokens to draft for one of `running` answers; 0 if speculation does not pay.
  int64_t best_draft(double acceptance, int64_t most, size_t running) const;

 private:
  struct Warmth {
    bool plain = false, verify = false, all_rows = false; // whether there was a call: the first one loads the method
  };
  static void record(bool& is_warm, double& cost, double seconds);
  double cost(int64_t tokens) const;

  Warmth warm_;
  uint64_t choices_ = 0;

  std::array<double, kMaxDraft + 2> one_row_ = {}; // by the number of tokens; 0: unknown
  double all_rows_ = 0;
};

} // namespace executorch_mlx
