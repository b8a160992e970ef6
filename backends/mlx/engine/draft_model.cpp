#include "draft_model.h"

#include <algorithm>
#include <exception>

#include "check.h"

namespace executorch_mlx::engine {

void check_draft(const LlmProgram& program, const LlmProgram& draft) {
  check_argument(program.max_verify() > 1, "draft: ", program.path(), " was exported without the method verify");
  check_argument(program.max_draft() > 0, "draft: ", program.path(),
      " has states without the method rewind, and cannot go back behind wrong draft tokens");
  check_argument(
      draft.metadata().has_head, "draft: ", draft.path(), ": got a program that returns logits, expected tokens");
  check_argument(draft.metadata().max_rewind > 0 || draft.prompt_buffers() != nullptr, "draft: ", draft.path(),
      " has states outside of MLX, and cannot go back behind wrong draft tokens");
  if (!program.has_token_bytes() || !draft.has_token_bytes()) {
    return;
  }
  const int64_t count = std::min(program.metadata().vocab_size, draft.metadata().vocab_size);
  for (int64_t token = 0; token < count; ++token) {
    const auto expected = program.token_bytes(token), got = draft.token_bytes(token);
    // Padding of the vocabulary has no bytes.
    check_argument(got == expected || got.empty() || expected.empty(), "draft: ", draft.path(), ": token ", token,
        " is another one than in ", program.path(), ", expected the same tokenizer");
  }
}

std::vector<int64_t> Guesser::propose(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk) {
  if (has_failed_) {
    return {};
  }
  begin_ = Clock::now();
  try {
    recover();
    return guess(request, count, chunk);
  } catch (const std::exception&) { // the delegate has logged the reason; the answer does not depend on drafts
    has_failed_ = true;
    forget(*request);
    return {};
  }
}

std::vector<int64_t> Guesser::draw_all(const Request& request, std::span<const int64_t> rest, RowTask task,
    int64_t count, int64_t chunk, const std::function<void()>& before_drafts) {
  const bool only_reads = static_cast<int64_t>(rest.size()) > chunk;
  task.tokens = only_reads ? rest.first(chunk) : rest;
  task.sampling = &request.options.sampling;
  task.seed = request.seed_of_draw(0);
  std::vector<int64_t> draft = {draw(task)};
  if (only_reads) {
    return {};
  }
  if (count > 1 && before_drafts) {
    before_drafts();
  }
  while (static_cast<int64_t>(draft.size()) < count && !request.is_stop_id(draft.back())) {
    task.seed = request.seed_of_draw(draft.size());
    task.position += static_cast<int64_t>(task.tokens.size());
    task.tokens = std::span(draft).last(1);
    draft.push_back(draw(task));
  }
  // A longer `rest` is a part of the prompt, which later drafts do not read again.
  if (static_cast<int64_t>(rest.size()) <= StepCosts::kMaxDraft + 1) {
    const std::chrono::duration<double> seconds = Clock::now() - begin_;
    record_seconds(is_warm_, seconds_, seconds.count() / static_cast<double>(draft.size()));
  }
  return draft;
}

std::vector<int64_t> DraftModel::guess(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk) {
  const LlmMetadata& meta = program_.metadata();
  const std::span<const int64_t> ids = request->ids;
  const auto length = static_cast<int64_t>(ids.size());
  count = std::min(count, meta.max_context_len - length + 1);
  if (count < 1) {
    return {};
  }
  if (request->draft_row == nullptr) {
    if (!rows_.has_free()) {
      return {};
    }
    request->draft_row = rows_.take(ids, length - 1);
    request->draft_row->request = request;
    before_drafts_[request->draft_row->index].reset();
  }
  Row& row = *request->draft_row;
  // The row may hold draft tokens that were rejected.
  const auto held = std::span(row.ids).first(std::min<size_t>(row.ids.size(), length - 1));
  const int64_t agreed = std::mismatch(held.begin(), held.end(), ids.begin()).first - held.begin();
  auto& before = before_drafts_[row.index];
  if (row.written - agreed <= meta.max_rewind) {
    row.truncate(agreed);
  } else if (before && before->length() <= agreed) {
    before->restore(row);
  } else {
    row.truncate(0);
  }

  const auto rest = ids.subspan(row.ids.size());
  const bool is_known = std::all_of(rest.begin(), rest.end(), [&](int64_t token) { return token < meta.vocab_size; });
  if (!is_known) { // the vocabulary of the draft model may be shorter
    return {};
  }
  chunk = std::min(chunk, meta.max_seq_len);
  RowTask task;
  row.place(task, {}, row.ids.size());
  const auto draft = draw_all(*request, rest, task, count, chunk, [&] {
    if (meta.max_rewind == 0) {
      before.emplace(program_, row.index, length);
    }
  });
  row.append(draft.empty() ? rest.first(chunk) : rest);
  row.append(std::span(draft).first(std::max<size_t>(draft.size(), 1) - 1)); // the model has not read the last one
  return draft;
}

void DraftModel::release(Request& request) {
  if (request.draft_row != nullptr) {
    rows_.release(*request.draft_row, /*is_valid=*/true);
    request.draft_row = nullptr;
  }
}

void DraftModel::recover() {
  if (program_.is_undefined()) {
    rows_.forget();
    for (auto& before : before_drafts_) {
      before.reset();
    }
    program_.reset();
  }
}

void DraftModel::forget(Request& request) {
  if (request.draft_row != nullptr) {
    request.draft_row->truncate(0);
    before_drafts_[request.draft_row->index].reset();
  }
}

// At position p, the head reads the program's hidden state at p and the token at p + 1. The program has computed the
// hidden states of all tokens but the last. To guess further tokens, the head reads hidden states that it computed
// itself. `mtp_length` does not count those positions: the head reads them again with the program's hidden states.
std::vector<int64_t> MtpHead::guess(const std::shared_ptr<Request>& request, int64_t count, int64_t chunk) {
  Row& row = *request->row;
  const auto rest = std::span<const int64_t>(request->ids).subspan(row.mtp_length + 1);
  RowTask task;
  task.row_length = static_cast<int64_t>(row.ids.size());
  row.place(task, {}, row.mtp_length);
  const auto draft = draw_all(*request, rest, task, count, chunk);
  row.mtp_length += draft.empty() ? chunk : static_cast<int64_t>(rest.size());
  return draft;
}

void MtpHead::forget(Request& request) { request.row->mtp_length = 0; }

} // namespace executorch_mlx::engine
