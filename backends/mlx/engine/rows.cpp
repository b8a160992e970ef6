#include "rows.h"

#include <algorithm>

#include "check.h"
#include "request.h"
#include "row_state.h"

namespace executorch_mlx::engine {

namespace {

// A common prefix with fewer tokens is worth neither a copy nor the loss of what a row holds.
constexpr int64_t kMinPrefix = 16;

// The number of tokens with which both begin.
int64_t common_length(std::span<const int64_t> a, std::span<const int64_t> b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

} // namespace

void Row::place(RowTask& task, std::span<const int64_t> tokens, size_t position) const {
  task.tokens = tokens;
  task.position = static_cast<int64_t>(position);
  task.row = index;
  task.adapter = adapter_slot;
}

void Row::expect(const RowTask& task) {
  written = std::max(written, task.position + static_cast<int64_t>(task.tokens.size()));
}

void Row::go_back(const LlmMetadata& meta) {
  if (written - static_cast<int64_t>(ids.size()) > meta.max_rewind) {
    truncate(0);
  }
}

void Row::append(std::span<const int64_t> tokens) {
  ids.insert(ids.end(), tokens.begin(), tokens.end());
  written = std::max(written, static_cast<int64_t>(ids.size()));
}

bool Row::has_same_sound(const std::vector<float>* other) const {
  return samples.get() == other || (samples != nullptr && other != nullptr && *samples == *other);
}

void Row::truncate(int64_t length) {
  ids.resize(length);
  // At position length - 1, the head for multi-token prediction has read the token at `length`, which is forgotten.
  mtp_length = std::min(mtp_length, std::max<int64_t>(0, length - 1));
  if (length == 0) {
    written = 0;
  }
}

Rows::Rows(const LlmProgram& program, bool reuse) : program_(program), reuse_(reuse), rows_(program.metadata().rows) {
  for (size_t i = 0; i < rows_.size(); ++i) {
    rows_[i].index = static_cast<int64_t>(i);
  }
}

bool Rows::has_free() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.request == nullptr; });
}

bool Rows::has_beginning(std::span<const int64_t> prompt, const Conditions& conditions) const {
  return reuse_ && std::any_of(rows_.begin(), rows_.end(), [&](const Row& row) {
    const std::span<const int64_t> ids = row.request != nullptr ? row.request->ids : row.ids;
    return row.has_same(conditions) && common_length(ids, prompt) >= kMinPrefix;
  });
}

// Returns how many tokens at the beginning of `prompt` the row holds, at most `limit`. Returns 0 if the row cannot
// rewind to the end of these tokens.
int64_t Rows::usable_prefix_length(
    const Row& row, std::span<const int64_t> prompt, int64_t limit, const Conditions& conditions) const {
  if (!row.has_same(conditions)) {
    return 0;
  }
  const int64_t length = std::min(limit, common_length(prompt, row.ids));
  return reuse_ && row.written - length <= program_.metadata().max_rewind ? length : 0;
}

Row* Rows::take(std::span<const int64_t> prompt, int64_t limit, const Conditions& conditions) {
  Row* oldest = nullptr; // of the free rows
  Row* source = nullptr; // the row with the longest beginning of the prompt; if there are several, a free one
  int64_t longest = 0;
  for (Row& row : rows_) {
    const bool is_free = row.request == nullptr;
    // Without reuse, the first free row is as good, and an NVIDIA GPU then sees the same calls again, which it replays.
    if (is_free && (oldest == nullptr || (reuse_ && row.last_used < oldest->last_used))) {
      oldest = &row;
    }
    const int64_t length = usable_prefix_length(row, prompt, limit, conditions);
    if (length > longest || (length == longest && length > 0 && is_free)) {
      source = &row;
      longest = length;
    }
  }
  if (oldest == nullptr || source == nullptr) {
    if (oldest != nullptr) {
      oldest->truncate(0);
    }
    return oldest;
  }
  // The request takes over the source if the source is free and little is lost: if it is the oldest row, or if it holds
  // few tokens behind the prefix. Otherwise a long prefix is copied to the oldest row.
  const bool is_free = source->request == nullptr;
  const int64_t lost = static_cast<int64_t>(source->ids.size()) - longest;
  const bool takes_over = is_free && (source == oldest || lost <= longest / 4);
  if (!takes_over && longest >= kMinPrefix && copy_row(program_, *source, *oldest, longest)) {
    return oldest;
  }
  // Nothing was copied. A free source is also taken over if a long prefix could not be copied, although its tokens
  // behind the prefix are lost. Otherwise the request gets the oldest row: a short prefix, such as a first token that
  // all prompts have, is not worth the tokens of the source.
  Row* row = takes_over || (is_free && longest >= kMinPrefix) ? source : oldest;
  row->truncate(row == source ? longest : usable_prefix_length(*oldest, prompt, limit, conditions));
  return row;
}

void Rows::clone(const Row& row) {
  check_argument(rows_.size() > 1, "clone: the program has one row");
  Row* target = nullptr;
  for (Row& other : rows_) {
    if (&other != &row && other.request == nullptr && (target == nullptr || other.last_used < target->last_used)) {
      target = &other;
    }
  }
  check(target != nullptr, EXECUTORCH_MLX_BUSY, "clone: no other row is free");
  check_argument(copy_row(program_, row, *target, static_cast<int64_t>(row.ids.size())),
      "clone: the program keeps state that cannot be copied");
  target->samples = row.samples;
  target->adapter = row.adapter;
  target->last_used = ++clock_;
}

void Rows::forget_mtp() {
  for (Row& row : rows_) {
    row.mtp_length = 0;
  }
}

void Rows::forget() {
  for (Row& row : rows_) {
    row.truncate(0);
    row.samples.reset();
  }
}

void Rows::release(Row& row, bool is_valid) {
  row.request.reset();
  row.last_used = ++clock_;
  if (!is_valid) {
    row.truncate(0);
    row.samples.reset();
  }
}

} // namespace executorch_mlx::engine
