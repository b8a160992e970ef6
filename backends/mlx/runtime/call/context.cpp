#include "call/context.h"

#include <algorithm>

#include "../serialization/output_fields.h"
#include "call/profile.h"
#include "gpu/fused.h"
#include "gpu/verdicts.h"
#include "memory/mapped_files.h"
#include "program/dispatch_table.h"

namespace executorch_mlx {

namespace {

// The largest number of instructions without an evaluation, which bounds the memory of the graph that is not evaluated
// yet. Only loops run so many instructions.
constexpr int64_t kMaxUnevaluated = 1 << 16;

// The number of elements of a list that a message shows.
constexpr uint32_t kShownElements = 8;

} // namespace

void Context::run(uint32_t index, size_t begin, size_t end) {
  count_instruction(); // so that a loop whose body is empty ends, too
  const Chain& chain = program_.chains[index];
  const auto* const caller = instruction_;
  size_t i = begin;
  ++depth_;
  try {
    while (i < std::min(end, chain.instructions.size())) {
      i += run_instruction(index, i);
    }
    --depth_;
    instruction_ = caller;
  } catch (const LocatedFailure&) {
    throw;
  } catch (const std::exception& error) {
    const auto& instruction = *chain.instructions[i].source;
    const auto* failure = dynamic_cast<const Failure*>(&error);
    const bool lacks_memory = failure == nullptr && is_out_of_memory(error);
    throw LocatedFailure(failure ? failure->code
            : lacks_memory       ? Error::MemoryAllocationFailed
                                 : Error::InvalidArgument,
        str("chain ", index, ", instruction ", chain.instructions[i].index, " (",
            find_row(size_t(instruction.op_type()))->name, "): ", lacks_memory ? "out of memory: " : "", error.what(),
            "; ", describe_operands(instruction)));
  }
}

void Context::count_instruction() {
  if (++executed_ > limits_.instructions) [[unlikely]] {
    fail(Error::OutOfResources, "more than ", limits_.instructions, " instructions in one call");
  }
}

size_t Context::run_instruction(uint32_t index, size_t i) {
  const DecodedInstruction& instruction = program_.chains[index].instructions[i];
  instruction_ = &instruction;
  count_instruction();
  operations_ += instruction.list_elements;
  const bool is_fused = instruction.fused != nullptr && run_fused(instruction);
  if (instruction.operands != nullptr) {
    hold(*instruction.operands, /*is_fused=*/is_fused);
  }
  if (profiler_ != nullptr) [[unlikely]] {
    profiler_->run(*this, index, i);
  } else if (!is_fused) {
    instruction.function(instruction.node, *this);
  }
  check_operations(operations_);
  if (executed_ - evaluated_at_ >= kMaxUnevaluated) [[unlikely]] {
    evaluate_slots();
  }
  const size_t length = is_fused ? instruction.fused->length : 1;
  release_slots(program_.chains[index], i, i + length);
  return length;
}

void Context::release_slots(const Chain& chain, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    for (const uint32_t slot : chain.instructions[i].released) {
      state_.tensors[slot].reset();
    }
  }
}

bool Context::run_fused(const DecodedInstruction& instruction) {
  const auto& fused = *instruction.fused;
  const int64_t others = int64_t{fused.length} - 1;
  if (profiler_ != nullptr || executed_ + others > limits_.instructions || !fused.run(*this)) {
    return false;
  }
  executed_ += others;
  operations_ += fused.list_elements;
  return true;
}

void Context::hold(const HeldOperands& operands, bool is_fused) {
  const auto can_hold = [&](const fb::Tid* slot) {
    const auto& x = state_.tensors[slot->idx()];
    const bool has_rows = x && x->ndim() > 0 && x->size() > 0;
    return x && !program_.layout.is_buffer(slot->idx()) &&
        (!has_rows || static_cast<int64_t>(x->size()) / x->shape(-1) <= operands.max_rows);
  };
  const bool holds = !is_fused && std::all_of(operands.slots.begin(), operands.slots.end(), can_hold);
  for (size_t i = 0; i < operands.slots.size(); ++i) {
    state_.held[operands.first + i] = holds ? state_.tensors[operands.slots[i]->idx()] : std::nullopt;
  }
}

void Context::check_operations(uint64_t operations) const {
  if (operations > static_cast<uint64_t>(limits_.operations)) [[unlikely]] {
    fail(Error::OutOfResources, "more than ", limits_.operations, " operations in one call");
  }
}

uint64_t Context::product_operations(const mx::Shape& shape, mx::Dtype dtype, int64_t depth) {
  check_size(shape, dtype);
  uint64_t operations = depth;
  for (const int size : shape) {
    operations *= static_cast<uint64_t>(size);
  }
  return operations;
}

bool Context::allows_iterations(int iterations, int64_t instructions, uint64_t operations) const {
  const auto left = static_cast<uint64_t>(limits_.operations) - std::min<uint64_t>(operations_, limits_.operations);
  return instructions <= (limits_.instructions - executed_) / iterations && operations <= left / iterations;
}

void Context::count_iterations(int iterations, int64_t instructions, uint64_t operations) {
  executed_ += instructions * iterations;
  operations_ += operations * iterations;
}

mx::array Context::take_rows(const mx::array& x, const mx::array& indices) {
  constexpr int kRows = 64; // the system maps up to 2 MB of a file for each of them
  const auto* const pages = instruction_->partly_read.get();
  const auto count = static_cast<int>(indices.size());
  if (pages == nullptr || count == 0 || !can_evaluate()) {
    return mx::take(x, indices, 0, stream);
  }
  const auto flat = mx::reshape(indices, {count}, stream);
  std::vector<mx::array> parts;
  for (int i = 0; i < count; i += kRows) {
    parts.push_back(mx::take(x, mx::slice(flat, {i}, {std::min(count, i + kRows)}, stream), 0, stream));
    state_.evaluate({parts.back()}, stream);
    pages->release();
  }
  auto shape = indices.shape();
  shape.insert(shape.end(), x.shape().begin() + 1, x.shape().end());
  return mx::reshape(mx::concatenate(std::move(parts), 0, stream), shape, stream);
}

bool Context::allows_host_updates() const { return stream.device == mx::Device::cpu; }

void Context::set_updated(const fb::Tid* tid, mx::array x, const mx::array& update, const mx::Shape& start,
    const mx::Shape& stop, const mx::Shape& steps) {
  if (allows_host_updates() && state_.update_in_place(tid->idx(), x, update, start, stop, steps)) {
    return set(tid, std::move(x));
  }
  const bool is_position = x.ndim() == 4 && start == mx::Shape{0, 0, start[2], 0} &&
      stop == mx::Shape{x.shape(0), x.shape(1), start[2] + 1, x.shape(3)};
  if (is_position && gpu::is_used(gpu::Kernel::attention, stream) && state_.can_update_in_place(tid->idx(), x)) {
    if (auto updated = gpu::update_positions(x, update, {start[2]}, stream)) {
      return set(tid, std::move(*updated));
    }
  }
  set(tid, mx::slice_update(x, update, start, stop, steps, stream));
}

bool Context::set_positions(const fb::Tid* tid, mx::array& x, const mx::array& update, const mx::Shape& positions) {
  if (allows_host_updates() && state_.update_positions_in_place(tid->idx(), x, update, positions)) {
    set(tid, std::move(x));
    return true;
  }
  if (gpu::is_used(gpu::Kernel::attention, stream) && state_.can_update_in_place(tid->idx(), x)) {
    if (auto updated = gpu::update_positions(x, update, {positions.begin(), positions.end()}, stream)) {
      set(tid, std::move(*updated));
      return true;
    }
  }
  return false;
}

void Context::evaluate_slots() {
  evaluated_at_ = executed_;
  std::vector<mx::array> arrays;
  for (const auto& slot : state_.tensors) {
    if (slot && !slot->is_available()) {
      arrays.push_back(*slot);
    }
  }
  state_.evaluate(std::move(arrays), stream);
}

int64_t Context::integer(const fb::Vid* vid) const {
  const Value& value = state_.values[vid->idx()];
  if (const auto* x = std::get_if<int64_t>(&value)) {
    return *x;
  }
  if (const auto* x = std::get_if<bool>(&value)) {
    return *x;
  }
  fail(Error::InvalidProgram, "value slot ", vid->idx(),
      std::holds_alternative<double>(value) ? ": got a float, expected an integer" : " is read before it is written");
}

double Context::real(const fb::FloatOrVid* x) const {
  if (!x->is_vid()) {
    return x->literal();
  }
  const auto* value = std::get_if<double>(&state_.values[x->vid()->idx()]);
  return value ? *value : static_cast<double>(integer(x->vid()));
}

std::string Context::slot_name(uint32_t tensor) const {
  const char* name = program_.tensor_names[tensor];
  return name ? str("tensor slot ", tensor, " \"", name, "\"") : str("tensor slot ", tensor);
}

namespace {

// Appends a field of an instruction to a message if the field is an operand or an integer, as in
// `x=%3 float32[2,5], axis=1`.
class FieldPrinter {
 public:
  FieldPrinter(const State& state, std::string& text) : state_(state), text_(text) {}

  void operator()(const Field& field) const {
    const bool is_result = is_output_field(field.name) && !is_inout_field(field.name);
    if (field.value == nullptr || field.type == nullptr || is_result) {
      return integer(field);
    }
    text_ += str(text_.empty() ? "" : ", ", field.name, "=");
    if (field.is(fb::TidTypeTable) && field.repeated) {
      list(field.vector<const fb::Tid*>(), [&](const auto* tid) { tensor(tid); });
    } else if (field.is(fb::TidTypeTable)) {
      tensor(&field.structure<fb::Tid>());
    } else if (field.is(fb::VidTypeTable)) {
      value(&field.structure<fb::Vid>());
    } else if (field.is(fb::IntOrVidTypeTable) && field.repeated) {
      list(field.vector<flatbuffers::Offset<fb::IntOrVid>>(), [&](const auto* x) { number(*x); });
    } else if (field.is(fb::IntOrVidTypeTable)) {
      number(field.table<fb::IntOrVid>());
    } else if (field.is(fb::FloatOrVidTypeTable)) {
      number(field.table<fb::FloatOrVid>());
    } else if (field.is(fb::VidOrTidTypeTable)) {
      const auto& x = field.table<fb::VidOrTid>();
      x.is_vid() ? value(x.vid()) : tensor(x.tid());
    } else if (field.is(fb::IntOrVidOrTidTypeTable)) {
      const auto& x = field.table<fb::IntOrVidOrTid>();
      x.kind() == 0 ? void(text_ += str(x.literal())) : x.kind() == 1 ? value(x.vid()) : tensor(x.tid());
    }
  }

 private:
  // Appends the field if it is a plain integer.
  void integer(const Field& field) const {
    if (field.value == nullptr || field.repeated || field.type != nullptr) {
      return;
    }
    if (field.base == flatbuffers::ET_INT) {
      text_ += str(text_.empty() ? "" : ", ", field.name, "=", flatbuffers::ReadScalar<int32_t>(field.value));
    }
  }

  template <typename List, typename Print>
  void list(const List& items, Print&& print) const {
    text_ += "[";
    for (uint32_t i = 0; i < items.size() && i < kShownElements; ++i) {
      text_ += i == 0 ? "" : " ";
      print(items.Get(i));
    }
    text_ += items.size() > kShownElements ? " ...]" : "]";
  }

  template <typename Number>
  void number(const Number& x) const {
    x.is_vid() ? value(x.vid()) : void(text_ += str(x.literal()));
  }

  void tensor(const fb::Tid* tid) const {
    const auto& slot = state_.tensors[tid->idx()];
    text_ += str("%", tid->idx(), " ");
    text_ += slot ? str(describe(*slot)) : "(empty)";
  }

  void value(const fb::Vid* vid) const {
    const auto print = [&]<typename T>(const T& x) {
      if constexpr (std::is_same_v<T, std::monostate>) {
        text_ += "(empty)";
      } else {
        text_ += str(x);
      }
    };
    std::visit(print, state_.values[vid->idx()]);
  }

  const State& state_;
  std::string& text_;
};

} // namespace

std::string Context::describe_operands(const fb::Instruction& instruction) const {
  std::string text;
  for_each_field(*static_cast<const flatbuffers::Table*>(instruction.op()), type_of(instruction.op_type()),
      FieldPrinter(state_, text));
  return text;
}

} // namespace executorch_mlx
