// Speculation: one call draws several tokens, and the answer stays the same.
//
// A draft guesses the next tokens. The method `verify` draws the token after each of them with the seed of its step. A
// draft token is accepted if it equals the token drawn in its place, so that the answer is the same as without drafts.
// A step without a draft is a plain step.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace executorch_mlx::engine {

struct Draft {
  std::vector<int64_t> tokens;
  size_t level = 0; // index in LookupDrafter::kSizes of the n-gram that the lookup found
  bool is_of_model = false; // whether a model guessed it, not the lookup
};

// How many draft tokens were accepted, and how many were judged. Later drafts count more.
struct Acceptance {
  double accepted;
  double judged;

  // Records a draft of `proposed` tokens. The first `right` tokens were accepted. The token after them, if any, was
  // wrong, and the tokens after that one were not judged.
  void learn(int64_t proposed, int64_t right);

  // The probability that a draft token is accepted if all before it are.
  double rate() const { return accepted / judged; }
};

// Updates `cost`, the estimated seconds of a call, by the measured `seconds`. The first call only sets `is_warm`.
void record_seconds(bool& is_warm, double& cost, double seconds);

// Drafts tokens of one answer by lookup: finds the last n tokens earlier in prompt and answer, and drafts what followed
// there.
class LookupDrafter {
 public:
  static constexpr std::array<size_t, 3> kSizes = {8, 4, 2}; // n, by level

  // Returns a draft of `count` tokens after `ids`, or an empty one. Between calls, tokens are only appended to `ids`.
  Draft propose(std::span<const int64_t> ids, int64_t count);

  Acceptance& acceptance(size_t level) { return levels_[level].acceptance; }

 private:
  struct Level {
    std::unordered_map<uint64_t, size_t> next; // by the hash of an n-gram: the index after its last occurrence
    Acceptance acceptance;
  };
  // The statistics of each level begin as if two draft tokens had been judged, with acceptance rates 0.8, 0.5 and 0.25.
  std::array<Level, kSizes.size()> levels_ = {{{{}, {1.6, 2}}, {{}, {1.0, 2}}, {{}, {0.5, 2}}}};
  size_t indexed_ = 0; // n-grams that end before this index are in the maps
};

// The measured seconds of calls, and the draft lengths that pay.
class StepCosts {
 public:
  static constexpr int64_t kMaxDraft = 31;

  // Records the time of a call of `verify` with `tokens` tokens or, for one token, of a plain step of one row.
  void record_one_row(int64_t tokens, double seconds);
  // Records the time of a step of several rows, by a method for `width` rows.
  void record_rows(size_t width, double seconds);

  // Records the time in which a row with states went back behind wrong draft tokens.
  void record_rewind(double seconds);

  // Returns whether `count` steps of one row each take less time than one step by the method for `width` rows. Now and
  // then returns false in any case, so that the time of such a step stays known.
  bool prefers_single_steps(size_t count, size_t width);

  struct Choice {
    int64_t length = 0; // 0: speculation does not pay
    double rate = 0; // tokens per second
  };
  // Returns how many tokens, at most `most`, to draft for one of `running` answers. `acceptance` is the probability
  // that a draft token is accepted, and `draft_seconds` the time that a draft token takes: 0 for a lookup. Without
  // drafts, the method for `width` rows decodes the answers.
  Choice best_draft(double acceptance, int64_t most, size_t running, size_t width, double draft_seconds) const;

  // Returns the time that a token of a draft model is assumed to take until it is measured.
  double assumed_draft_seconds() const;

 private:
  struct Warmth {
    // Whether there was a call of each kind. The first call is not measured, because it also loads the method.
    bool plain = false, verify = false, rewind = false;
  };
  struct RowsCost {
    bool is_warm = false; // as above
    double seconds = 0; // 0: unknown
  };
  // The seconds of a step by the method for `width` rows; 0 if unknown.
  double rows_seconds(size_t width) const;
  double cost(int64_t tokens) const;

  Warmth warm_;
  double rewind_seconds_ = 0; // 0: unknown, or the program needs no such call
  uint64_t choices_ = 0;
  uint64_t calls_since_plain_ = 0;

  std::array<double, kMaxDraft + 2> one_row_ = {}; // by the number of tokens; 0: unknown
  std::unordered_map<size_t, RowsCost> rows_; // by width
};

} // namespace executorch_mlx::engine
