// The cache rows of a program: what each holds, and which one a new request takes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "llm_program.h"

namespace executorch_mlx::engine {

class Request;

// What the contents of a row depend on besides the tokens.
struct Conditions {
  const std::vector<float>* samples = nullptr; // the sound of a request to a speech model; null: none
  uint64_t adapter = 0; // Adapter::id; 0: none
};

struct Row {
  int64_t index = 0;
  std::shared_ptr<const std::vector<float>> samples; // of a speech model: the sound that was encoded
  uint64_t adapter = 0; // Adapter::id of the one with which the tokens were computed; 0: none
  int64_t adapter_slot = 0; // valid as long as the row has a request
  std::vector<int64_t> ids; // the tokens at positions 0, 1, ...
  int64_t written = 0; // 1 + the highest position that was written since the row was last empty; 0: none
  int64_t mtp_length = 0; // positions that the program's head for multi-token prediction has read
  std::shared_ptr<Request> request; // null: the row is free
  uint64_t last_used = 0;

  // Makes `task` write `tokens` to this row, from `position` on.
  void place(RowTask& task, std::span<const int64_t> tokens, size_t position) const;
  // Records that a call will write the tokens of `task`. To be called before the call, which may write some and fail.
  void expect(const RowTask& task);
  // After a call that failed: forgets all tokens, unless the row can go back behind those that the call may have
  // written.
  void go_back(const LlmMetadata& meta);
  // Records that `tokens` were written at the positions from ids.size() on.
  void append(std::span<const int64_t> tokens);
  // Whether the sound of this row is equal to `other`. Null stands for no sound.
  bool has_same_sound(const std::vector<float>* other) const;
  bool has_same(const Conditions& other) const { return adapter == other.adapter && has_same_sound(other.samples); }
  // Forgets the tokens from this position on.
  void truncate(int64_t length);
};

class Rows {
 public:
  // With `reuse`, a request continues from the longest beginning of its prompt that a row holds.
  Rows(const LlmProgram& program, bool reuse);

  bool has_free() const;

  // Whether a row holds a beginning of `prompt` that is worth a copy, or will hold one when the calls of its request
  // are done. `conditions` as in take().
  bool has_beginning(std::span<const int64_t> prompt, const Conditions& conditions) const;

  // Returns a free row, or null if there is none. The row holds a beginning of `prompt` of at most `limit` tokens,
  // which may be empty or copied from another row. By default, this is the least recently used free row, and it loses
  // its other tokens. If another free row holds a beginning of the prompt and few other tokens, or if its beginning
  // cannot be copied, that row is returned instead. The tokens of a row with other conditions do not count as a
  // beginning.
  Row* take(std::span<const int64_t> prompt, int64_t limit, const Conditions& conditions = {});

  // Copies what a row holds to the least recently used free row. Throws EngineError: with BUSY if none is free.
  void clone(const Row& row);

  // Records that the head for multi-token prediction holds nothing any more.
  void forget_mtp();

  // Empties all rows.
  void forget();

  // Frees a row whose request has ended. The row keeps its tokens if `is_valid`; they are invalid after a failed call.
  void release(Row& row, bool is_valid);

 private:
  int64_t usable_prefix_length(
      const Row& row, std::span<const int64_t> prompt, int64_t limit, const Conditions& conditions) const;

  const LlmProgram& program_;
  const bool reuse_;
  std::vector<Row> rows_;
  uint64_t clock_ = 0;
};

} // namespace executorch_mlx::engine
