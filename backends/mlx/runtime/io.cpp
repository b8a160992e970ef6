#include "io.h"

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <cstring>
#include <set>

#include "borrow.h"
#include "context.h"
#include "dtype.h"

namespace executorch_mlx {

namespace {

using executorch::aten::Tensor;

// An array of our own memory, for the caller to fill: MLX copies what is not.
mx::array allocate(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (const int size : shape) {
    bytes *= size;
  }
  return mx::array(mx::allocator::Data(mx::allocator::malloc(bytes)), shape, dtype);
}

uint32_t count(const flatbuffers::Vector<flatbuffers::Offset<fb::SlotVariant>>* map) {
  return map == nullptr ? 0 : map->size();
}

// Names an argument of the call; put into words only for a message.
struct Label {
  const Program& program;
  const char* kind;
  uint32_t index;
  const fb::SlotVariant& slot;

  friend std::ostream& operator<<(std::ostream& out, const Label& label) {
    out << label.kind << " " << label.index;
    const bool is_tensor = label.slot.slot_type() == fb::SlotType::TensorSlot;
    const char* name = is_tensor ? label.program.tensor_names[label.slot.idx()] : nullptr;
    return name ? out << " \"" << name << "\"" : out;
  }
};

mx::Shape static_shape(const fb::TensorMeta& meta) {
  mx::Shape shape;
  for (const auto* dim : *meta.shape()) {
    shape.push_back(dim->value());
  }
  return shape;
}

std::string describe(const fb::TensorMeta& meta) {
  std::string text = name(static_cast<ScalarType>(meta.scalar_type())) + "[";
  for (uint32_t i = 0; i < meta.shape()->size(); ++i) {
    const auto& dim = *meta.shape()->Get(i);
    text += i == 0 ? "" : ",";
    text += dim.value() >= 0 ? std::to_string(dim.value())
        : dim.max_value() >= 0 ? str(dim.min_value(), "..", dim.max_value())
                               : str(dim.min_value(), "..");
  }
  return text + "]";
}

std::string describe(const Tensor& tensor) {
  return str(name(tensor.scalar_type()), dims(tensor.sizes()));
}

// The order of axes in memory; absent means the plain one.
std::vector<int> memory_order(const fb::TensorMeta& meta) {
  std::vector<int> order;
  const auto* given = meta.dim_order();
  for (uint32_t i = 0; i < meta.shape()->size(); ++i) {
    order.push_back(given != nullptr && given->size() != 0 ? given->Get(i) : int(i));
  }
  return order;
}

bool is_plain(const std::vector<int>& order) {
  return std::is_sorted(order.begin(), order.end());
}

void check_memory_order(const Tensor& tensor, const std::vector<int>& order, const Label& label) {
  const auto& actual = tensor.dim_order();
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const int axis = order[i];
    const bool flat = tensor.sizes()[axis] == 1 || tensor.strides()[axis] == stride;
    if (!flat && tensor.numel() != 0) {
      fail(
          Error::InvalidArgument,
          label, ": strides ", dims(tensor.strides()), " for sizes ", dims(tensor.sizes()),
          " and dim_order ", dims(std::vector<int>(actual.begin(), actual.end())), ", dim_order ", dims(order), " was expected");
    }
    stride *= tensor.sizes()[axis];
  }
}

void check_input(const Tensor& tensor, const fb::TensorMeta& meta, const Label& label) {
  bool fits = static_cast<int>(tensor.scalar_type()) == meta.scalar_type() &&
      tensor.dim() == static_cast<ssize_t>(meta.shape()->size());
  for (uint32_t i = 0; fits && i < meta.shape()->size(); ++i) {
    const auto& dim = *meta.shape()->Get(i);
    const int64_t size = tensor.size(i);
    // torch reasons about dynamic extents of 2 and more whatever it was given below that, and
    // other compilers than ours write this down.
    const int64_t lowest = dim.min_value() <= 2 ? 0 : dim.min_value();
    fits = dim.value() >= 0 ? size == dim.value()
                            : size >= lowest && (dim.max_value() < 0 || size <= dim.max_value());
  }
  if (!fits) {
    fail(Error::InvalidArgument, label, ": ", describe(tensor), " came, ", describe(meta), " was expected");
  }
  check_memory_order(tensor, memory_order(meta), label);
  check_argument(
      tensor.numel() == 0 || tensor.const_data_ptr() != nullptr, label, ": the tensor has no data");
}

mx::array read_tensor(const Tensor& tensor, const fb::TensorMeta& meta, mx::Stream stream) {
  const auto order = memory_order(meta);
  mx::Shape shape;
  for (const int axis : order) {
    shape.push_back(static_cast<int>(tensor.size(axis)));
  }
  auto array = allocate(shape, dtype_of(meta.scalar_type()));
  if (array.nbytes() != 0) {
    std::memcpy(array.data<char>(), tensor.const_data_ptr(), array.nbytes());
  }
  if (is_plain(order)) {
    return array;
  }
  std::vector<int> axes(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    axes[order[i]] = static_cast<int>(i);
  }
  return mx::transpose(array, axes, stream);
}

Value read_value(const EValue& value, fb::SlotType type, const Label& label) {
  if (type == fb::SlotType::IntValueSlot && value.isInt()) {
    return value.toInt();
  }
  if (type == fb::SlotType::FloatValueSlot && value.isDouble()) {
    return value.toDouble();
  }
  if (type == fb::SlotType::BoolValueSlot && value.isBool()) {
    return value.toBool();
  }
  fail(
      Error::InvalidArgument, label, ": a value of tag ", static_cast<int>(value.tag), " came, ",
      fb::EnumNameSlotType(type), " was expected");
}

const Tensor& tensor_of(const EValue& value, const Label& label) {
  check_argument(value.isTensor(), label, ": a value of tag ", static_cast<int>(value.tag), " came, a tensor was expected");
  return value.toTensor();
}

// Copies a strided array out, axis by axis in memory order.
void copy_strided(const mx::array& x, const std::vector<int>& order, size_t level, const char* from, char*& to) {
  const size_t width = x.itemsize();
  if (level == order.size()) {
    std::memcpy(to, from, width);
    to += width;
    return;
  }
  const int axis = order[level];
  const int64_t stride = x.strides(axis) * static_cast<int64_t>(width);
  const int size = x.shape(axis);
  if (level + 1 == order.size() && stride == static_cast<int64_t>(width)) {
    std::memcpy(to, from, width * size);
    to += width * size;
    return;
  }
  for (int i = 0; i < size; ++i) {
    copy_strided(x, order, level + 1, from + i * stride, to);
  }
}

std::optional<executorch::runtime::FreeableBuffer> find_data(const NamedDataMap* data, const char* name) {
  if (data == nullptr || name == nullptr) {
    return std::nullopt;
  }
  const auto keys = data->get_num_keys();
  for (uint32_t i = 0; keys.ok() && i < *keys; ++i) {
    const auto key = data->get_key(i);
    if (key.ok() && std::strcmp(*key, name) == 0) {
      auto buffer = data->get_data(name);
      if (!buffer.ok()) {
        fail(buffer.error(), "named data \"", name, "\" cannot be read");
      }
      return std::move(*buffer);
    }
  }
  return std::nullopt;
}

// A tensor of the named data; `buffer` is what it is made of `in_place`, if it can be.
mx::array read_constant(
    executorch::runtime::FreeableBuffer& buffer, const fb::TensorMeta& meta, const char* name, bool in_place) {
  const auto order = memory_order(meta);
  check_program(is_plain(order), "constant \"", name, "\": dim_order ", dims(order), " is not the plain one");
  const auto shape = static_shape(meta);
  const auto dtype = dtype_of(meta.scalar_type());
  __int128 bytes = mx::size_of(dtype);
  for (const int size : shape) {
    bytes = std::min<__int128>(bytes * size, __int128{1} << 64);
  }
  check_program(
      bytes == static_cast<__int128>(buffer.size()),
      "constant \"", name, "\": ", buffer.size(), " bytes came for ", describe(meta));
  if (in_place) {
    if (auto borrowed = borrow(buffer, shape, dtype)) {
      return *borrowed;
    }
  }
  auto array = allocate(shape, dtype);
  if (buffer.size() != 0) {
    std::memcpy(array.data<char>(), buffer.data(), buffer.size());
  }
  return array;
}

mx::array first_contents(const Program& program, uint32_t slot, const NamedDataMap* data) {
  const auto& meta = program.meta(slot);
  if (auto buffer = find_data(data, program.tensor_names[slot])) {
    auto contents = read_constant(*buffer, meta, program.tensor_names[slot], /*in_place=*/false);
    buffer->Free();
    return contents;
  }
  const auto shape = static_shape(meta);
  const auto dtype = dtype_of(meta.scalar_type());
  Context::check_size(shape, dtype);
  auto zeros = allocate(shape, dtype);
  clear(zeros.data<char>(), zeros.nbytes());
  return zeros;
}

// What two methods have to agree on to share a tensor.
std::string shared_name(const Program& program, uint32_t slot) {
  const char* name = program.tensor_names[slot];
  return str(describe(program.meta(slot)), " ", name ? name : "");
}

} // namespace

void load_constants(const Program& program, const NamedDataMap* data, SharedData& shared, State& state) {
  for (uint32_t i = 0; i < program.layout.constants; ++i) {
    const char* name = program.tensor_names[i];
    const std::string key = shared_name(program, i);
    auto constant = name == nullptr ? nullptr : shared.constants.find(key);
    if (constant == nullptr) {
      auto buffer = find_data(data, name);
      if (!buffer) {
        fail(
            Error::NotFound, "constant ", i, " \"", name ? name : "", "\" is not in the named data of the program");
      }
      constant = std::make_shared<const mx::array>(read_constant(*buffer, program.meta(i), name, /*in_place=*/true));
      buffer->Free();
      shared.constants.put(key, constant);
    }
    state.hold(i, std::move(constant));
  }
}

void load_buffers(
    const Program& program,
    const NamedDataMap* data,
    Session& session,
    const std::vector<int>& kv_windows,
    State& state) {
  const auto& layout = program.layout;
  const bool has_init_chain = program.graph->init_chain_idx() >= 0;
  std::set<std::string> names;
  for (uint32_t i = layout.buffers_begin(); i < layout.temps_begin(); ++i) {
    const std::string name = shared_name(program, i);
    const bool is_named = program.tensor_names[i] != nullptr;
    check_program(!is_named || names.insert(name).second, "two mutable buffers are ", name);
    auto buffer = is_named ? session.buffers.find(name) : nullptr;
    const bool is_new = buffer == nullptr;
    if (is_new) {
      buffer = std::make_shared<Buffer>();
      if (is_named) {
        session.buffers.put(name, buffer);
      }
    }
    state.attach(i, std::move(buffer));
    if (is_new || has_init_chain) {
      state.tensors[i] = first_contents(program, i, data);
    }
  }
  if (program.has_caches) {
    auto caches = session.caches.find("");
    if (caches == nullptr) {
      caches = std::make_shared<Caches>();
      caches->windows = kv_windows;
      session.caches.put("", caches);
    }
    state.attach(std::move(caches));
  }
}

void bind_inputs(const Program& program, Arguments args, State& state, mx::Stream stream) {
  const auto* inputs = program.graph->input_map();
  const uint32_t expected = count(inputs) + count(program.graph->output_map());
  check_argument(
      args.size() == expected, "execute: ", args.size(), " arguments came, ", expected, " were expected");
  for (uint32_t i = 0; i < count(inputs); ++i) {
    const auto& slot = *inputs->Get(i);
    if (slot.slot_type() == fb::SlotType::TensorSlot) {
      const Label label{program, "input", i, slot};
      check_input(tensor_of(*args[i], label), program.meta(slot.idx()), label);
    }
  }
  for (uint32_t i = 0; i < count(inputs); ++i) {
    const auto& slot = *inputs->Get(i);
    if (slot.slot_type() == fb::SlotType::TensorSlot) {
      state.tensors[slot.idx()] = read_tensor(args[i]->toTensor(), program.meta(slot.idx()), stream);
    } else {
      state.values[slot.idx()] =
          read_value(*args[i], slot.slot_type(), Label{program, "input", i, slot});
    }
  }
}

std::vector<mx::array> collect_outputs(
    const Program& program,
    Arguments args,
    const State& state,
    mx::Stream stream) {
  std::vector<mx::array> arrays;
  const auto* outputs = program.graph->output_map();
  const uint32_t first = count(program.graph->input_map());
  for (uint32_t i = 0; i < count(outputs); ++i) {
    const auto& slot = *outputs->Get(i);
    if (slot.slot_type() != fb::SlotType::TensorSlot) {
      continue;
    }
    const Label label{program, "output", i, slot};
    auto array = state.tensors[slot.idx()];
    check_program(array.has_value(), label, ": the program has not written it");
    auto tensor = tensor_of(*args[first + i], label);
    const auto dtype = find_dtype(tensor.scalar_type());
    // MLX's indices are uint32, and it promotes half types to float32. Other compilers than
    // ours leave it to the output to be what the program says.
    const bool index = dtype == mx::int64 && array->dtype() == mx::uint32;
    if (index || (dtype && is_float(*dtype) && is_float(array->dtype()))) {
      array = mx::astype(*array, *dtype, stream);
    }
    if (!dtype || *dtype != array->dtype()) {
      fail(
          Error::InvalidProgram,
          label, ": the program made ", executorch_mlx::describe(*array), ", ", describe(tensor), " was expected");
    }
    std::vector<executorch::aten::SizesType> sizes(array->shape().begin(), array->shape().end());
    const auto error =
        executorch::runtime::resize_tensor(tensor, executorch::aten::ArrayRef<executorch::aten::SizesType>(sizes.data(), sizes.size()));
    if (error != Error::Ok) {
      fail(error, label, ": the program made ", executorch_mlx::describe(*array), ", ", describe(tensor), " was expected");
    }
    check_argument(
        array->size() == 0 || tensor.mutable_data_ptr() != nullptr, label, ": the tensor has no memory");
    arrays.push_back(*array);
  }
  return arrays;
}

void write_outputs(const Program& program, Arguments args, const std::vector<mx::array>& arrays) {
  const auto* outputs = program.graph->output_map();
  const uint32_t first = count(program.graph->input_map());
  auto array = arrays.begin();
  for (uint32_t i = 0; i < count(outputs); ++i) {
    if (outputs->Get(i)->slot_type() != fb::SlotType::TensorSlot) {
      continue;
    }
    const mx::array& x = *array++;
    if (x.size() == 0) {
      continue;
    }
    auto tensor = args[first + i]->toTensor();
    const auto& dim_order = tensor.dim_order();
    const std::vector<int> order(dim_order.begin(), dim_order.end());
    auto* to = static_cast<char*>(tensor.mutable_data_ptr());
    if (x.flags().row_contiguous && is_plain(order)) {
      std::memcpy(to, x.data<char>(), x.nbytes());
    } else {
      copy_strided(x, order, 0, x.data<char>(), to);
    }
  }
}

void write_values(const Program& program, Arguments args, const State& state) {
  const auto* outputs = program.graph->output_map();
  const uint32_t first = count(program.graph->input_map());
  for (uint32_t i = 0; i < count(outputs); ++i) {
    const auto& slot = *outputs->Get(i);
    if (slot.slot_type() == fb::SlotType::TensorSlot) {
      continue;
    }
    const auto write = [&]<typename T>(const T& value) {
      if constexpr (std::is_same_v<T, std::monostate>) {
        fail(Error::InvalidProgram, Label{program, "output", i, slot}, ": the program has not written it");
      } else {
        *args[first + i] = EValue(value);
      }
    };
    std::visit(write, state.values[slot.idx()]);
  }
}

} // namespace executorch_mlx
