#include "state.h"

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

void State::begin() {
  for (const auto& [slot, array] : kept_tensors_) {
    tensors[slot] = array;
  }
  values = kept_values_;
  buffers_before_.assign(
      tensors.begin() + layout_.buffers_begin(), tensors.begin() + layout_.temps_begin());
}

void State::commit() {
  buffers_before_.clear();
}

void State::rollback() {
  std::copy(
      buffers_before_.begin(), buffers_before_.end(), tensors.begin() + layout_.buffers_begin());
  buffers_before_.clear();
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

std::vector<mx::array> State::replaced() const {
  std::vector<mx::array> result;
  for (size_t i = 0; i < buffers_before_.size(); ++i) {
    const auto& now = tensors[layout_.buffers_begin() + i];
    if (now && (!buffers_before_[i] || now->id() != buffers_before_[i]->id())) {
      result.push_back(*now);
    }
  }
  return result;
}

} // namespace executorch_mlx
