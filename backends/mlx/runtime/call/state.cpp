#include "call/state.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "dtype.h"
#include "memory/host_memory.h"
#include "memory/limit.h"

namespace executorch_mlx {

namespace {

// Whether only kernels read the elements of a buffer during a call. The host reads integers, such as positions, and
// single numbers while it builds a graph.
bool is_read_only_by_kernels(const mx::array& x) {
  return is_float(x.dtype()) && x.size() > 1;
}

// Whether x holds an array that has been computed, or that a kernel which has been submitted computes.
bool is_computed(const std::optional<mx::array>& x) {
  return x && x->status() != mx::array::Status::unscheduled;
}

bool is_computed(const KvLayer& cache) {
  return cache.is_empty() || (is_computed(cache.keys) && is_computed(cache.values));
}

// The computed contents from which a buffer can be restored: x itself or, if x is a pending update, the array that it
// updates. nullopt if neither is computed.
std::optional<mx::array> restorable(const std::optional<mx::array>& x) {
  const auto contents = x ? std::optional(array_before_updates(*x)) : std::nullopt;
  return is_computed(contents) ? contents : std::nullopt;
}

} // namespace

State::State(const Layout& layout)
    : tensors(layout.num_tensors()), values(layout.values), layout_(layout), buffers_(layout.buffers) {}

void State::set_constant(uint32_t slot, std::shared_ptr<const mx::array> constant) {
  tensors[slot] = *constant;
  constants_.emplace_back(slot, std::move(constant));
}

void State::set_buffer(uint32_t slot, std::shared_ptr<Buffer> buffer) {
  buffers_[slot - layout_.buffers_begin()] = std::move(buffer);
}

void State::set_caches(std::shared_ptr<Caches> caches) {
  shared_caches_ = std::move(caches);
}

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
  constant_results.clear();  // the init chain may have written constants
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    auto contents = std::exchange(tensors[layout_.buffers_begin() + i], std::nullopt);
    if (!buffers_[i]->contents) {
      buffers_[i]->contents = std::move(contents);
    }
  }
  // Releases the constants that the init chain has replaced.
  std::erase_if(constants_, [&](const auto& held) { return tensors[held.first]->id() != held.second->id(); });
}

void State::begin(bool keep_backup, bool restores_buffers) {
  keeps_backup_ = keep_backup;
  restores_buffers_ = restores_buffers;
  has_lost_buffers_ = false;
  for (const auto& [slot, array] : initial_tensors_) {
    tensors[slot] = array;
  }
  values = initial_values_;
  buffers_backup_.resize(layout_.buffers);
  buffers_undo_.resize(layout_.buffers);
  in_place_.resize(layout_.buffers);
  memory_before_.clear();
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    const auto& contents = buffers_[i]->contents;
    memory_before_.push_back({contents->data_shared_ptr().get(), contents->data_shared_ptr().use_count() == 1});
    buffers_backup_[i] = buffers_[i]->contents;
    tensors[layout_.buffers_begin() + i] = std::exchange(buffers_[i]->contents, std::nullopt);
  }
  if (shared_caches_) {
    caches_ = std::exchange(shared_caches_->layers, {});
    caches_backup_ = caches_;
  }
}

void State::drop_backup() {
  buffers_backup_.clear();
  caches_backup_.reset();
  buffers_undo_.clear();
  caches_undo_.clear();
}

void State::drop_backup_of_pending() {
  const auto drop = [](std::optional<mx::array>& backup, const std::optional<mx::array>& now) {
    if (now && !is_computed(now)) {
      backup.reset();
    }
  };
  for (uint32_t i = 0; i < buffers_backup_.size(); ++i) {
    drop(buffers_backup_[i], tensors[layout_.buffers_begin() + i]);
  }
  if (caches_backup_) {
    for (auto& [layer, backup] : *caches_backup_) {
      const KvLayer& now = caches_.at(layer);
      drop(backup.keys, now.keys);
      drop(backup.values, now.values);
    }
  }
}

void State::back_up_computed() {
  for (uint32_t i = 0; i < buffers_backup_.size(); ++i) {
    if (!buffers_backup_[i] && !in_place_[i].array()) {
      buffers_backup_[i] = restorable(tensors[layout_.buffers_begin() + i]);
    }
  }
  if (!caches_backup_) {
    return;
  }
  for (auto& [layer, backup] : *caches_backup_) {
    const KvLayer& now = caches_.at(layer);
    if (is_computed(backup)) {
      continue;
    }
    if (is_computed(now)) {
      backup = now;
      continue;
    }
    backup.keys = backup.keys ? backup.keys : restorable(now.keys);
    backup.values = backup.values ? backup.values : restorable(now.values);
  }
}

template <typename Write>
bool State::write_in_place(uint32_t slot, Write&& write) {
  if (keeps_backup_ || slot < layout_.buffers_begin() || slot >= layout_.temps_begin() || in_place_.empty()) {
    return false;
  }
  const uint32_t i = slot - layout_.buffers_begin();
  return write(in_place_[i], buffers_backup_.empty() ? nullptr : &buffers_backup_[i]);
}

bool State::update_in_place(
    uint32_t slot, mx::array& x, const mx::array& update, const mx::Shape& start, const mx::Shape& stop,
    const mx::Shape& steps) {
  return write_in_place(slot, [&](InPlaceUpdates& updates, std::optional<mx::array>* backup) {
    return updates.write(x, backup, update, start, stop, steps, restores_buffers_);
  });
}

bool State::update_positions_in_place(
    uint32_t slot, mx::array& x, const mx::array& update, const mx::Shape& positions) {
  return write_in_place(slot, [&](InPlaceUpdates& updates, std::optional<mx::array>* backup) {
    return updates.write_positions(x, backup, update, positions, restores_buffers_);
  });
}

bool State::can_update_in_place(uint32_t slot, const mx::array& x) {
  const bool is_buffer = slot >= layout_.buffers_begin() && slot < layout_.temps_begin();
  if (keeps_backup_ || has_memory_limit() || !is_buffer || buffers_backup_.empty()) {
    return false;
  }
  auto& backup = buffers_backup_[slot - layout_.buffers_begin()];
  return holds(backup, x) && executorch_mlx::can_update_in_place(x, &backup);
}

// Where earlier evaluations of the call have overwritten slices of the backup, writes the old contents back.
void State::undo_updates(mx::Stream stream) {
  std::vector<mx::array> restored;
  const auto restore = [&](std::optional<mx::array>& backup, const Undo& undo) {
    if (backup && !undo.is_empty()) {
      restored.push_back(*(backup = undo.apply(*backup, stream)));
    }
  };
  for (size_t i = 0; i < buffers_backup_.size(); ++i) {
    restore(buffers_backup_[i], buffers_undo_[i]);
  }
  for (auto& [layer, undo] : caches_undo_) {
    KvLayer& backup = caches_backup_->at(layer);
    restore(backup.keys, undo.first);
    restore(backup.values, undo.second);
  }
  if (!restored.empty()) {
    std::lock_guard lock(memory_mutex());  // the memory limit is not checked here
    mx::eval(std::move(restored));
  }
}

void State::return_buffers() {
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    buffers_[i]->contents = std::exchange(tensors[layout_.buffers_begin() + i], std::nullopt);
    if (has_lost_buffers_) {
      buffers_[i]->contents.reset();
    }
  }
  if (shared_caches_) {
    shared_caches_->layers = std::exchange(caches_, {});
    shared_caches_->is_lost = has_lost_buffers_;
  }
}

void State::commit() {
  drop_backup();
  in_place_.clear();
  return_buffers();
}

void State::rollback(mx::Stream stream) {
  settle(stream);
  for (uint32_t i = 0; i < in_place_.size(); ++i) {
    auto restored = in_place_[i].undo();
    if (!buffers_backup_[i]) {  // else the backup is of an earlier array
      buffers_backup_[i] = std::move(restored);
    }
  }
  try {
    undo_updates(stream);
  } catch (...) {
    settle(stream);
    has_lost_buffers_ = true;
  }
  // What has no backup keeps what the call has written, if that is computed.
  back_up_computed();
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    auto& contents = tensors[layout_.buffers_begin() + i];
    if (buffers_backup_[i]) {
      contents = std::move(buffers_backup_[i]);
    }
    has_lost_buffers_ |= !is_computed(contents);
  }
  if (caches_backup_) {
    caches_ = std::move(*caches_backup_);
  }
  for (const auto& [layer, cache] : caches_) {
    has_lost_buffers_ |= !is_computed(cache);
  }
  drop_backup();
  in_place_.clear();
  return_buffers();
  release_temporaries();
}

bool State::is_lost() const {
  const auto lost = [](const auto& buffer) { return !buffer->contents; };
  return std::any_of(buffers_.begin(), buffers_.end(), lost) || (shared_caches_ && shared_caches_->is_lost);
}

void State::lose_buffers() {
  for (const auto& buffer : buffers_) {
    buffer->contents.reset();
  }
  if (shared_caches_) {
    shared_caches_->is_lost = true;
  }
}

size_t State::buffer_bytes() const {
  size_t bytes = 0;
  for (const auto& buffer : buffers_) {
    bytes += buffer->contents ? buffer->contents->nbytes() : 0;
  }
  return bytes;
}

void State::release_temporaries() {
  for (uint32_t i = layout_.inputs_begin(); i < layout_.buffers_begin(); ++i) {
    tensors[i].reset();
  }
  for (uint32_t i = layout_.temps_begin(); i < layout_.num_tensors(); ++i) {
    tensors[i].reset();
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

std::vector<State::Changed> State::changed() {
  std::vector<Changed> arrays;
  for (uint32_t i = 0; i < buffers_backup_.size(); ++i) {
    arrays.push_back({&buffers_backup_[i], &tensors[layout_.buffers_begin() + i], &buffers_undo_[i]});
  }
  if (caches_backup_) {
    for (auto& [layer, backup] : *caches_backup_) {
      const KvLayer& now = caches_.at(layer);
      auto& [keys, values] = caches_undo_[layer];
      arrays.push_back({&backup.keys, &now.keys, &keys});
      arrays.push_back({&backup.values, &now.values, &values});
    }
  }
  std::erase_if(arrays, [](const Changed& x) { return !*x.backup || !*x.now || (*x.backup)->id() == (*x.now)->id(); });
  return arrays;
}

std::vector<InPlaceUpdates*> State::superseded_updates() {
  std::vector<InPlaceUpdates*> result;
  for (uint32_t i = 0; i < in_place_.size(); ++i) {
    const auto& now = tensors[layout_.buffers_begin() + i];
    if (in_place_[i].array() && now && !now->is_available()) {
      result.push_back(&in_place_[i]);
    }
  }
  return result;
}

template <typename Body>
void State::run(bool risks_buffers, Body&& body) {
  try {
    body();
  } catch (...) {
    has_lost_buffers_ = risks_buffers;
    throw;
  }
}

void State::evaluate(std::vector<mx::array> arrays, mx::Stream stream, bool ends_call) {
  const bool is_limited = has_memory_limit();
  if (!ends_call && !keeps_backup_ && (restores_buffers_ || is_limited)) {
    return evaluate_undoably(std::move(arrays), stream);
  }
  const auto changed_buffers = pending();
  const bool risks_buffers = !keeps_backup_ && !changed_buffers.empty();
  if (!ends_call && !keeps_backup_) {
    // After the evaluation, these buffers would have neither a backup nor contents from which to restore them.
    std::copy_if(
        changed_buffers.begin(), changed_buffers.end(), std::back_inserter(arrays),
        [](const mx::array& x) { return !restorable(x); });
  }
  const auto superseded = superseded_updates();
  std::vector<std::uintptr_t> overwritable;
  if (is_limited && !keeps_backup_) {
    for (const auto& array : changed()) {
      overwritable.push_back((*array.backup)->id());
    }
    for (const auto* updates : superseded) {
      overwritable.push_back(updates->array()->id());
    }
  }
  Evaluation evaluation(std::move(arrays), stream, overwritable);
  if (!keeps_backup_) {
    drop_backup_of_pending();
    for (auto* updates : superseded) {
      *updates = {};
    }
  }
  run(risks_buffers, [&] { evaluation.run(); });
  if (!ends_call) {
    back_up_computed();
  }
}

void State::submit(std::vector<mx::array> arrays, mx::Stream stream) {
  if (keeps_backup_ || has_memory_limit() || shared_caches_) {
    return evaluate(std::move(arrays), stream, /*ends_call=*/true);
  }
  const bool risks_buffers = !pending().empty();
  const auto superseded = superseded_updates();
  Evaluation evaluation(std::move(arrays), stream);
  drop_backup_of_pending();
  for (auto* updates : superseded) {
    *updates = {};
  }
  run(risks_buffers, [&] { evaluation.start(); });
}

// Whether only the contents of this buffer use their memory after the call, apart from kernels that have been
// submitted. `outputs` are the arrays that the caller keeps.
bool State::owns_memory(uint32_t buffer, const std::vector<mx::array>& outputs) const {
  const void* const data = tensors[layout_.buffers_begin() + buffer]->data_shared_ptr().get();
  const auto uses_data = [&](const std::optional<mx::array>& x) { return x && x->data_shared_ptr().get() == data; };
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
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    auto& x = tensors[layout_.buffers_begin() + i];
    const bool is_computed = x && x->status() != mx::array::Status::unscheduled && x->data_shared_ptr();
    if (!is_computed || x->data_shared_ptr().use_count() == 1 || !x->data_shared_ptr()->is_owned() ||
        !owns_memory(i, outputs)) {
      continue;
    }
    mx::array own = without_memory(x->shape(), x->dtype());
    own.set_data(std::move(*x->data_shared_ptr()), x->data_size(), x->strides(), x->flags(), x->offset());
    if (!is_read_only_by_kernels(*x)) {
      own.attach_event(x->event());
      own.set_status(x->status());
    } else if (x->event().valid()) {  // else this call has not written the buffer, and `written` stays as it is
      mx::array& written = buffers_[i]->written.emplace(without_memory({0}, x->dtype()));
      written.attach_event(x->event());
      written.set_status(x->status());
    }
    x = std::move(own);
  }
}

// Evaluates arrays in the middle of a call so that rollback() can restore the buffers. For a buffer that is updated by
// slices, saves the slices and lets go of the backup, so that MLX updates the buffer in place. Any other buffer keeps
// its backup, and MLX writes the new contents to new memory.
void State::evaluate_undoably(std::vector<mx::array> arrays, mx::Stream stream) {
  std::vector<mx::array> saved;
  std::vector<Changed> updated;
  std::vector<std::uintptr_t> overwritable;
  for (const auto& array : changed()) {
    if (array.undo->record(**array.backup, **array.now, stream, saved)) {
      updated.push_back(array);
      overwritable.push_back((*array.backup)->id());
    }
  }
  if (!saved.empty()) {
    executorch_mlx::evaluate(std::move(saved), stream);
  }
  Evaluation evaluation(std::move(arrays), stream, overwritable);
  for (const auto& array : updated) {
    array.backup->reset();
  }
  run(!updated.empty(), [&] { evaluation.run(); });
  for (const auto& array : updated) {
    *array.backup = array_before_updates(**array.now);
  }
}

} // namespace executorch_mlx
