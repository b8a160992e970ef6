#include "dispatch.h"

#include <unistd.h>

#include <array>
#include <cstring>
#include <new>

#include "context.h"
#include "ops/attention.h"
#include "ops/control.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/index.h"
#include "ops/linalg.h"
#include "ops/norm.h"
#include "ops/quant.h"
#include "ops/random.h"
#include "ops/reduce.h"
#include "ops/row.h"
#include "ops/scalar.h"
#include "ops/shape.h"

namespace executorch_mlx {

namespace {

// An instruction budget far above any real call: what a damaged program can ask
// for with scans inside scans has to end.
constexpr uint64_t kMaxExecuted = 1 << 24;

constexpr size_t kNumRows = static_cast<size_t>(fb::OpNode::MAX) + 1;

using Table = std::array<Row, kNumRows>;

template <size_t... Sizes>
constexpr Table make_table(const Row (&... families)[Sizes]) {
  Table table{};
  const auto place = [&](const auto& rows) {
    for (const Row& row : rows) {
      table[static_cast<size_t>(row.op)] = row;
    }
  };
  (place(families), ...);
  return table;
}

constexpr Table kTable = make_table(
    kAttentionRows, kControlRows, kConvRows, kCreateRows, kElementwiseRows, kIndexRows,
    kLinalgRows, kNormRows, kQuantRows, kRandomRows, kReduceRows, kScalarRows, kShapeRows);

constexpr size_t count_rows() {
  size_t count = 0;
  for (const Row& row : kTable) {
    count += row.handler != nullptr;
  }
  return count;
}

// The schema's list of ops counts NONE in.
static_assert(
    count_rows() + 1 == std::extent_v<std::remove_reference_t<decltype(fb::EnumValuesOpNode())>>,
    "an op of the schema has no row, or has two");

} // namespace

const Row* find_row(size_t tag) {
  return tag < kTable.size() && kTable[tag].handler != nullptr ? &kTable[tag] : nullptr;
}

size_t num_rows() {
  return count_rows();
}

void Context::run(uint32_t index) {
  const Chain& chain = program.chains[index];
  size_t i = 0;
  try {
    for (; i < chain.steps.size(); ++i) {
      if (++executed_ > kMaxExecuted) [[unlikely]] {
        fail(Error::InvalidProgram, "more than ", kMaxExecuted, " instructions in one call");
      }
      if (tracer_ != nullptr) [[unlikely]] {
        run_traced(index, i);
      } else {
        chain.steps[i].handler(chain.steps[i].payload, *this);
      }
    }
  } catch (const LocatedFailure&) {
    throw;
  } catch (const std::exception& error) {
    const auto& instruction = *chain.source->instructions()->Get(static_cast<uint32_t>(i));
    const auto* failure = dynamic_cast<const Failure*>(&error);
    const bool no_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
    throw LocatedFailure(
        failure ? failure->code : no_memory ? Error::MemoryAllocationFailed : Error::InvalidArgument,
        str("chain ", index, ", instruction ", i, " (", find_row(size_t(instruction.op_type()))->name,
            "): ", error.what(), "; ", describe(instruction)));
  }
}

void Context::check_size(const mx::Shape& shape, mx::Dtype dtype) {
  // A result larger than half of this machine's memory is a damaged program.
  static const int64_t limit = std::min<int64_t>(
      int64_t{1} << 34, int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE) / 2);
  int64_t elements = 1;
  for (const int size : shape) {
    if (size == 0) {
      return;
    }
    if (__builtin_mul_overflow(elements, size, &elements) || elements > std::numeric_limits<int32_t>::max()) {
      fail(Error::OutOfResources, "a result of shape ", dims(shape), " has more than 2^31 elements");
    }
  }
  if (elements * int64_t(mx::size_of(dtype)) > limit) {
    fail(Error::OutOfResources, "a result of shape ", dims(shape), " and ", name(dtype), " takes more than ", limit, " bytes");
  }
}

int64_t Context::integer(const fb::Vid* vid) const {
  const Value& value = state_.values[vid->idx()];
  if (const auto* x = std::get_if<int64_t>(&value)) {
    return *x;
  }
  if (const auto* x = std::get_if<bool>(&value)) {
    return *x;
  }
  fail(
      Error::InvalidProgram,
      std::holds_alternative<double>(value) ? "reads a float as an integer from value slot "
                                            : "reads what nothing has written, value slot ",
      vid->idx());
}

double Context::real(const fb::FloatOrVid* x) const {
  if (!x->is_vid()) {
    return x->literal();
  }
  const auto* value = std::get_if<double>(&state_.values[x->vid()->idx()]);
  return value ? *value : static_cast<double>(integer(x->vid()));
}

std::string Context::slot_name(uint32_t tensor) const {
  const char* name = program.tensor_names[tensor];
  return name ? str("tensor slot ", tensor, " \"", name, "\"") : str("tensor slot ", tensor);
}

namespace {

// One field of an instruction with what it holds: `x=%3 float32[2,5]`.
class FieldPrinter {
 public:
  FieldPrinter(const State& state, std::string& text) : state_(state), text_(text) {}

  void operator()(const Field& field) const {
    if (field.value == nullptr || field.type == nullptr || std::strncmp(field.name, "out", 3) == 0) {
      return scalar(field);
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
  void scalar(const Field& field) const {
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
    for (uint32_t i = 0; i < items.size() && i < 8; ++i) {
      text_ += i == 0 ? "" : " ";
      print(items.Get(i));
    }
    text_ += items.size() > 8 ? " ...]" : "]";
  }

  template <typename Number>
  void number(const Number& x) const {
    x.is_vid() ? value(x.vid()) : void(text_ += str(x.literal()));
  }

  void tensor(const fb::Tid* tid) const {
    const auto& slot = state_.tensors[tid->idx()];
    text_ += str("%", tid->idx(), " ");
    text_ += slot ? str(executorch_mlx::describe(*slot)) : "(empty)";
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

std::string Context::describe(const fb::Instruction& instruction) const {
  std::string text;
  for_each_field(
      *static_cast<const flatbuffers::Table*>(instruction.op()),
      type_of(instruction.op_type()),
      FieldPrinter(state_, text));
  return text;
}

} // namespace executorch_mlx
