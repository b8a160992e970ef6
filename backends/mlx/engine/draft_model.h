// A draft model: another program with the same tokenizer that guesses the next tokens of an answer.
//
// It draws each token with the sampling parameters and the seed of the token's step. The noise is then that of the
// program whose tokens it guesses: where the models agree about the logits, they draw the same token at any temperature.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "llm_program.h"
#include "request.h"
#include "rows.h"
#include "speculation.h"

namespace executorch_mlx {

// Throws EngineError if `draft` cannot guess the tokens of `program`: if one of them lacks the methods for it, or if the
// bytes of a token differ.
void check_draft(const LlmProgram& program, const LlmProgram& draft);

class DraftModel {
 public:
  // With `reuse`, rows keep what they held, as in Rows. The program must outlive the object.
  DraftModel(LlmProgram& program, bool reuse) : program_(program), rows_(program, reuse) {}

  // Returns the next `count` tokens of a request, or fewer. Returns none if other requests have all rows, or if the model
  // has not read all tokens yet: a call reads at most `chunk`. Does not throw. A model that failed returns none any more.
  std::vector<int64_t> propose(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk);

  // Frees the row of a request, if it has one.
  void release(Request& request);

  // How many of its tokens were right, and the measured time of one; 0 if it is unknown.
  Acceptance acceptance = {.accepted = 1.6, .judged = 2};
  double token_seconds() const {
    return seconds_;
  }

  // Whether to draft a few tokens although that does not pay, so that `acceptance` stays known.
  bool is_due() {
    constexpr uint64_t kEvery = 256;
    return ++passed_over_ % kEvery == 0;
  }

 private:
  std::vector<int64_t> draw(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk);

  LlmProgram& program_;
  Rows rows_;
  bool has_failed_ = false;
  bool is_warm_ = false; // whether there was a call with one token: the first one loads the method
  double seconds_ = 0;
  uint64_t passed_over_ = 0;
};

} // namespace executorch_mlx
