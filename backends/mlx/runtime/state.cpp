#include "state.h"

#include "device.h"

namespace executorch_mlx {

State::State(const Layout& layout)
    : tensors(layout.num_tensors()), values(layout.values), layout_(layout) {}

void State::keep() {
  for (uint32_t i = layout_.temps_begin(); i < layout_.num_tensors(); ++i) {
    if (tensors[i]) {
      kept_tensors_.emplace_back(i, *tensors[i]);
    }
  }
  kept_values_ = values;
}

void State::begin(bool undoable) {
  is_undoable_ = undoable;
  for (const auto& [slot, array] : kept_tensors_) {
    tensors[slot] = array;
  }
  values = kept_values_;
  buffers_before_.assign(
      tensors.begin() + layout_.buffers_begin(), tensors.begin() + layout_.temps_begin());
  caches_before_ = caches;
}

void State::commit() {
  buffers_before_.clear();
  caches_before_.reset();
}

void State::rollback() {
  // Empty after a commit: then the buffers keep what the call has made of them.
  std::copy(
      buffers_before_.begin(), buffers_before_.end(), tensors.begin() + layout_.buffers_begin());
  buffers_before_.clear();
  if (caches_before_) {
    caches = std::move(*caches_before_);
    caches_before_.reset();
  }
  release_temporaries();
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
  for (const auto& [layer, cache] : caches) {
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
    commit();
  }
  try {
    executorch_mlx::evaluate(std::move(arrays), stream);
  } catch (...) {
    is_lost_ = risks_buffers;
    throw;
  }
}

} // namespace executorch_mlx
