#include "state.h"

#include <algorithm>
#include <utility>

#include "device.h"

namespace executorch_mlx {

State::State(const Layout& layout)
    : tensors(layout.num_tensors()), values(layout.values), layout_(layout), buffers_(layout.buffers) {}

void State::hold(uint32_t slot, std::shared_ptr<const mx::array> constant) {
  tensors[slot] = *constant;
  constants_.emplace_back(slot, std::move(constant));
}

void State::attach(uint32_t slot, std::shared_ptr<Buffer> buffer) {
  buffers_[slot - layout_.buffers_begin()] = std::move(buffer);
}

void State::attach(std::shared_ptr<Caches> caches) {
  shared_caches_ = std::move(caches);
}

KvLayer& State::cache(int layer) {
  const auto& windows = shared_caches_->windows;
  const int window = windows.empty() ? 0 : windows[layer % windows.size()];
  return caches_.try_emplace(layer, window).first->second;
}

void State::keep() {
  for (uint32_t i = layout_.temps_begin(); i < layout_.num_tensors(); ++i) {
    if (tensors[i]) {
      kept_tensors_.emplace_back(i, *tensors[i]);
    }
  }
  kept_values_ = values;
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    auto cells = std::exchange(tensors[layout_.buffers_begin() + i], std::nullopt);
    if (!buffers_[i]->cells) {
      buffers_[i]->cells = std::move(cells);
    }
  }
  // Nobody reads what the init chain has written over.
  std::erase_if(constants_, [&](const auto& held) { return tensors[held.first]->id() != held.second->id(); });
}

void State::begin(bool undoable) {
  is_undoable_ = undoable;
  is_losing_ = false;
  for (const auto& [slot, array] : kept_tensors_) {
    tensors[slot] = array;
  }
  values = kept_values_;
  buffers_before_.resize(layout_.buffers);
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    buffers_before_[i] = buffers_[i]->cells;
    tensors[layout_.buffers_begin() + i] = std::exchange(buffers_[i]->cells, std::nullopt);
  }
  if (shared_caches_) {
    caches_ = std::exchange(shared_caches_->layers, {});
    caches_before_ = caches_;
  }
}

void State::forget_before() {
  buffers_before_.clear();
  caches_before_.reset();
}

void State::bring_back() {
  for (uint32_t i = 0; i < layout_.buffers; ++i) {
    buffers_[i]->cells = std::exchange(tensors[layout_.buffers_begin() + i], std::nullopt);
    if (is_losing_) {
      buffers_[i]->cells.reset();
    }
  }
  if (shared_caches_) {
    shared_caches_->layers = std::exchange(caches_, {});
    shared_caches_->is_lost = is_losing_;
  }
}

void State::commit() {
  forget_before();
  bring_back();
}

void State::rollback() {
  // Empty after an evaluation: then the buffers keep what the call has made of them.
  std::copy(
      buffers_before_.begin(), buffers_before_.end(), tensors.begin() + layout_.buffers_begin());
  if (caches_before_) {
    caches_ = std::move(*caches_before_);
  }
  forget_before();
  bring_back();
  release_temporaries();
}

bool State::is_lost() const {
  const auto lost = [](const auto& buffer) { return !buffer->cells; };
  return std::any_of(buffers_.begin(), buffers_.end(), lost) || (shared_caches_ && shared_caches_->is_lost);
}

size_t State::buffer_bytes() const {
  size_t bytes = 0;
  for (const auto& buffer : buffers_) {
    bytes += buffer->cells ? buffer->cells->nbytes() : 0;
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
    for (const auto* cells : {&cache.keys, &cache.values}) {
      if (*cells && !(*cells)->is_available()) {
        result.push_back(**cells);
      }
    }
  }
  return result;
}

void State::evaluate(std::vector<mx::array> arrays, mx::Stream stream) {
  const bool risks_buffers = !is_undoable_ && !pending().empty();
  if (!is_undoable_) {
    forget_before();
  }
  try {
    executorch_mlx::evaluate(std::move(arrays), stream);
  } catch (...) {
    is_losing_ = risks_buffers;
    throw;
  }
}

} // namespace executorch_mlx
