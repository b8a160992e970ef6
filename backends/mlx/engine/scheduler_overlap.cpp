// Overlap: the scheduler submits a step or a prompt before the host has read the tokens of the previous one.
#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "scheduler.h"

namespace executorch_mlx::engine {

// Whether a step of this request may be submitted before the host knows the token of the previous step.
bool Scheduler::can_overlap(const Request& request) const {
  const RequestOptions& options = request.options;
  return overlaps_ && !request.samples_on_host && !request.needs_mask() && !program_.metadata().speech.is_speech() &&
      (guesser_ == nullptr || options.draft == 0);
}

// Whether this request needs a draw after its pending one, unless the pending token turns out to end the answer.
bool Scheduler::needs_draw_after_pending(const Request& request) const {
  if (request.is_over()) {
    return false;
  }
  const auto generated = static_cast<int64_t>(request.ids.size() - request.options.prompt.size());
  const auto position = static_cast<int64_t>(request.ids.size());
  const int64_t most = request.options.max_new_tokens;
  return (most == 0 || generated + 1 < most) && position < program_.metadata().max_context_len;
}

// Whether the next step can be submitted before the pending tokens are read. This is so if it makes the same calls as
// the pending step, except for requests that certainly end with their pending token.
bool Scheduler::may_follow_pending() {
  const size_t running =
      std::count_if(running_.begin(), running_.end(), [](const auto& request) { return request->is_decoding; });
  size_t pending = 0;
  for (const PendingStep& step : pending_) {
    if (!step.draw.can_be_source()) {
      return false;
    }
    for (const auto& request : step.requests) {
      pending += !request->is_over();
      if (needs_draw_after_pending(*request) && !propose(request, running).tokens.empty()) {
        return false; // a draft is likely to pay as soon as the pending token is known
      }
    }
  }
  return pending == running && (running < 2 || prefers_single_steps(running) == (pending_.size() > 1));
}

// Submits the calls of the next step, and takes the tokens of the pending calls.
//
// Also records what a step costs: the time from the end of this function to its next end, if nothing else ran. A single
// call says little, because the host submits one while the device computes another.
void Scheduler::advance_pending() {
  const auto begin = std::exchange(advanced_, std::nullopt);
  const size_t calls = pending_.size();
  const size_t running = pending_[0].requests.size(); // of the only call, or 1
  for (PendingStep& step : std::exchange(pending_, {})) {
    Requests requests;
    std::copy_if(step.requests.begin(), step.requests.end(), std::back_inserter(requests),
        [this](const auto& request) { return needs_draw_after_pending(*request); });
    if (step.resets != resets_) {
      continue; // the requests draw again
    }
    std::optional<PendingStep> next;
    std::exception_ptr error;
    try {
      if (!requests.empty()) {
        next = submit(requests, &step);
      }
    } catch (...) {
      error = std::current_exception(); // ends only requests that their pending token does not end
    }
    if (!program_.is_undefined()) {
      finish(std::move(step));
    }
    if (error != nullptr) {
      // Only now, because the tokens of `step` belong into the rows first.
      guarded(
          requests, [&] { fits(requests, max_rows_, std::ssize(requests), [&] { std::rethrow_exception(error); }); });
    }
    if (next && next->resets == resets_ &&
        std::any_of(requests.begin(), requests.end(), [](const auto& request) { return !request->is_over(); })) {
      pending_.push_back(std::move(*next));
    } else if (next) {
      finish(std::move(*next));
    }
  }
  if (pending_.size() < calls || pending_[0].requests.size() < running) {
    return; // a request has ended
  }
  advanced_ = Clock::now();
  if (begin) {
    const double seconds = std::chrono::duration<double>(*advanced_ - *begin).count() / static_cast<double>(calls);
    running == 1 ? costs_.record_one_row(1, seconds) : costs_.record_rows(program_.decode_width(running), seconds);
  }
}

// Submits the last chunk of a prompt, and then takes the tokens of the calls before. The device computes the prompt
// meanwhile, and when it is done, the next prompt may be submitted.
void Scheduler::submit_prompt(const std::shared_ptr<Request>& request) {
  PendingStep prompt = submit(Requests{request});
  finish_pending();
  pending_.push_back(std::move(prompt));
}

// Submits the next draw of each request, in one call. With `source`, a pending step of these requests, the call takes
// the tokens of `source` on the device.
Scheduler::PendingStep Scheduler::submit(Requests requests, const PendingStep* source) {
  const auto begin = Clock::now();
  const bool is_ahead = source != nullptr;
  std::vector<RowTask> tasks;
  std::vector<size_t> sources;
  for (const auto& request : requests) {
    std::vector<int64_t> no_draft;
    RowTask task = request->draw_task(no_draft);
    task.seed = request->seed_of_draw(is_ahead ? 1 : 0);
    const std::span<const int64_t> ids = request->ids;
    const size_t done = request->row->ids.size();
    is_ahead ? place(task, *request, ids.last(1), ids.size()) : place(task, *request, ids.subspan(done), done);
    tasks.push_back(task);
    if (source != nullptr) {
      sources.push_back(
          std::find(source->requests.begin(), source->requests.end(), request) - source->requests.begin());
    }
  }
  PendingDraw draw = program_.submit_draw(tasks, source == nullptr ? nullptr : &source->draw, sources);
  return {std::move(requests), std::move(draw), begin, resets_};
}

// Waits for the tokens of a call, and gives them to the requests that are not over.
void Scheduler::finish(PendingStep step) {
  if (step.resets != resets_) {
    return; // the requests draw again
  }
  guarded(step.requests, [&] {
    const auto drawn = program_.finish_draw(step.draw);
    const auto now = Clock::now();
    // Calls run one after the other: this one began when it was submitted, or later, when the previous one ended.
    const double seconds = std::chrono::duration<double>(now - std::max(step.submitted, finished_)).count();
    finished_ = now;
    count_steps(1, 0, seconds);
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const auto& request = step.requests[i];
      if (!request->is_over()) {
        take_plain(request, std::span(request->ids).subspan(request->row->ids.size()), drawn[i]);
      }
    }
  });
}

void Scheduler::finish_pending() {
  advanced_.reset();
  for (PendingStep& step : std::exchange(pending_, {})) {
    finish(std::move(step));
  }
}

} // namespace executorch_mlx::engine
