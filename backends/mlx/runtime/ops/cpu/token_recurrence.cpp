// Recurrences over tokens, and the states of layers: see cpu_kernels.h.
#include <algorithm>

#include "memory/views.h"
#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/token_recurrence.h"
#include "ops/cpu/primitive.h"

namespace executorch_mlx::cpu {

namespace {

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

} // namespace

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
  const auto make_task = [transposed](const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) -> Task {
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
        .state = inputs[4].data<float>(),
        .next = outputs[1].data<float>(),
        .is_transposed = transposed,
        .y = outputs[0].data<float>()};
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
  const auto make_task = [](const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) -> Task {
    const auto& x = inputs[0];
    const kernel::SelectiveScan task{.x = tokens_of(x),
        .step = tokens_of(inputs[1]),
        .key = tokens_of(inputs[2]),
        .query = tokens_of(inputs[3]),
        .rates = inputs[4].data<float>(),
        .batch = x.shape(0),
        .tokens = x.shape(1),
        .channels = x.shape(2),
        .size = inputs[4].shape(1),
        .state = inputs[5].data<float>(),
        .next = outputs[1].data<float>(),
        .y = outputs[0].data<float>()};
    return [task] { kernel::selective_scan(task); };
  };
  auto results = kernel_results(
      "SelectiveScan", {s.x.shape(), s.state.shape()}, {mx::float32, mx::float32}, inputs, stream, make_task);
  return RecurrenceStates{results[0], results[1]};
}

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
  kernel::copy_rows(from.data(), static_cast<int64_t>(from.size()), bytes, out.data<void>());
  return out;
}

} // namespace executorch_mlx::cpu
