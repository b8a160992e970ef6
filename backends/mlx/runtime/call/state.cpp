#include "call/state.h"

#include <algorithm>
#include <utility>

#include "call/in_place.h"
#include "checks.h"
#include "dtype.h"
#include "memory/limit.h"
#include "mlx_internals/arrays.h"
#include "mlx_internals/internals.h"

namespace executorch_mlx {

namespace {

// Whether only kernels read the elements of a buffer during a call. The host reads integers, such as positions, and
// single numbers while it builds a graph.
bool is_read_only_by_kernels(const mx::array& x) { return is_float(x.dtype()) && x.size() > 1; }

bool is_pending(const std::optional<mx::array>& x) { return x && x->status() == mx::array::Status::unscheduled; }

// The array that x updates, if x is a pending update of slices of another array, and so on.
const mx::array& array_before_updates(const mx::array& x) {
  const mx::array* base = &x;
  while (is_lazy(*base, "SliceUpdate")) {
    base = &base->inputs()[0];
  }
  return *base;
}

// Calls visit(before, now) for the keys and the values of a layer.
template <typename Before, typename Visit>
void for_each_part(Before& before, const KvLayer& now, Visit&& visit) {
  visit(before.keys, now.keys);
  visit(before.values, now.values);
}

} // namespace

State::State(const Layout& layout)
    : tensors(layout.num_tensors()),
      values(layout.values),
      held(layout.held),
      kept(layout.kept),
      layout_(layout),
      buffers_(layout.buffers) {}

void State::set_constant(uint32_t slot, std::shared_ptr<const mx::array> constant) {
  tensors[slot] = *constant;
  constants_.emplace_back(slot, std::move(constant));
}

void State::set_buffer(uint32_t slot, std::shared_ptr<Buffer> buffer) {
  buffers_[slot - layout_.buffers_begin()] = std::move(buffer);
}

void State::set_caches(std::shared_ptr<Caches> caches) { shared_caches_ = std::move(caches); }

KvLayer& State::cache(int layer) {
  const auto& windows = shared_caches_->windows;
  const int window = windows.empty() ? 0 : windows[layer % windows.size()];
  return caches_.try_emplace(layer, window).first->second;
}

void State::finish_loading() {
  for (uint32_t i = layout_.temps_begin(); i < layout_.num_tensors(); ++i) {
    if (tensors[i]) {
      initial_tensors_.emplace_back(i, *tensors[i]);
    }
  }
  initial_values_ = values;
  for (auto& result : kept) { // the init chain may have written constants
    result.reset();
  }
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    auto contents = std::exchange(tensors[layout_.buffers_begin() + i], std::nullopt);
    if (!buffers_[i]->contents) {
      buffers_[i]->contents = std::move(contents);
    }
  }
  // Releases the constants that the init chain has replaced.
  std::erase_if(constants_, [&](const auto& held) { return tensors[held.first]->id() != held.second->id(); });
}

void State::begin() {
  std::vector<std::optional<mx::array>> before(layout_.buffers);
  auto caches = shared_caches_ ? shared_caches_->layers : std::map<int, KvLayer>();
  memory_before_.clear();
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    before[i] = buffers_[i]->contents;
    memory_before_.push_back({internals::memory_of(*before[i]), internals::is_sole_user(*before[i])});
  }
  for (const auto& [slot, array] : initial_tensors_) {
    tensors[slot] = array;
  }
  values = initial_values_;
  // Nothing below throws.
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    tensors[layout_.buffers_begin() + i].swap(buffers_[i]->contents);
    buffers_[i]->contents.reset();
  }
  buffers_before_.swap(before);
  caches_before_.swap(caches);
  if (shared_caches_) {
    caches_.clear();
    caches_.swap(shared_caches_->layers);
  }
}

std::optional<mx::array>* State::before(uint32_t slot) {
  const bool is_buffer = slot >= layout_.buffers_begin() && slot < layout_.temps_begin();
  return is_buffer && !buffers_before_.empty() ? &buffers_before_[slot - layout_.buffers_begin()] : nullptr;
}

bool State::update_in_place(uint32_t slot, mx::array& x, const mx::array& update, const mx::Shape& start,
    const mx::Shape& stop, const mx::Shape& steps) {
  auto* const reference = before(slot);
  return reference != nullptr && write_in_place(x, *reference, update, start, stop, steps);
}

bool State::update_positions_in_place(
    uint32_t slot, mx::array& x, const mx::array& update, const mx::Shape& positions) {
  auto* const reference = before(slot);
  return reference != nullptr && write_positions_in_place(x, *reference, update, positions);
}

bool State::can_update_in_place(uint32_t slot, const mx::array& x) {
  auto* const reference = has_memory_limit() ? nullptr : before(slot);
  return reference != nullptr && executorch_mlx::can_update_in_place(x, *reference);
}

void State::drop_references_to_pending() {
  const auto drop = [](std::optional<mx::array>& before, const std::optional<mx::array>& now) {
    if (is_pending(now)) {
      before.reset();
    }
  };
  for (uint32_t i = 0; i < buffers_before_.size(); ++i) {
    drop(buffers_before_[i], tensors[layout_.buffers_begin() + i]);
  }
  for (auto& [layer, before] : caches_before_) {
    for_each_part(before, caches_.at(layer), drop);
  }
}

std::vector<std::uintptr_t> State::overwritable() const {
  std::vector<std::uintptr_t> ids;
  const auto add = [&](const std::optional<mx::array>&, const std::optional<mx::array>& now) {
    if (is_pending(now)) {
      ids.push_back(array_before_updates(*now).id());
    }
  };
  for (uint32_t i = 0; i < buffers_before_.size(); ++i) {
    add(buffers_before_[i], tensors[layout_.buffers_begin() + i]);
  }
  for (const auto& [layer, before] : caches_before_) {
    for_each_part(before, caches_.at(layer), add);
  }
  return ids;
}

void State::return_buffers() noexcept {
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    auto& contents = tensors[layout_.buffers_begin() + i];
    buffers_[i]->contents.swap(contents);
    contents.reset();
  }
  buffers_before_.clear();
  caches_before_.clear();
  if (shared_caches_) {
    shared_caches_->layers.swap(caches_);
    caches_.clear();
  }
}

void State::commit() noexcept { return_buffers(); }

bool State::abort(mx::Stream stream) noexcept {
  settle(stream);
  const auto is_whole = [](const std::optional<mx::array>& before) { return before.has_value(); };
  const auto is_whole_layer = [](const auto& layer) {
    const KvLayer& before = layer.second;
    return before.is_empty() || (before.keys && before.values);
  };
  const bool are_unchanged = std::all_of(buffers_before_.begin(), buffers_before_.end(), is_whole) &&
      std::all_of(caches_before_.begin(), caches_before_.end(), is_whole_layer);
  if (are_unchanged) {
    std::move(buffers_before_.begin(), buffers_before_.end(), tensors.begin() + layout_.buffers_begin());
    caches_.swap(caches_before_);
  }
  return_buffers();
  if (!are_unchanged) {
    drop_contents();
  }
  release_temporaries();
  return are_unchanged;
}

void State::drop_contents() noexcept {
  for (const auto& buffer : buffers_) {
    buffer->contents.reset();
    buffer->written.reset();
  }
  if (shared_caches_) {
    shared_caches_->layers.clear();
  }
}

State State::without_contents() const {
  State result(layout_);
  result.shared_caches_ = shared_caches_;
  return result;
}

bool State::has_only(const std::set<const Buffer*>& buffers) const {
  const auto is_in_buffers = [&](const auto& buffer) { return buffers.contains(buffer.get()); };
  return std::all_of(buffers_.begin(), buffers_.end(), is_in_buffers);
}

void State::reset(State& fresh, std::set<const Buffer*>& done) {
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    if (done.insert(buffers_[i].get()).second) {
      buffers_[i]->contents = std::exchange(fresh.tensors[layout_.buffers_begin() + i], std::nullopt);
      buffers_[i]->written.reset();
    }
  }
  if (shared_caches_) {
    shared_caches_->layers.clear();
  }
}

void State::release_temporaries() {
  for (uint32_t i = layout_.inputs_begin(); i < layout_.buffers_begin(); ++i) {
    tensors[i].reset();
  }
  for (uint32_t i = layout_.temps_begin(); i < layout_.num_tensors(); ++i) {
    tensors[i].reset();
  }
  for (auto& result : held) {
    result.reset();
  }
}

std::vector<mx::array> State::pending() const {
  std::vector<mx::array> result;
  for (uint32_t i = layout_.buffers_begin(); i < layout_.temps_begin(); ++i) {
    if (tensors[i] && !tensors[i]->is_available()) {
      result.push_back(*tensors[i]);
    }
  }
  for (const auto& [layer, cache] : caches_) {
    for (const auto* array : {&cache.keys, &cache.values}) {
      if (*array && !(*array)->is_available()) {
        result.push_back(**array);
      }
    }
  }
  return result;
}

void State::evaluate(std::vector<mx::array> arrays, mx::Stream stream) {
  Evaluation evaluation(
      std::move(arrays), stream, owner, has_memory_limit() ? overwritable() : std::vector<std::uintptr_t>());
  drop_references_to_pending();
  evaluation.run();
}

void State::submit(std::vector<mx::array> arrays, mx::Stream stream) {
  if (has_memory_limit() || shared_caches_) {
    return evaluate(std::move(arrays), stream);
  }
  Evaluation evaluation(std::move(arrays), stream, owner);
  drop_references_to_pending();
  evaluation.start();
}

// Whether only the contents of this buffer use their memory after the call, apart from kernels that have been
// submitted. `outputs` are the arrays that the caller keeps.
bool State::owns_memory(uint32_t buffer, const std::vector<mx::array>& outputs) const {
  const void* const data = internals::memory_of(*tensors[layout_.buffers_begin() + buffer]);
  const auto uses_data = [&](const std::optional<mx::array>& x) { return x && internals::memory_of(*x) == data; };
  const auto any_slot_uses_data = [&](uint32_t begin, uint32_t end) {
    return std::any_of(tensors.begin() + begin, tensors.begin() + end, uses_data);
  };
  const uint32_t slot = layout_.buffers_begin() + buffer;
  if (std::any_of(outputs.begin(), outputs.end(), uses_data) || any_slot_uses_data(layout_.buffers_begin(), slot) ||
      any_slot_uses_data(slot + 1, layout_.temps_begin())) {
    return false;
  }
  if (memory_before_[buffer].data == data) {
    return memory_before_[buffer].is_unshared;
  }
  // Memory that this call has allocated is unshared. Memory from before the call may belong to another buffer, a
  // constant or a temporary of the init chain.
  const auto is_data = [&](const Memory& memory) { return memory.data == data; };
  const auto initial_uses_data = [&](const auto& initial) { return uses_data(initial.second); };
  return std::none_of(memory_before_.begin(), memory_before_.end(), is_data) &&
      !any_slot_uses_data(0, layout_.inputs_begin()) &&
      std::none_of(initial_tensors_.begin(), initial_tensors_.end(), initial_uses_data);
}

// While a kernel runs, and for a moment after it, MLX holds references to the Data objects of its arrays. It updates an
// array in place only if nothing else refers to the array's Data. This function therefore gives the buffers new Data
// objects for the same memory. An update cannot overtake the kernels, because it runs on the same stream, or waits for
// it as in index_copy(). So the kernels of the next call need no event either: MLX would ask the driver about the event
// of each buffer, which takes a microsecond. Only the host has to wait before it reads the memory: see Buffer::written.
void State::take_over_memory(const std::vector<mx::array>& outputs) {
  if (!internals::are_usable()) {
    return;
  }
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    auto& x = tensors[layout_.buffers_begin() + i];
    if (!x || !internals::can_take_over(*x) || !owns_memory(i, outputs)) {
      continue;
    }
    mx::array own = internals::take_over(*x);
    if (!is_read_only_by_kernels(*x)) {
      internals::wait_as(own, *x);
    } else if (x->event().valid()) { // else this call has not written the buffer, and `written` stays as it is
      internals::wait_as(buffers_[i]->written.emplace(internals::without_memory({0}, x->dtype())), *x);
    }
    x = std::move(own);
  }
}

void State::set_written(const mx::array& later) {
  for (const auto& buffer : buffers_) {
    internals::wait_as(buffer->written.emplace(internals::without_memory({0}, later.dtype())), later);
  }
}

} // namespace executorch_mlx
