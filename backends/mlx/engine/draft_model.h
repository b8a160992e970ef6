// Models that guess the next tokens of answers: a draft model, or the program's own head for multi-token prediction.
//
// They draw each token with the sampling parameters and the seed of the token's step. They then use the same noise as
// the program whose tokens they guess: where the models agree about the logits, both draw the same token, at any
// temperature.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "llm_program.h"
#include "request.h"
#include "row_state.h"
#include "rows.h"
#include "speculation.h"

namespace executorch_mlx::engine {

// Throws EngineError if `draft` cannot guess the tokens of `program`: if one of them lacks the methods for it, or if
// the bytes of a token differ.
void check_draft(const LlmProgram& program, const LlmProgram& draft);

// A model that drafts tokens. The class LookupDrafter in speculation.h drafts without a model, by lookup.
class Guesser {
 public:
  virtual ~Guesser() = default;

  // Returns a guess of the next `count` tokens of a request, or of fewer. Returns no tokens if other requests use all
  // rows, if the model has not read all tokens yet (a call reads at most `chunk`), or if the model fails or has failed
  // since the last try_again(). Does not throw.
  std::vector<int64_t> propose(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk);

  // Uses the model again if it has failed: the reason may have been a lack of memory.
  void try_again() { has_failed_ = false; }

  // Frees the row that the model uses for a request. The request is over.
  virtual void release(Request&) {}

  // How many of its tokens were accepted. Begins as if 1.6 of 2 tokens had been.
  Acceptance acceptance = {.accepted = 1.6, .judged = 2};
  // Returns the measured time of a draft divided by the number of its tokens, or 0 if it is unknown.
  double token_seconds() const { return seconds_; }

  // Returns true at every 256th call: a few tokens should then be drafted although that does not pay, so that
  // `acceptance` stays known.
  bool is_trial_due() {
    constexpr uint64_t kEvery = 256;
    return ++passed_over_ % kEvery == 0;
  }

 protected:
  // If a failed call has left the buffers of the model undefined, resets them. Throws EngineError if there is no memory
  // for them.
  virtual void recover() {}
  // What propose() returns. May throw.
  virtual std::vector<int64_t> guess(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk) = 0;
  // Forgets the tokens of a request that the model has read. Called when guess() has failed.
  virtual void forget(Request& request) = 0;
  // Runs the model, and returns the token that it draws after the tokens of the task.
  virtual int64_t draw(const RowTask& task) = 0;

  // Reads the tokens `rest`, then draws `count` tokens one after the other, and returns them. A stop id is the last of
  // them. If `rest` is longer than `chunk`, reads only its first `chunk` tokens and returns no tokens. `task` has the
  // position and the row of `rest`. Calls `before_drafts` before the model reads a token that it has drawn.
  std::vector<int64_t> draw_all(const Request& request, std::span<const int64_t> rest, RowTask task, int64_t count,
      int64_t chunk, const std::function<void()>& before_drafts = {});

 private:
  bool has_failed_ = false; // since the last try_again()
  Clock::time_point begin_; // of guess()
  bool is_warm_ = false; // whether a draft was drawn; the first one also loads the method
  double seconds_ = 0;
  uint64_t passed_over_ = 0; // calls of is_trial_due()
};

// Another program with the same tokenizer.
class DraftModel : public Guesser {
 public:
  // `reuse` is an argument of Rows. The program must outlive the object.
  DraftModel(LlmProgram& program, bool reuse)
      : program_(program), rows_(program, reuse), before_drafts_(program.metadata().rows) {}

  void release(Request& request) override;

 private:
  std::vector<int64_t> guess(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk) override;
  void forget(Request& request) override;
  void recover() override;
  int64_t draw(const RowTask& task) override { return program_.draw({&task, 1})[0].token; }

  LlmProgram& program_;
  Rows rows_;
  // If a row cannot rewind: what it held before the model read the last draft. By the index of the row.
  std::vector<std::optional<RowContents>> before_drafts_;
};

// The head of the program whose tokens it guesses. It uses the rows of the requests.
class MtpHead : public Guesser {
 public:
  explicit MtpHead(LlmProgram& program) : program_(program) {}

 private:
  std::vector<int64_t> guess(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk) override;
  void forget(Request& request) override;
  int64_t draw(const RowTask& task) override { return program_.draft(task); }

  LlmProgram& program_;
};

} // namespace executorch_mlx::engine
