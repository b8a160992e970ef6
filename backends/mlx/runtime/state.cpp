#include "state.h"

#include <algorithm>
#include <utility>

#include "evaluation.h"
#include "memory.h"

namespace executorch_mlx {

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
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    auto contents = std::exchange(tensors[layout_.buffers_begin() + i], std::nullopt);
    if (!buffers_[i]->contents) {
      buffers_[i]->contents = std::move(contents);
    }
  }
  // Releases the constants that the init chain has replaced.
  std::erase_if(constants_, [&](const auto& held) { return tensors[held.first]->id() != held.second->id(); });
}

void State::begin(bool keep_backup) {
  keeps_backup_ = keep_backup;
  has_lost_buffers_ = false;
  for (const auto& [slot, array] : initial_tensors_) {
    tensors[slot] = array;
  }
  values = initial_values_;
  buffers_backup_.resize(layout_.buffers);
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
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
  return_buffers();
}

void State::rollback() {
  // Without a backup, the buffers keep what the call has written.
  std::copy(
      buffers_backup_.begin(), buffers_backup_.end(), tensors.begin() + layout_.buffers_begin());
  if (caches_backup_) {
    caches_ = std::move(*caches_backup_);
  }
  drop_backup();
  return_buffers();
  release_temporaries();
}

bool State::is_lost() const {
  const auto lost = [](const auto& buffer) { return !buffer->contents; };
  return std::any_of(buffers_.begin(), buffers_.end(), lost) || (shared_caches_ && shared_caches_->is_lost);
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

// The buffers' arrays that nobody else holds once the backup is dropped.
std::vector<std::uintptr_t> State::backup_ids() const {
  std::vector<std::uintptr_t> ids;
  const auto add = [&](const std::optional<mx::array>& array) {
    if (array) {
      ids.push_back(array->id());
    }
  };
  std::for_each(buffers_backup_.begin(), buffers_backup_.end(), add);
  if (caches_backup_) {
    for (const auto& [layer, cache] : *caches_backup_) {
      add(cache.keys);
      add(cache.values);
    }
  }
  return ids;
}

void State::evaluate(std::vector<mx::array> arrays, mx::Stream stream, bool ends_call) {
  const bool is_limited = has_memory_limit();
  const bool keeps = keeps_backup_ || (is_limited && !ends_call);
  const bool risks_buffers = !keeps && !pending().empty();
  Evaluation evaluation(std::move(arrays), stream, is_limited && !keeps ? backup_ids() : std::vector<std::uintptr_t>());
  if (!keeps) {
    drop_backup();
  }
  try {
    evaluation.run();
  } catch (...) {
    has_lost_buffers_ = risks_buffers;
    throw;
  }
}

} // namespace executorch_mlx
