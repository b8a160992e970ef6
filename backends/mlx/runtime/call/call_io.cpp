#include "call/call_io.h"

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "dtype.h"
#include "memory/host_memory.h"
#include "memory/strided_copy.h"
#include "program/tensor_meta.h"

namespace executorch_mlx {

namespace {

using executorch::aten::Tensor;

uint32_t num_slots(const flatbuffers::Vector<flatbuffers::Offset<fb::SlotVariant>>* map) {
  return map == nullptr ? 0 : map->size();
}

// The name of an argument in messages, such as `input 0 "x"`. It is formatted only when a message is printed.
struct Label {
  const MlxProgram& program;
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

std::string describe_tensor(const Tensor& tensor) { return str(name(tensor.scalar_type()), dims(tensor.sizes())); }

// The axes of a tensor, from the outermost to the innermost in memory.
std::vector<int> memory_order(const Tensor& tensor) {
  std::vector<int> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return tensor.strides()[a] > tensor.strides()[b]; });
  return order;
}

// Checks that the elements lie in memory without gaps.
void check_strides(const Tensor& tensor, const Label& label) {
  const auto order = memory_order(tensor);
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const int axis = order[i];
    const bool fits = tensor.sizes()[axis] == 1 || tensor.strides()[axis] == stride;
    if (!fits && tensor.numel() != 0) {
      fail(Error::InvalidArgument, label, ": got strides ", dims(tensor.strides()), " for shape ", dims(tensor.sizes()),
          ", expected no gaps between the elements");
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
    // A lower bound of 1 or 2 is not enforced. torch.export assumes that every dynamic dimension is at least 2,
    // and other compilers store this assumption as the lower bound, although smaller sizes may be valid.
    const int64_t lowest = dim.min_value() <= 2 ? 0 : dim.min_value();
    fits = dim.value() >= 0 ? size == dim.value() : size >= lowest && (dim.max_value() < 0 || size <= dim.max_value());
  }
  if (!fits) {
    fail(Error::InvalidArgument, label, ": got ", describe_tensor(tensor), ", expected ", describe(meta));
  }
  check_strides(tensor, label);
  check_argument(tensor.numel() == 0 || tensor.const_data_ptr() != nullptr, label, ": the tensor has no memory");
}

// Copies a tensor to an array. If the memory of the tensor is not row-major, the copy has the same memory order, and
// the array is a transposed view of the copy. The memory order is that of the tensor and not the one that the program
// declares: for a parameter in another order, ExecuTorch passes a row-major copy.
mx::array read_input(const Tensor& tensor, mx::Dtype dtype, mx::Stream stream) {
  const auto order = memory_order(tensor);
  mx::Shape shape;
  for (const int axis : order) {
    shape.push_back(static_cast<int>(tensor.size(axis)));
  }
  auto array = allocate(shape, dtype);
  if (array.nbytes() != 0) {
    std::memcpy(array.data<char>(), tensor.const_data_ptr(), array.nbytes());
  }
  if (is_row_major(order)) {
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
  fail(Error::InvalidArgument, label, ": got a value with tag ", static_cast<int>(value.tag), ", expected ",
      fb::EnumNameSlotType(type));
}

const Tensor& tensor_of(const EValue& value, const Label& label) {
  check_argument(
      value.isTensor(), label, ": got a value with tag ", static_cast<int>(value.tag), ", expected a tensor");
  return value.toTensor();
}

// The strides of elements without gaps, whose axes lie in memory in the order `order`, outermost first.
mx::Strides strides_in_order(const mx::Shape& shape, const std::vector<int>& order) {
  mx::Strides strides(order.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= shape[order[i]];
  }
  return strides;
}

// The order of axes in which the slot of an output holds the elements of the output, in row-major memory. The compiler
// writes it for a runtime that copies this memory as it is. Empty stands for row-major.
std::vector<int> order_held(const MlxProgram& program, const fb::SlotVariant& slot) {
  const auto& layout = program.layout;
  const bool is_output = slot.idx() >= layout.outputs_begin() && slot.idx() < layout.buffers_begin();
  return is_output ? executorch_mlx::memory_order(program.meta(slot.idx())) : std::vector<int>{};
}

// Returns an output array in the dtype of its ExecuTorch tensor. Two kinds of casts are allowed: from uint32 to
// int64, because MLX computes indices as uint32, and between float dtypes, because MLX promotes half precision to
// float32 in some operations. In both cases other compilers emit no cast and leave the cast to the runtime. Throws if
// the dtypes differ in any other way.
mx::array cast_output(const mx::array& array, const Tensor& tensor, const Label& label, mx::Stream stream) {
  const auto dtype = find_dtype(tensor.scalar_type());
  const bool is_index = dtype == mx::int64 && array.dtype() == mx::uint32;
  if (is_index || (dtype && is_float(*dtype) && is_float(array.dtype()))) {
    return mx::astype(array, *dtype, stream);
  }
  if (dtype != array.dtype()) {
    fail(Error::InvalidProgram, label, ": got ", describe(array), ", expected ", describe_tensor(tensor));
  }
  return array;
}

// Gives the ExecuTorch tensor the shape of `array`, and checks that the memory of the tensor can be written.
void resize_output(Tensor tensor, const mx::array& array, const Label& label, const MappedFiles& files) {
  using executorch::aten::SizesType;
  const std::vector<SizesType> sizes(array.shape().begin(), array.shape().end());
  const auto error =
      executorch::runtime::resize_tensor(tensor, executorch::aten::ArrayRef<SizesType>(sizes.data(), sizes.size()));
  if (error != Error::Ok) {
    fail(error, label, ": got ", describe(array), ", expected ", describe_tensor(tensor));
  }
  const void* memory = tensor.const_data_ptr();
  check_argument(array.size() == 0 || memory != nullptr, label, ": the tensor has no memory");
  // Since the program was loaded, other memory may have taken the place of a file.
  check_argument(!files.contains(memory) || !MappedFiles().contains(memory), label,
      ": the tensor is a constant in a file, and cannot be written");
}

} // namespace

void read_inputs(const MlxProgram& program, Arguments args, State& state, mx::Stream stream) {
  const auto* inputs = program.graph->input_map();
  const uint32_t expected = num_slots(inputs) + num_slots(program.graph->output_map());
  check_argument(args.size() == expected, "execute: got ", args.size(), " arguments, expected ", expected);
  for (uint32_t i = 0; i < num_slots(inputs); ++i) {
    const auto& slot = *inputs->Get(i);
    if (slot.slot_type() == fb::SlotType::TensorSlot) {
      const Label label{program, "input", i, slot};
      check_input(tensor_of(*args[i], label), program.meta(slot.idx()), label);
    }
  }
  for (uint32_t i = 0; i < num_slots(inputs); ++i) {
    const auto& slot = *inputs->Get(i);
    if (slot.slot_type() == fb::SlotType::TensorSlot) {
      const auto dtype = dtype_of(program.meta(slot.idx()).scalar_type());
      state.tensors[slot.idx()] = read_input(args[i]->toTensor(), dtype, stream);
    } else {
      state.values[slot.idx()] = read_value(*args[i], slot.slot_type(), Label{program, "input", i, slot});
    }
  }
}

std::optional<uint32_t> input_slot(const MlxProgram& program, std::string_view name) {
  const auto* inputs = program.graph->input_map();
  for (uint32_t i = 0; i < num_slots(inputs); ++i) {
    const auto& slot = *inputs->Get(i);
    const bool is_tensor = slot.slot_type() == fb::SlotType::TensorSlot;
    const char* own_name = is_tensor ? program.tensor_names[slot.idx()] : nullptr;
    if (own_name != nullptr && own_name == name && dtype_of(program.meta(slot.idx()).scalar_type()) == mx::int64) {
      return slot.idx();
    }
  }
  return std::nullopt;
}

std::vector<mx::array> collect_outputs(
    const MlxProgram& program, Arguments args, const State& state, const MappedFiles& files, mx::Stream stream) {
  std::vector<mx::array> arrays;
  const auto* outputs = program.graph->output_map();
  const uint32_t first = num_slots(program.graph->input_map());
  for (uint32_t i = 0; i < num_slots(outputs); ++i) {
    const auto& slot = *outputs->Get(i);
    if (slot.slot_type() != fb::SlotType::TensorSlot) {
      continue;
    }
    const Label label{program, "output", i, slot};
    const auto& array = state.tensors[slot.idx()];
    check_program(array.has_value(), label, " is never written");
    auto tensor = tensor_of(*args[first + i], label);
    arrays.push_back(cast_output(*array, tensor, label, stream));
    if (!is_row_major(order_held(program, slot))) { // the elements count in the order in which they lie in memory
      arrays.back() = mx::contiguous(arrays.back(), /*allow_col_major=*/false, stream);
    }
    resize_output(tensor, arrays.back(), label, files);
  }
  return arrays;
}

void write_tensor_outputs(const MlxProgram& program, Arguments args, const std::vector<mx::array>& arrays) {
  const auto* outputs = program.graph->output_map();
  const uint32_t first = num_slots(program.graph->input_map());
  auto array = arrays.begin();
  for (uint32_t i = 0; i < num_slots(outputs); ++i) {
    if (outputs->Get(i)->slot_type() != fb::SlotType::TensorSlot) {
      continue;
    }
    const mx::array& x = *array++;
    if (x.size() == 0) {
      continue;
    }
    auto tensor = args[first + i]->toTensor();
    const auto held = order_held(program, *outputs->Get(i));
    const auto& dim_order = tensor.dim_order();
    const std::vector<int> order(dim_order.begin(), dim_order.end());
    auto* to = static_cast<char*>(tensor.mutable_data_ptr());
    if (x.flags().row_contiguous && (order == held || (is_row_major(order) && is_row_major(held)))) {
      std::memcpy(to, x.data<char>(), x.nbytes());
    } else {
      const auto strides = is_row_major(held) ? x.strides() : strides_in_order(x.shape(), held);
      strided_copy(x.shape(), x.itemsize(), x.data<char>(), strides, to, strides_in_order(x.shape(), order));
    }
  }
}

void write_value_outputs(const MlxProgram& program, Arguments args, const State& state) {
  const auto* outputs = program.graph->output_map();
  const uint32_t first = num_slots(program.graph->input_map());
  for (uint32_t i = 0; i < num_slots(outputs); ++i) {
    const auto& slot = *outputs->Get(i);
    if (slot.slot_type() == fb::SlotType::TensorSlot) {
      continue;
    }
    const Label label{program, "output", i, slot};
    EValue& output = *args[first + i];
    const auto write = [&]<typename T>(const T& value) {
      if constexpr (std::is_same_v<T, std::monostate>) {
        fail(Error::InvalidProgram, label, " is never written");
      } else {
        const EValue result(value);
        // In place of a tensor, the value would break instructions that take the tensor.
        check_argument(output.isNone() || output.tag == result.tag, label, ": got a value with tag ",
            static_cast<int>(result.tag), ", expected tag ", static_cast<int>(output.tag));
        output = result;
      }
    };
    std::visit(write, state.values[slot.idx()]);
  }
}

} // namespace executorch_mlx
