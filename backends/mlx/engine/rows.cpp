#include "rows.h"

#include <algorithm>

namespace executorch_mlx {

void Row::append(std::span<const int64_t> tokens) {
  ids.insert(ids.end(), tokens.begin(), tokens.end());
  written = std::max(written, static_cast<int64_t>(ids.size()));
}

void Row::truncate(int64_t length) {
  ids.resize(length);
  if (length == 0) {
    written = 0;
  }
}

Rows::Rows(const LlmProgram& program, bool reuse)
    : max_rewind_(program.metadata().max_rewind), reuse_(reuse), rows_(program.metadata().rows) {
  for (size_t i = 0; i < rows_.size(); ++i) {
    rows_[i].index = static_cast<int64_t>(i);
  }
}

bool Rows::has_free() const {
  return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.request == nullptr; });
}

// The length of the longest common beginning that the row can rewind to.
int64_t Rows::usable_prefix(const Row& row, std::span<const int64_t> prompt, int64_t limit) const {
  const auto end = prompt.begin() + std::min({limit, static_cast<int64_t>(prompt.size()), static_cast<int64_t>(row.ids.size())});
  const int64_t length = std::mismatch(prompt.begin(), end, row.ids.begin()).first - prompt.begin();
  return reuse_ && row.written - length <= max_rewind_ ? length : 0;
}

Row* Rows::take(std::span<const int64_t> prompt, int64_t limit) {
  Row* best = nullptr;
  int64_t longest = 0;
  for (Row& row : rows_) {
    if (row.request != nullptr) {
      continue;
    }
    const int64_t length = usable_prefix(row, prompt, limit);
    if (best == nullptr || length > longest || (length == longest && row.last_used < best->last_used)) {
      best = &row;
      longest = length;
    }
  }
  if (best != nullptr) {
    best->truncate(longest);
  }
  return best;
}

void Rows::release(Row& row, bool is_valid) {
  row.request.reset();
  row.last_used = ++clock_;
  if (!is_valid) {
    row.truncate(0);
  }
}

} // namespace executorch_mlx
