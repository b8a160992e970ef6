#include "adapters.h"

#include <algorithm>
#include <utility>

#include "check.h"

namespace executorch_mlx::engine {

Adapters::Adapters(LlmProgram& program)
    : program_(program), slots_(static_cast<size_t>(program.metadata().adapter_slots)) {}

std::string Adapters::describe_names() const {
  std::string list;
  for (const auto& [name, adapter] : by_name_) {
    list += (list.empty() ? "" : ", ") + name;
  }
  return list.empty() ? "none, because no adapter is loaded" : list;
}

std::shared_ptr<const Adapter> Adapters::find(const std::string& name) const {
  if (name.empty()) {
    return nullptr;
  }
  check_argument(!slots_.empty(), "adapter: the program was exported without adapters; export it with --adapters N");
  std::lock_guard lock(mutex_);
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    check_argument(false, "adapter: got '", name, "', expected ", describe_names());
  }
  return found->second;
}

std::shared_ptr<const Adapter> Adapters::find_if(const std::function<bool(const Adapter&)>& matches) const {
  std::lock_guard lock(mutex_);
  for (const auto& [name, adapter] : by_name_) {
    if (matches(*adapter)) {
      return adapter;
    }
  }
  return nullptr;
}

std::vector<std::string> Adapters::names() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> result;
  for (const auto& [name, adapter] : by_name_) {
    result.push_back(name);
  }
  return result;
}

void Adapters::unload(const std::string& name) {
  find(name); // throws if there is none
  std::lock_guard lock(mutex_);
  by_name_.erase(name);
}

std::vector<std::vector<float>> Adapters::read(std::span<const executorch_mlx_adapter_weights> given) const {
  check_argument(!slots_.empty(), "adapter: the program was exported without adapters; export it with --adapters N");
  const auto& layers = program_.adapted_layers();
  const auto most = static_cast<size_t>(program_.metadata().adapter_rank);
  std::vector<std::vector<float>> weights(2 * layers.size());
  for (const auto& part : given) {
    check_argument(part.layer != nullptr && part.a != nullptr && part.b != nullptr, "adapter: got null");
    const auto found =
        std::find_if(layers.begin(), layers.end(), [&](const auto& layer) { return layer.path == part.layer; });
    check_argument(found != layers.end(), "adapter: ", part.layer, ": the program has no adapters for this layer");
    check_argument(part.inputs == found->inputs && part.outputs == found->outputs, "adapter: ", part.layer, ": got ",
        part.inputs, " inputs and ", part.outputs, " outputs, expected ", found->inputs, " and ", found->outputs);
    check_argument(1 <= part.rank && part.rank <= most, "adapter: ", part.layer, ": got rank ", part.rank,
        ", expected 1 to ", most, ", the rank that the program was exported with");
    auto& a = weights[2 * (found - layers.begin())];
    auto& b = weights[2 * (found - layers.begin()) + 1];
    check_argument(a.empty(), "adapter: ", part.layer, ": got weights for this layer twice");
    a.assign(part.a, part.a + part.rank * part.inputs);
    b.resize(part.outputs * most);
    for (size_t row = 0; row < part.outputs; ++row) {
      std::copy_n(part.b + row * part.rank, part.rank, b.begin() + row * most);
    }
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    weights[2 * i].resize(most * layers[i].inputs);
    weights[2 * i + 1].resize(most * layers[i].outputs);
  }
  return weights;
}

// Returns a free slot. Without one, an adapter whose name is wanted and that no request uses gives up its slot.
int64_t Adapters::take_slot(const std::string& name) {
  const auto is_free = [](const auto& adapter) { return adapter.expired(); };
  auto found = std::find_if(slots_.begin(), slots_.end(), is_free);
  if (const auto old = by_name_.find(name);
      found == slots_.end() && old != by_name_.end() && old->second.use_count() == 1) {
    by_name_.erase(old);
    found = std::find_if(slots_.begin(), slots_.end(), is_free);
  }
  check(found != slots_.end(), EXECUTORCH_MLX_BUSY, "adapter: all ", slots_.size(),
      " slots of the program are in use, by adapters with the names ", describe_names(),
      ", or by requests that have not ended");
  return found - slots_.begin() + 1;
}

void Adapters::load(std::string name, std::vector<std::vector<float>> weights) {
  std::shared_ptr<Adapter> adapter;
  {
    std::lock_guard lock(mutex_);
    const int64_t slot = take_slot(name);
    adapter = std::make_shared<Adapter>(name, ++last_id_, slot, std::move(weights));
    slots_[slot - 1] = adapter;
  }
  program_.write_adapter(adapter->slot, adapter->weights);
  std::lock_guard lock(mutex_);
  by_name_[name] = std::move(adapter);
}

void Adapters::restore() {
  std::vector<std::shared_ptr<Adapter>> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& slot : slots_) {
      if (auto adapter = slot.lock()) {
        all.push_back(std::move(adapter));
      }
    }
  }
  for (const auto& adapter : all) {
    program_.write_adapter(adapter->slot, adapter->weights);
  }
  is_written_ = true;
}

} // namespace executorch_mlx::engine
