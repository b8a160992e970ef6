#include "call.h"

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/evalue.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dtype.h"
#include "error.h"
#include "program/payload.h"
#include "program/tensor_meta.h"

namespace fuzz {

namespace {

namespace et = executorch::runtime;
namespace fb = mlx_delegate;
namespace mx = mlx::core;
using et::Error;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;

constexpr int64_t kMaxElements = 1 << 12; // of an argument or a constant
constexpr int kDefaultSize = 4; // of a dynamic dimension without an upper bound
constexpr size_t kMaxRank = 16;

// Generates random values that are valid operands of most nodes. Floats and doubles are small numbers, and sometimes
// infinity. Integers are from -1 to 7, and sometimes random bits. Halves are random bits. The same payload always gives
// the same values with the same standard library.
class Values {
 public:
  explicit Values(std::string_view payload)
      : random_(static_cast<std::mt19937::result_type>(std::hash<std::string_view>()(payload))) {}

  void fill(void* memory, size_t count, ScalarType type) {
    auto* bytes = static_cast<char*>(memory);
    const size_t width = executorch::runtime::elementSize(type);
    for (size_t i = 0; i < count; ++i) {
      write(bytes + i * width, type, width);
    }
  }

  uint32_t operator()() { return random_(); }

 private:
  void write(char* to, ScalarType type, size_t width) {
    const uint32_t bits = random_();
    const bool is_extreme = bits % 64 == 0;
    if (type == ScalarType::Float) {
      const float value = is_extreme ? std::numeric_limits<float>::infinity() : static_cast<float>(bits % 9) / 4 - 1;
      std::memcpy(to, &value, width);
    } else if (type == ScalarType::Double) {
      const double value = is_extreme ? std::numeric_limits<double>::infinity() : static_cast<double>(bits % 9) / 4 - 1;
      std::memcpy(to, &value, width);
    } else if (type == ScalarType::Bool) {
      *to = static_cast<char>(bits >> 8 & 1);
    } else if (is_extreme || type == ScalarType::Half || type == ScalarType::BFloat16) {
      const uint64_t pattern = uint64_t{random_()} << 32 | bits;
      std::memcpy(to, &pattern, width);
    } else {
      const int64_t value = static_cast<int64_t>(bits % 8) - (bits % 32 == 0);
      std::memcpy(to, &value, width);
    }
  }

  std::mt19937 random_;
};

// What a TensorImpl needs to know about a tensor: sizes, dim order, strides and dtype.
struct TensorSpec {
  std::vector<TensorImpl::SizesType> sizes;
  std::vector<TensorImpl::DimOrderType> order;
  std::vector<TensorImpl::StridesType> strides;
  ScalarType type;
  bool is_dynamic;
  int64_t elements = 1;
};

// Returns the metadata of a slot. Returns null if the slot has none, and for a temporary, whose metadata the runtime
// does not verify.
const fb::TensorMeta* meta_of(const fb::MLXGraph& graph, uint32_t slot) {
  const uint64_t first_temp = uint64_t{graph.num_constant_tensors()} + graph.num_input_tensors() +
      graph.num_output_tensors() + graph.num_mutable_buffer_tensors();
  const auto* metas = graph.tensor_meta();
  return metas != nullptr && slot < first_temp && slot < metas->size() ? metas->Get(slot) : nullptr;
}

// Chooses a tensor that fits the metadata. Returns null if the tensor is too large or if MLX lacks the dtype.
std::unique_ptr<TensorSpec> choose_spec(const fb::TensorMeta& meta) {
  auto spec = std::make_unique<TensorSpec>();
  spec->type = static_cast<ScalarType>(meta.scalar_type());
  const auto* shape = meta.shape();
  if (shape == nullptr || shape->size() > kMaxRank || !executorch_mlx::find_dtype(spec->type)) {
    return nullptr;
  }
  spec->is_dynamic = false;
  int64_t stride_limit = 1; // the product of the sizes, without sizes of 0: no stride is greater
  for (const auto* dim : *shape) {
    spec->is_dynamic |= dim->value() < 0;
    const int highest = dim->max_value() >= 0 ? dim->max_value() : std::max(kDefaultSize, dim->min_value());
    const int64_t size = dim->value() >= 0 ? dim->value() : highest;
    spec->elements *= size;
    stride_limit *= std::max<int64_t>(1, size);
    if (stride_limit > kMaxElements) {
      return nullptr;
    }
    spec->sizes.push_back(static_cast<int>(size));
  }
  spec->strides.resize(spec->sizes.size());
  const auto order = executorch_mlx::memory_order(meta);
  int stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    spec->strides[order[i]] = stride;
    stride *= std::max(1, spec->sizes[order[i]]);
  }
  spec->order.assign(order.begin(), order.end());
  return spec;
}

// The named data that a payload asks for, filled with random values. Each tensor is an allocation of its own, so that
// ASan detects an access beyond its end.
class RandomNamedData final : public et::NamedDataMap {
 public:
  RandomNamedData(const fb::MLXGraph& graph, Values& values) : values_(values) {
    const auto* slots = graph.named_slots();
    for (uint32_t i = 0; slots != nullptr && i < slots->size(); ++i) {
      const auto& named = *slots->Get(i);
      const uint32_t slot = named.slot()->idx();
      const uint32_t constants = graph.num_constant_tensors();
      const uint32_t buffers = constants + graph.num_input_tensors() + graph.num_output_tensors();
      const bool has_data = slot < constants || (slot >= buffers && i % 2 == 0); // half of the buffers are initialized
      if (meta_of(graph, slot) != nullptr && has_data) {
        entries_.push_back({named.name()->c_str(), meta_of(graph, slot)});
      }
    }
  }

  et::Result<et::FreeableBuffer> get_data(std::string_view key) const override {
    for (const auto& entry : entries_) {
      if (entry.name == key) {
        const auto spec = choose_spec(*entry.meta);
        if (spec == nullptr) {
          return Error::NotFound;
        }
        const size_t bytes = spec->elements * executorch::runtime::elementSize(spec->type);
        void* memory = std::malloc(bytes);
        values_.fill(memory, spec->elements, spec->type);
        return et::FreeableBuffer(memory, bytes, [](void*, void* data, size_t) { std::free(data); });
      }
    }
    return Error::NotFound;
  }

  et::Result<uint32_t> get_num_keys() const override { return static_cast<uint32_t>(entries_.size()); }
  et::Result<const char*> get_key(uint32_t index) const override { return entries_[index].name.c_str(); }
  et::Result<const et::TensorLayout> get_tensor_layout(std::string_view) const override {
    return Error::NotImplemented;
  }
  Error load_data_into(std::string_view, void*, size_t) const override { return Error::NotImplemented; }

 private:
  struct Entry {
    std::string name;
    const fb::TensorMeta* meta;
  };
  std::vector<Entry> entries_;
  Values& values_;
};

// The arguments of a call: inputs with values, and outputs of the declared sizes.
class Arguments {
 public:
  // Sets `complete` to false if `choose_spec` finds no tensor for an argument.
  Arguments(const fb::MLXGraph& graph, Values& values) {
    const auto add_all = [&](const auto* map, bool is_input) {
      for (uint32_t i = 0; map != nullptr && i < map->size(); ++i) {
        complete = complete && add(graph, *map->Get(i), is_input, values);
      }
    };
    add_all(graph.input_map(), true);
    add_all(graph.output_map(), false);
    for (auto& value : evalues_) {
      pointers_.push_back(&value);
    }
  }

  bool complete = true;

  et::Span<et::EValue*> span() { return {pointers_.data(), pointers_.size()}; }

 private:
  bool add(const fb::MLXGraph& graph, const fb::SlotVariant& slot, bool is_input, Values& values) {
    if (slot.slot_type() == fb::SlotType::IntValueSlot) {
      evalues_.emplace_back(static_cast<int64_t>(values() % 5));
    } else if (slot.slot_type() == fb::SlotType::FloatValueSlot) {
      evalues_.emplace_back(static_cast<double>(values() % 5) / 2);
    } else if (slot.slot_type() == fb::SlotType::BoolValueSlot) {
      evalues_.emplace_back(values() % 2 == 0);
    } else {
      return add_tensor(graph, slot.idx(), is_input, values);
    }
    return true;
  }

  bool add_tensor(const fb::MLXGraph& graph, uint32_t slot, bool is_input, Values& values) {
    const auto* meta = meta_of(graph, slot);
    auto spec = meta != nullptr ? choose_spec(*meta) : nullptr;
    if (spec == nullptr) {
      return false;
    }
    memory_.emplace_back(std::malloc(spec->elements * executorch::runtime::elementSize(spec->type)), std::free);
    if (is_input) {
      values.fill(memory_.back().get(), spec->elements, spec->type);
    }
    const auto dynamism = spec->is_dynamic ? et::TensorShapeDynamism::DYNAMIC_BOUND : et::TensorShapeDynamism::STATIC;
    tensors_.emplace_back(spec->type, static_cast<ssize_t>(spec->sizes.size()), spec->sizes.data(),
        memory_.back().get(), spec->order.data(), spec->strides.data(), dynamism);
    specs_.push_back(std::move(spec));
    evalues_.emplace_back(Tensor(&tensors_.back()));
    return true;
  }

  std::deque<et::EValue> evalues_;
  std::deque<TensorImpl> tensors_;
  std::vector<std::unique_ptr<TensorSpec>> specs_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> memory_;
  std::vector<et::EValue*> pointers_;
};

et::BackendOption text_option(const char* key, const char* text) {
  et::BackendOption option;
  std::strcpy(option.key, key);
  std::array<char, et::kMaxOptionValueLength> value{};
  std::strcpy(value.data(), text);
  option.value = value;
  return option;
}

const fb::MLXGraph* parse(const uint8_t* data, size_t size) {
  try {
    return executorch_mlx::open_payload(data, size);
  } catch (const executorch_mlx::Failure&) {
    return nullptr;
  }
}

} // namespace

void load_and_call(const uint8_t* data, size_t size) {
  static auto* const backend = et::get_backend_class("MLXBackend");
  static const et::BackendOption options[] = {text_option("device", "cpu"), text_option("kv_windows", "0,6"),
      text_option("max_instructions", "4000"), text_option("max_operations", "1000000")};

  Values values({reinterpret_cast<const char*>(data), size});
  const auto* graph = parse(data, size);
  auto named_data = graph != nullptr ? std::make_unique<RandomNamedData>(*graph, values) : nullptr;
  et::BackendInitContext init(nullptr, nullptr, "forward", named_data.get(), {options, std::size(options)});
  et::FreeableBuffer processed(data, size, nullptr);
  const auto handle = backend->init(init, &processed, {});
  if (!handle.ok()) {
    return;
  }
  Arguments arguments(*graph, values); // `graph` is not null, because `init` refuses what `parse` refuses
  if (arguments.complete) {
    for (int call = 0; call < 2; ++call) {
      et::BackendExecutionContext context(nullptr, nullptr, "forward");
      (void)backend->execute(context, *handle, arguments.span());
    }
  }
  backend->destroy(*handle);
}

} // namespace fuzz
