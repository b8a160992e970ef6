// Recurrences over the tokens of a sequence, and the states of layers. See op.h.
#include <algorithm>

#include "kernels/cpu/token_recurrence.h"
#include "memory/views.h"
#include "memory/kernel_result.h"
#include "ops/index.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace cpu { // kernels for Linux CPUs: see memory/kernel_result.h

namespace {

// The operands of GatedRecurrenceNode and SelectiveScanNode: see schema.fbs. They are float32, and their shapes are
// checked.
struct GatedRecurrenceInputs {
  mx::array query;
  mx::array key;
  mx::array value;
  mx::array decay;
  std::optional<mx::array> beta;
  mx::array state;
};

struct SelectiveScanInputs {
  mx::array x;
  mx::array step;
  mx::array key;
  mx::array query;
  mx::array rates;
  mx::array state;
};

// The outputs of all tokens, and the state after the last one.
struct RecurrenceStates {
  mx::array out;
  mx::array state;
};

bool are_supported(const std::vector<mx::array>& arrays, mx::Stream stream) {
  return std::all_of(arrays.begin(), arrays.end(),
      [&](const mx::array& x) { return is_supported_operand(x, stream) && x.dtype() == mx::float32; });
}

// x [batch, heads, tokens, width], or without the last axis.
kernel::Tokens tokens_of_heads(const mx::array& x) {
  return {x.data<float>(), {x.strides(0), x.strides(1), x.strides(2), x.ndim() == 4 ? x.strides(3) : 0}};
}

// x [batch, tokens, width].
kernel::Tokens tokens_of(const mx::array& x) {
  return {x.data<float>(), {x.strides(0), 0, x.strides(1), x.strides(2)}};
}

mx::array exchange_axes(const mx::array& x, int a, int b, mx::Stream stream) {
  std::vector<int> axes(x.ndim());
  for (int i = 0; i < static_cast<int>(axes.size()); ++i) {
    axes[i] = i == a ? b : i == b ? a : i;
  }
  return views::transpose(x, axes, stream);
}

// Whether the memory of an available state [batch, heads, size, columns] has the columns as rows, in a form that the
// kernel reads as it is.
bool is_transposed(const mx::array& state, mx::Stream stream) {
  return state.is_available() && !state.flags().row_contiguous && state.shape(2) % 16 == 0 &&
      exchange_axes(state, 2, 3, stream).flags().row_contiguous;
}

// Recurrences over tokens, token by token: the results have the same bits however the tokens are divided into calls.
std::optional<RecurrenceStates> gated_recurrence(const GatedRecurrenceInputs& r, mx::Stream stream) {
  std::vector<mx::array> inputs{r.query, r.key, r.value, r.decay, r.state};
  if (r.beta) {
    inputs.push_back(*r.beta);
  }
  if (!are_supported(inputs, stream)) {
    return std::nullopt;
  }
  const bool transposed = is_transposed(r.state, stream);
  inputs[4] = transposed ? exchange_axes(r.state, 2, 3, stream) : contiguous(r.state, stream);
  const auto make_task = [transposed](const auto& inputs, auto& outputs) -> Task {
    const auto &query = inputs[0], &value = inputs[2], &decay = inputs[3];
    const kernel::GatedRecurrence task{.query = tokens_of_heads(query),
        .key = tokens_of_heads(inputs[1]),
        .value = tokens_of_heads(value),
        .decay = tokens_of_heads(decay),
        .beta = inputs.size() > 5 ? tokens_of_heads(inputs[5]) : kernel::Tokens{},
        .decays_by_channel = decay.ndim() == 4,
        .batch = value.shape(0),
        .heads = value.shape(1),
        .groups = query.shape(1),
        .tokens = value.shape(2),
        .size = query.shape(3),
        .columns = value.shape(3),
        .state = inputs[4].template data<float>(),
        .next = outputs[1].template data<float>(),
        .is_transposed = transposed,
        .y = outputs[0].template data<float>()};
    return [task] { kernel::gated_recurrence(task); };
  };
  // The layers of a model want the heads of a token beside each other.
  const auto& shape = r.value.shape();
  auto results = kernel_results("GatedRecurrence", {{shape[0], shape[2], shape[1], shape[3]}, inputs[4].shape()},
      {mx::float32, mx::float32}, inputs, stream, make_task);
  return RecurrenceStates{
      exchange_axes(results[0], 1, 2, stream), transposed ? exchange_axes(results[1], 2, 3, stream) : results[1]};
}

std::optional<RecurrenceStates> selective_scan(const SelectiveScanInputs& s, mx::Stream stream) {
  std::vector<mx::array> inputs{s.x, s.step, s.key, s.query, s.rates, s.state};
  if (!are_supported(inputs, stream)) {
    return std::nullopt;
  }
  for (int i = 2; i < 6; ++i) {
    inputs[i] = contiguous(inputs[i], stream);
  }
  const auto make_task = [](const auto& inputs, auto& outputs) -> Task {
    const auto& x = inputs[0];
    const kernel::SelectiveScan task{.x = tokens_of(x),
        .step = tokens_of(inputs[1]),
        .key = tokens_of(inputs[2]),
        .query = tokens_of(inputs[3]),
        .rates = inputs[4].template data<float>(),
        .batch = x.shape(0),
        .tokens = x.shape(1),
        .channels = x.shape(2),
        .size = inputs[4].shape(1),
        .state = inputs[5].template data<float>(),
        .next = outputs[1].template data<float>(),
        .y = outputs[0].template data<float>()};
    return [task] { kernel::selective_scan(task); };
  };
  auto results = kernel_results(
      "SelectiveScan", {s.x.shape(), s.state.shape()}, {mx::float32, mx::float32}, inputs, stream, make_task);
  return RecurrenceStates{results[0], results[1]};
}

// The states [B, N] of the given rows of `states` [1, 1, R, N]. -1 in place of a row stands for zeros. nullopt also if
// the states are lazy.
std::optional<mx::array> read_layer_state(const mx::array& states, const std::vector<int>& rows, mx::Stream stream) {
  if (!computes_at_once(stream) || !states.is_available() || !states.flags().row_contiguous || states.size() == 0) {
    return std::nullopt;
  }
  const int64_t bytes = states.shape(3) * static_cast<int64_t>(states.itemsize());
  std::vector<const void*> from;
  for (const int row : rows) {
    from.push_back(row < 0 ? nullptr : states.data<char>() + row * bytes);
  }
  auto out = allocate_result({static_cast<int>(rows.size()), states.shape(3)}, states.dtype());
  if constexpr (kHasKernels) {
    kernel::copy_rows(from.data(), static_cast<int64_t>(from.size()), bytes, out.data<void>());
  }
  return out;
}

} // namespace

} // namespace cpu

namespace {

// Checks that x is float32 with this shape.
void check_tokens(const char* name, const mx::array& x, const mx::Shape& shape) {
  check_argument(
      x.dtype() == mx::float32 && x.shape() == shape, name, ": got ", describe(x), ", expected float32", dims(shape));
}

// Sets the results of a kernel. Devices without kernels run the instructions that the node replaces in a program: see
// runs_as_replacement() in program.cpp.
template <typename Node>
void set_results(const Node& n, const std::optional<cpu::RecurrenceStates>& results, Context& c) {
  if (!results) {
    fail(Error::NotSupported, "this device has no kernel for recurrences");
  }
  c.set(n.out(), results->out);
  c.set(n.out_state(), results->state);
}

void gated_recurrence(const fb::GatedRecurrenceParams& n, Context& c) {
  c.make_available({n.query(), n.key(), n.value(), n.decay(), n.beta(), n.state()});
  const cpu::GatedRecurrenceInputs r{.query = c.in(n.query()),
      .key = c.in(n.key()),
      .value = c.in(n.value()),
      .decay = c.in(n.decay()),
      .beta = c.optional(n.beta()),
      .state = c.in(n.state())};
  check_argument(r.query.ndim() == 4 && r.value.ndim() == 4 && (r.decay.ndim() == 3 || r.decay.ndim() == 4),
      "got query ", describe(r.query), ", value ", describe(r.value), " and decay ", describe(r.decay),
      ", expected 4 axes, or 3 of the decay");
  const int batch = r.value.shape(0), heads = r.value.shape(1), tokens = r.value.shape(2), columns = r.value.shape(3);
  const int query_heads = r.query.shape(1), size = r.query.shape(3);
  check_argument(query_heads > 0 && heads % query_heads == 0, "value: got ", heads,
      " heads, expected a multiple of the ", query_heads, " of the query");
  check_tokens("query", r.query, {batch, query_heads, tokens, size});
  check_tokens("key", r.key, r.query.shape());
  check_tokens("value", r.value, r.value.shape());
  check_tokens("state", r.state, {batch, heads, size, columns});
  const mx::Shape numbers{batch, heads, tokens};
  check_tokens("decay", r.decay, r.decay.ndim() == 4 ? mx::Shape{batch, heads, tokens, size} : numbers);
  if (r.beta) {
    check_tokens("beta", *r.beta, numbers);
  }
  // A token reads the state for the products with its query and its key, and writes it.
  for (int i = 0; i < 3; ++i) {
    c.count_operations(r.state.size(), tokens);
  }
  if (r.value.size() == 0 || size == 0) {
    c.set(n.out(), mx::zeros(r.value.shape(), mx::float32, c.stream));
    return c.set(n.out_state(), r.state);
  }
  set_results(n, cpu::gated_recurrence(r, c.stream), c);
}

void selective_scan(const fb::SelectiveScanParams& n, Context& c) {
  c.make_available({n.x(), n.step(), n.key(), n.query(), n.rates(), n.state()});
  const cpu::SelectiveScanInputs s{.x = c.in(n.x()),
      .step = c.in(n.step()),
      .key = c.in(n.key()),
      .query = c.in(n.query()),
      .rates = c.in(n.rates()),
      .state = c.in(n.state())};
  check_argument(s.x.ndim() == 3 && s.rates.ndim() == 2, "got x ", describe(s.x), " and rates ", describe(s.rates),
      ", expected 3 and 2 axes");
  const int batch = s.x.shape(0), tokens = s.x.shape(1), channels = s.x.shape(2), size = s.rates.shape(1);
  check_tokens("x", s.x, s.x.shape());
  check_tokens("step", s.step, s.x.shape());
  check_tokens("key", s.key, {batch, tokens, size});
  check_tokens("query", s.query, {batch, tokens, size});
  check_tokens("rates", s.rates, {channels, size});
  check_tokens("state", s.state, {batch, channels, size});
  for (int i = 0; i < 4; ++i) { // an exponential takes longer than a product
    c.count_operations(s.state.size(), tokens);
  }
  if (s.x.size() == 0 || size == 0) {
    c.set(n.out(), mx::zeros(s.x.shape(), mx::float32, c.stream));
    return c.set(n.out_state(), s.state);
  }
  set_results(n, cpu::selective_scan(s, c.stream), c);
}

// Returns which of the rows of the states to copy, and -1 for zeros. nullopt if an operand is lazy.
std::optional<std::vector<int>> rows_to_read(
    const mx::array& start, const std::optional<mx::array>& row, int rows, Context& c) {
  if (!cpu::computes_at_once(c.stream) || !start.is_available() || (row && !row->is_available())) {
    return std::nullopt;
  }
  std::vector<int> result;
  for (int i = 0; i < start.shape(0); ++i) {
    const int64_t index = row ? row->data<int64_t>()[i * row->strides(0)] : 0;
    check_argument(index >= 0 && index < rows, "row: got ", index, ", expected rows in [0, ", rows, ")");
    result.push_back(start.data<int64_t>()[i * start.strides(0)] == 0 ? -1 : static_cast<int>(index));
  }
  return result;
}

void read_layer_state(const fb::ReadLayerStateParams& n, Context& c) {
  c.make_available({n.start(), n.row()});
  const auto& states = c.in(n.states());
  const auto start = c.in(n.start());
  const auto row = c.optional(n.row());
  check_argument(states.ndim() == 4 && states.shape(0) == 1 && states.shape(1) == 1 && (row || states.shape(2) == 1),
      "states: got ", describe(states), ", expected [1, 1, R, N], where R is 1 without row");
  check_argument(start.dtype() == mx::int64 && start.ndim() == 1 &&
          (!row || (row->dtype() == mx::int64 && row->shape() == start.shape())),
      "start: got ", describe(start), ", expected int64[B], also for row");
  check_size({start.shape(0), states.shape(3)}, states.dtype());
  if (const auto rows = rows_to_read(start, row, states.shape(2), c)) {
    if (const auto y = cpu::read_layer_state(states, *rows, c.stream)) {
      return c.set(n.out(), *y);
    }
  }
  auto held = views::reshape(states, {states.shape(2), states.shape(3)}, c.stream);
  if (row) {
    held = mx::take(held, bounded_indices(*row, states.shape(2), c, /*from_end=*/false), 0, c.stream);
  }
  const auto is_first = mx::expand_dims(mx::equal(start, mx::array(int64_t{0}), c.stream), 1, c.stream);
  c.set(n.out(), mx::where(is_first, mx::zeros({}, states.dtype(), c.stream), held, c.stream));
}

} // namespace

MLX_OP(GatedRecurrenceNode, gated_recurrence)
MLX_OP(ReadLayerStateNode, read_layer_state)
MLX_OP(SelectiveScanNode, selective_scan)

} // namespace executorch_mlx
