#include "memory/plan.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "dtype.h"
#include "error.h"
#include "memory/limit.h"
#include "mlx_internals/graph.h"

namespace executorch_mlx {

namespace {

// What a primitive does with the memory of its first input.
enum class Effect {
  kAllocates, // nothing: the results have memory of their own
  kView, // the results share it, in another layout
  kReshape, // the result shares it if the input is row-major, and copies it otherwise
  kUpdate, // overwrites it if nothing else uses the input, and copies it otherwise
};

Effect effect_of(std::string_view primitive) {
  static const std::unordered_map<std::string_view, Effect> effects{
      {"AsStrided", Effect::kView},
      {"Broadcast", Effect::kView},
      {"BroadcastAxes", Effect::kView},
      {"Contiguous", Effect::kReshape},
      {"Copy", Effect::kView}, // in MLX, a Copy shares the memory of its input
      {"DynamicSliceUpdate", Effect::kUpdate},
      {"ExpandDims", Effect::kView},
      {"Flatten", Effect::kReshape},
      {"Reshape", Effect::kReshape},
      {"Scatter", Effect::kUpdate},
      {"ScatterAxis", Effect::kUpdate},
      {"Slice", Effect::kView},
      {"SliceUpdate", Effect::kUpdate},
      {"Split", Effect::kView},
      {"Squeeze", Effect::kView},
      {"StopGradient", Effect::kView},
      {"Transpose", Effect::kView},
      {"Unflatten", Effect::kReshape},
      {"View", Effect::kReshape},
  };
  const auto found = effects.find(primitive);
  return found == effects.end() ? Effect::kAllocates : found->second;
}

// Returns the class name of the primitive. MLX adds more words to some names, as in "Scatter Sum".
std::string_view name_of(const mx::array& x) {
  const std::string_view name = internals::primitive_name(x);
  return name.substr(0, name.find(' '));
}

bool is_pending(const mx::array& x) { return x.status() == mx::array::Status::unscheduled && x.has_primitive(); }

// Returns the bytes of work space that a primitive needs beside its results, as far as they are known: those of a
// convolution on a CPU. MLX pads the input, and copies the window of input that each result depends on. Both are
// float32.
size_t work_space(const mx::array& out, std::string_view primitive) {
  if (primitive != "Convolution" || internals::device(out) != mx::Device::cpu) {
    return 0;
  }
  const auto& x = internals::inputs(out)[0];
  const auto& w = internals::inputs(out)[1];
  const size_t windows = out.size() / std::max(1, out.shape(-1));
  const size_t window = w.size() / std::max(1, w.shape(0)) * (x.shape(-1) / std::max(1, w.shape(-1)));
  return sizeof(float) * (x.size() + w.size() + windows * window);
}

// Memory that one or several values share.
struct Storage {
  size_t bytes; // 0 if it was allocated before the evaluation
  uint32_t uses = 0; // how often steps that have not run yet, and the caller, use the values that share it
};

// A pending array.
struct Value {
  const mx::array* array;
  uint32_t step;
  uint32_t storage = 0;
  uint32_t uses = 0; // how often it is an input of a pending array, plus 1 if the caller asks for it
  bool is_wanted = false; // the caller asks for this array
  bool is_row_major = true;
  bool owns_memory = true; // false for a view
  uint32_t last_use = 0; // the last step that reads it
};

// One primitive, with one or several results.
struct Step {
  const mx::array* array;
  uint32_t first_value; // the results are consecutive values
  uint32_t values; // the number of results
  size_t bytes = 0; // new memory for the results
  size_t work_space = 0;
};

class Planner {
 public:
  explicit Planner(const std::vector<mx::array>& arrays, const std::vector<std::uintptr_t>& overwritable)
      : overwritable_(overwritable.begin(), overwritable.end()) {
    for (const auto& x : arrays) {
      visit(x);
      if (is_pending(x)) {
        Value& value = values_[indices_.at(x.id())];
        value.uses += !value.is_wanted;
        value.is_wanted = true;
      }
    }
    for (uint32_t i = 0; i < steps_.size(); ++i) {
      count_uses(i);
    }
    for (Step& step : steps_) {
      assign_storage(step);
    }
  }

  std::vector<std::vector<mx::array>> stages(size_t active, size_t limit);

 private:
  void visit(const mx::array& root);
  void add_step(const mx::array& x);
  void count_uses(uint32_t step);
  void assign_storage(Step& step);
  std::optional<uint32_t> shared_storage(const mx::array& input, Effect effect);
  size_t release_inputs(const Step& step);
  std::vector<std::vector<mx::array>> collect(const std::vector<uint32_t>& stage_of) const;

  Value* find(const mx::array& x) {
    const auto found = indices_.find(x.id());
    return found == indices_.end() ? nullptr : &values_[found->second];
  }
  bool is_row_major(const mx::array& x) {
    const Value* value = find(x);
    return value != nullptr ? value->is_row_major : x.flags().row_contiguous;
  }

  std::unordered_set<std::uintptr_t> overwritable_;
  std::unordered_map<std::uintptr_t, uint32_t> indices_; // of values, by id
  std::unordered_map<std::uintptr_t, uint32_t> leaf_uses_; // of evaluated arrays by pending ones, by id
  std::vector<Value> values_;
  std::vector<Step> steps_; // in an order in which they can run
  std::vector<Storage> storages_;
};

// Adds the steps that `root` depends on, then the step that computes it.
void Planner::visit(const mx::array& root) {
  std::vector<std::pair<const mx::array*, size_t>> path{{&root, 0}};
  while (!path.empty()) {
    auto& [x, next] = path.back();
    if (!is_pending(*x) || indices_.contains(x->id())) {
      path.pop_back();
    } else if (next < internals::inputs(*x).size()) {
      const mx::array* input = &internals::inputs(*x)[next++];
      path.emplace_back(input, 0);
    } else {
      add_step(*x);
      path.pop_back();
    }
  }
}

void Planner::add_step(const mx::array& x) {
  const auto step = static_cast<uint32_t>(steps_.size());
  const auto first = static_cast<uint32_t>(values_.size());
  const auto add = [&](const mx::array& result) {
    indices_[result.id()] = static_cast<uint32_t>(values_.size());
    values_.push_back({&result, step});
  };
  add(x);
  for (const auto& sibling : internals::siblings(x)) {
    add(sibling);
  }
  steps_.push_back({&x, first, static_cast<uint32_t>(values_.size()) - first});
}

void Planner::count_uses(uint32_t step) {
  for (const auto& input : internals::inputs(*steps_[step].array)) {
    if (Value* value = find(input)) {
      ++value->uses;
      value->last_use = step;
    } else {
      ++leaf_uses_[input.id()];
    }
  }
}

// Returns the storage that the results of a step share with its first input, or nullopt if they need memory of their
// own.
std::optional<uint32_t> Planner::shared_storage(const mx::array& input, Effect effect) {
  const Value* value = find(input);
  const bool is_last_use = value != nullptr ? value->uses == 1 && value->owns_memory
                                            : leaf_uses_[input.id()] == 1 && overwritable_.contains(input.id());
  const bool shares = effect == Effect::kView || (effect == Effect::kReshape && is_row_major(input)) ||
      (effect == Effect::kUpdate && is_last_use);
  if (!shares) {
    return std::nullopt;
  }
  if (value == nullptr) { // memory from before the evaluation
    storages_.push_back({.bytes = 0});
    return static_cast<uint32_t>(storages_.size() - 1);
  }
  return value->storage;
}

void Planner::assign_storage(Step& step) {
  const auto& inputs = internals::inputs(*step.array);
  const auto primitive = name_of(*step.array);
  const Effect effect = inputs.empty() ? Effect::kAllocates : effect_of(primitive);
  const auto shared = effect == Effect::kAllocates ? std::nullopt : shared_storage(inputs[0], effect);
  step.work_space = work_space(*step.array, primitive);
  // An elementwise operation keeps the layout of an input of the same shape.
  const auto passes_layout = [&](const mx::array& x) { return x.shape() == step.array->shape() && !is_row_major(x); };
  const bool keeps_layout = primitive == "ExpandDims" || primitive == "Squeeze" || effect == Effect::kReshape;
  for (uint32_t i = 0; i < step.values; ++i) {
    Value& value = values_[step.first_value + i];
    if (shared) {
      value.storage = *shared;
      value.owns_memory = effect == Effect::kUpdate;
      value.is_row_major = effect == Effect::kUpdate || (keeps_layout && is_row_major(inputs[0]));
    } else {
      value.storage = static_cast<uint32_t>(storages_.size());
      storages_.push_back({.bytes = value.array->nbytes()});
      step.bytes += value.array->nbytes();
      value.is_row_major = effect != Effect::kAllocates || std::none_of(inputs.begin(), inputs.end(), passes_layout);
    }
    storages_[value.storage].uses += value.uses;
  }
}

// Called when `step` has run: the step no longer counts as a use of its inputs. Frees the inputs and results of the
// step that have no use left, and returns their bytes.
size_t Planner::release_inputs(const Step& step) {
  size_t freed = 0;
  const auto free_if_unused = [&](Storage& storage) {
    freed += storage.uses == 0 ? std::exchange(storage.bytes, 0) : 0;
  };
  for (const auto& input : internals::inputs(*step.array)) {
    if (const Value* value = find(input)) {
      --storages_[value->storage].uses;
      free_if_unused(storages_[value->storage]);
    }
  }
  for (uint32_t i = 0; i < step.values; ++i) {
    free_if_unused(storages_[values_[step.first_value + i].storage]);
  }
  return freed;
}

std::vector<std::vector<mx::array>> Planner::stages(size_t active, size_t limit) {
  std::vector<uint32_t> stage_of(steps_.size(), 0);
  size_t live = active; // bytes in use after a step if the stage ends with this step
  size_t total = active; // bytes in use after a step if the stage goes on: nothing is freed before its end
  uint32_t stage = 0;
  for (uint32_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    const size_t needed = step.bytes + step.work_space;
    if (needed > 0 && (needed > limit || total > limit - needed)) {
      if (needed > limit || live > limit - needed) {
        const auto what = str(name_of(*step.array), " ", describe(*step.array));
        fail_over_limit(what, needed, live, limit);
      }
      stage += i > 0;
      total = live;
    }
    stage_of[i] = stage;
    total += needed;
    live += step.bytes;
    live -= release_inputs(step);
  }
  return collect(stage_of);
}

// Returns the arrays to evaluate in each stage: those that the caller asks for or that a later stage reads.
std::vector<std::vector<mx::array>> Planner::collect(const std::vector<uint32_t>& stage_of) const {
  std::vector<std::vector<mx::array>> stages(stage_of.empty() ? 0 : stage_of.back() + 1);
  for (const Value& value : values_) {
    const uint32_t stage = stage_of[value.step];
    if (value.is_wanted || (value.uses > 0 && stage_of[value.last_use] > stage)) {
      stages[stage].push_back(*value.array);
    }
  }
  return stages;
}

} // namespace

std::vector<std::vector<mx::array>> plan_stages(
    std::vector<mx::array> arrays, const std::vector<std::uintptr_t>& overwritable, size_t active, size_t limit) {
  auto stages = Planner(arrays, overwritable).stages(active, limit);
  if (stages.size() <= 1) {
    return {std::move(arrays)};
  }
  return stages;
}

} // namespace executorch_mlx
