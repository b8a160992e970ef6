// Loops over the time steps of recurrent layers.
#include <algorithm>

#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/recurrent_loop.h"
#include "memory/kernel_result.h"

namespace executorch_mlx::cpu {

namespace {

// Elements of the product of a time step. With more of them, the threads have enough work in each operation.
constexpr int64_t kMaxElements = 1 << 17;

using Step = ElementwiseSequence::Step;
using Source = RecurrentCell::Source;

// Translates a cell and its operands to the arguments of the kernel. Numbers of values are those of the kernel.
class Translation {
 public:
  Translation(const RecurrentCell& cell, const RecurrentLoopOperands& operands, const mx::array& packed)
      : cell_(cell),
        operands_(operands),
        time_steps_(operands.originals[0].shape(operands.axis)),
        rows_(operands.carries[cell.hidden].shape(0)),
        units_(operands.carries[cell.hidden].shape(1)),
        gates_(static_cast<int>(packed.size() / units_ / units_)),
        packed_(packed) {}

  bool is_supported() {
    return add_carries() && add_inputs() && add_addend() && add_steps() && has_supported_results();
  }

  RecurrentLoopResults compute() {
    std::vector<CellOutput> outputs;
    const auto last = [&](int value) {
      auto y = allocate_result({rows_, blocks_[value] * units_}, mx::float32);
      outputs.push_back({value, y.data<float>(), 0, y.shape(1)});
      return y;
    };
    RecurrentLoopResults results{{}, {}, {}, last(0)};
    for (const uint32_t step : cell_.carry_steps) {
      results.carries.push_back(last(value_of_step(step)));
    }
    for (const uint32_t step : cell_.last_steps) {
      results.last.push_back(last(value_of_step(step)));
    }
    mx::Shape shape{rows_, rows_, units_};
    shape[operands_.axis] = time_steps_;
    for (const uint32_t step : cell_.output_steps) {
      results.outputs.push_back(allocate_result(shape, mx::float32));
      auto& y = results.outputs.back();
      outputs.push_back(
          {value_of_step(step), y.data<float>(), y.strides(operands_.axis), y.strides(1 - operands_.axis)});
    }
    const kernel::RecurrentLoop arguments{.time_steps = time_steps_,
        .rows = rows_,
        .units = units_,
        .gates = gates_,
        .max_blocks = *std::max_element(blocks_.begin(), blocks_.end()),
        .packed = packed_.data<float>(),
        .addend = addend_,
        .hidden = static_cast<int>(cell_.hidden),
        .carries = carries_.data(),
        .num_carries = static_cast<int>(carries_.size()),
        .inputs = inputs_.data(),
        .num_inputs = static_cast<int>(inputs_.size()),
        .steps = steps_.data(),
        .num_steps = static_cast<int>(steps_.size()),
        .outputs = outputs.data(),
        .num_outputs = static_cast<int>(outputs.size())};
    kernel::recurrent_loop(arguments);
    return results;
  }

 private:
  bool add_carries() {
    if (int64_t{rows_} * gates_ * units_ > kMaxElements) {
      return false;
    }
    blocks_.push_back(gates_);
    for (size_t i = 0; i < operands_.carries.size(); ++i) {
      const auto& x = operands_.carries[i];
      const auto initial = fixed(x);
      if (!initial || x.shape() != mx::Shape{rows_, units_}) {
        return false;
      }
      carries_.push_back({*initial, 0});
      blocks_.push_back(1);
    }
    return true;
  }

  bool add_inputs() {
    for (const auto& operand : cell_.inputs) {
      if (operand.source == Source::product || operand.source == Source::carry) {
        values_.push_back(operand.source == Source::product ? 0 : 1 + static_cast<int>(operand.index));
        continue;
      }
      const auto input = memory_of(operand);
      if (!input) {
        return false;
      }
      values_.push_back(static_cast<int>(blocks_.size()));
      inputs_.push_back(*input);
      blocks_.push_back(input->blocks);
    }
    return true;
  }

  bool add_addend() {
    const auto addend = cell_.addend ? memory_of(*cell_.addend) : CellInput{nullptr, 0, 0, gates_};
    addend_ = addend.value_or(CellInput{});
    return addend && addend->blocks == gates_;
  }

  std::optional<CellInput> memory_of(const RecurrentCell::Operand& operand) const {
    return operand.source == Source::sliced ? sliced(operands_.originals[operand.index])
                                            : fixed(operands_.fixed[operand.index]);
  }

  // An array of which each time step reads a slice.
  std::optional<CellInput> sliced(const mx::array& x) const {
    const int axis = operands_.axis;
    const bool fits = x.dtype() == mx::float32 && x.is_available() && x.ndim() == 3 && x.size() > 0 &&
        x.shape(1 - axis) == rows_ && x.shape(2) % units_ == 0 && x.strides(2) == 1;
    if (!fits) {
      return std::nullopt;
    }
    const int64_t row_stride = rows_ == 1 ? x.shape(2) : x.strides(1 - axis); // with one row, MLX's may be 0
    return CellInput{x.data<float>(), x.strides(axis), row_stride, x.shape(2) / units_};
  }

  // An array that all time steps read: a matrix, a row or a number.
  std::optional<CellInput> fixed(const mx::array& x) const {
    if (x.dtype() != mx::float32 || !x.is_available() || x.size() == 0 || x.ndim() > 2) {
      return std::nullopt;
    }
    if (x.size() == 1 && units_ > 1) {
      return CellInput{x.data<float>(), 0, 0, 0};
    }
    const bool is_matrix = x.ndim() == 2 && x.shape(0) == rows_;
    const auto stride = x.ndim() == 0 ? std::nullopt : row_stride(x);
    if (!(is_matrix || x.ndim() == 1) || x.shape(-1) % units_ != 0 || !stride) {
      return std::nullopt;
    }
    return CellInput{x.data<float>(), 0, is_matrix ? *stride : 0, x.shape(-1) / units_};
  }

  bool add_steps() {
    for (const auto& step : cell_.sequence->steps) {
      const int a = value_of(step.a);
      const int b = is_binary(step.operation) ? value_of(step.b) : a;
      const auto translated = step.operation == Elementwise::copy
          ? columns(step, a)
          : CellStep{step.operation, a, b, 0, std::max(blocks_[a], blocks_[b])};
      const auto fits = [&](int value) { return blocks_[value] == translated->blocks || blocks_[value] == 0; };
      const bool is_shared = has_one_row(a) && has_one_row(b);
      if (!translated || is_shared || (step.operation != Elementwise::copy && !(fits(a) && fits(b)))) {
        return false;
      }
      steps_.push_back(*translated);
      blocks_.push_back(translated->blocks);
    }
    return true;
  }

  // A step that takes some of the columns of a value.
  std::optional<CellStep> columns(const Step& step, int a) const {
    const int64_t width = int64_t{blocks_[a]} * units_;
    const auto bound = [&](int64_t position) {
      return std::clamp<int64_t>(position < 0 ? position + width : position, 0, width);
    };
    const int64_t start = bound(step.start);
    const int64_t stop = bound(step.stop);
    const bool lacks_rest = step.is_rest && step.stop < width;
    const bool is_last_axis = step.axis == -1 || step.axis == 1;
    if (!is_last_axis || start >= stop || start % units_ != 0 || stop % units_ != 0 || lacks_rest) {
      return std::nullopt;
    }
    return CellStep{step.operation, a, a, static_cast<int>(start / units_), static_cast<int>((stop - start) / units_)};
  }

  bool has_supported_results() {
    for (size_t i = 0; i < carries_.size(); ++i) {
      const uint32_t step = cell_.carry_steps[i];
      carries_[i].next = value_of_step(step);
      if (steps_[step].operation == Elementwise::copy || steps_[step].blocks != 1) {
        return false;
      }
    }
    return std::all_of(
        cell_.output_steps.begin(), cell_.output_steps.end(), [&](uint32_t step) { return steps_[step].blocks == 1; });
  }

  int value_of_step(uint32_t step) const { return 1 + static_cast<int>(carries_.size() + inputs_.size() + step); }

  // The value of an operand of the sequence.
  int value_of(uint32_t operand) const {
    constexpr uint32_t first = ElementwiseSequence::kMaxSteps;
    return operand < first ? value_of_step(operand) : values_[operand - first];
  }

  // Whether a value is one row, or one number, for all rows. Such a value may have fewer axes than the state.
  bool has_one_row(int value) const {
    const int input = value - 1 - static_cast<int>(carries_.size());
    return input >= 0 && input < static_cast<int>(inputs_.size()) && inputs_[input].row_stride == 0;
  }

  const RecurrentCell& cell_;
  const RecurrentLoopOperands& operands_;
  const int time_steps_;
  const int rows_;
  const int units_;
  const int gates_;
  const mx::array& packed_;
  std::vector<int> blocks_; // of each value
  std::vector<int> values_; // of the inputs of the sequence
  std::vector<CellCarry> carries_;
  std::vector<CellInput> inputs_;
  CellInput addend_{};
  std::vector<CellStep> steps_;
};

} // namespace

bool can_pack_recurrent(const mx::array& b, mx::Stream stream) {
  return computes_at_once(stream) && b.dtype() == mx::float32 && b.ndim() == 2 && b.size() > 0 && b.is_available() &&
      b.shape(1) % b.shape(0) == 0 && b.strides(1) == 1;
}

std::optional<mx::array> pack_recurrent(const mx::array& b) {
  auto packed = allocate_result(b.shape(), mx::float32);
  const int units = b.shape(0);
  kernel::pack_recurrent(b.data<float>(), b.strides(0), units, b.shape(1) / units, packed.data<float>());
  return packed;
}

std::optional<RecurrentLoopResults> recurrent_loop(
    const RecurrentCell& cell, const RecurrentLoopOperands& operands, const mx::array& packed) {
  const auto& hidden = operands.carries[cell.hidden];
  const bool fits = hidden.ndim() == 2 && hidden.shape(0) > 0 && hidden.shape(1) == packed.shape(0);
  if (!fits || operands.axis > 1) {
    return std::nullopt;
  }
  Translation translation(cell, operands, packed);
  return translation.is_supported() ? std::optional(translation.compute()) : std::nullopt;
}

} // namespace executorch_mlx::cpu
