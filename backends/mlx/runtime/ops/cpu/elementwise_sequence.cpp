// Sequences of elementwise operations. Allocating the result of a small one takes longer than computing it, and a large
// one has to be written to memory and read again. Results that only later steps read therefore get no arrays: a block
// of rows goes through all steps while it is in the cache.
#include <algorithm>
#include <array>
#include <memory>

#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/elementwise.h"
#include "memory/kernel_result.h"
#include "memory/parallel.h"

namespace executorch_mlx::cpu {

namespace {

constexpr int64_t kMaxWidth = 16 << 10;
constexpr int64_t kBlock = 8 << 10; // elements of a step that are computed at a time, unless a row has more
constexpr int64_t kSmallBlock = 16 << 10; // up to which one thread computes all of them
constexpr size_t kMaxSteps = ElementwiseSequence::kMaxSteps;
constexpr size_t kMaxInputs = 2 * kMaxSteps;
constexpr size_t kMaxItem = sizeof(float);

// Bytes for the results of steps that have no array. The next block of this thread uses them again.
char* scratch(size_t step) {
  constexpr size_t kPiece = static_cast<size_t>(kMaxWidth) * kMaxItem;
  static thread_local const auto memory = std::make_unique_for_overwrite<char[]>(kMaxSteps * kPiece);
  return memory.get() + step * kPiece;
}

// An operand: an array with the rows of the sequence, one row or number for all of them, or the columns of the result
// of a step that has no array.
struct Operand {
  const char* data; // null if the step has no array
  size_t step;
  int64_t offset; // the first column
  int64_t stride; // of the rows, in elements
  int64_t width;
  bool is_shared;

  bool is_number() const { return is_shared && width == 1; }
};

struct PlannedStep {
  Elementwise operation;
  Operand a;
  Operand b;
  Operand y;
};

// Computes one sequence.
class Run {
 public:
  Run(const ElementwiseSequence& sequence, const std::vector<mx::array>& inputs)
      : sequence_(sequence), inputs_(inputs) {}

  std::optional<ElementwiseResults> compute() {
    if (!read_inputs()) {
      return std::nullopt;
    }
    for (size_t i = 0; i < sequence_.steps.size(); ++i) {
      const auto operand = prepare(sequence_.steps[i]);
      if (!operand) {
        return std::nullopt;
      }
      operands_[i] = *operand;
    }
    const bool is_small = rows_ * width_ <= kSmallBlock;
    const int64_t step = is_small ? rows_ : std::max<int64_t>(1, kBlock / width_);
    const auto run = [&](int block) { run_block(block * step, std::min(rows_, (block + 1) * step)); };
    is_small ? run(0) : parallel(static_cast<int>((rows_ + step - 1) / step), run);
    return std::move(results_);
  }

 private:
  // Finds the rows of all inputs. The input with the most axes has the shape of the sequence but for the last axis.
  bool read_inputs() {
    for (const auto& x : inputs_) {
      const auto type = float_type(x.dtype());
      if (!type || x.dtype() != inputs_[0].dtype() || x.size() == 0 || !x.is_available()) {
        return false;
      }
      type_ = *type;
      if (like_ == nullptr || x.ndim() > like_->ndim()) {
        like_ = &x;
      }
    }
    if (like_ == nullptr || like_->ndim() == 0) {
      return false;
    }
    rows_ = static_cast<int64_t>(like_->size()) / like_->shape(-1);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const auto operand = input(inputs_[i]);
      if (!operand || operand->width > kMaxWidth) {
        return false;
      }
      operands_[kMaxSteps + i] = *operand;
    }
    return true;
  }

  std::optional<Operand> input(const mx::array& x) const {
    const auto* data = x.data<char>();
    const bool has_rows =
        x.ndim() == like_->ndim() && std::equal(x.shape().begin(), x.shape().end() - 1, like_->shape().begin());
    if (has_rows) {
      const auto stride = row_stride(x);
      return stride ? std::optional(Operand{data, 0, 0, *stride, x.shape(-1), false}) : std::nullopt;
    }
    const bool is_row = x.ndim() == 1 && (x.size() == 1 || x.strides(0) == 1);
    if (x.size() == 1 || is_row) {
      return Operand{data, 0, 0, 0, static_cast<int64_t>(x.size()), true};
    }
    return std::nullopt;
  }

  std::optional<Operand> prepare(const ElementwiseSequence::Step& step) {
    const Operand& a = operands_[step.a];
    if (step.operation == Elementwise::copy) {
      return columns(step, a);
    }
    if (!is_binary(step.operation)) {
      return a.is_shared ? std::nullopt : std::optional(add_step(step, a, {}, a.width));
    }
    const Operand& b = operands_[step.b];
    if (a.is_shared && b.is_shared) {
      return std::nullopt;
    }
    const int64_t width = a.is_number() ? b.width : a.width;
    const auto a_rows = repeated(a, width);
    const auto b_rows = repeated(b, width);
    return a_rows && b_rows ? std::optional(add_step(step, *a_rows, *b_rows, width)) : std::nullopt;
  }

  std::optional<Operand> columns(const ElementwiseSequence::Step& step, const Operand& a) {
    const bool is_last_axis = step.axis == -1 || step.axis == static_cast<int64_t>(like_->ndim()) - 1;
    const auto bound = [&](int64_t position) {
      return std::clamp<int64_t>(position < 0 ? position + a.width : position, 0, a.width);
    };
    const int64_t start = bound(step.start);
    const int64_t width = bound(step.stop) - start;
    const bool lacks_rest = step.is_rest && step.stop < a.width;
    if (a.is_shared || !is_last_axis || width <= 0 || lacks_rest) {
      return std::nullopt;
    }
    const Operand result{a.data, a.step, a.offset + start, a.stride, width, false};
    if (!step.is_result) {
      results_.operations += static_cast<uint64_t>(rows_ * (a.width + width));
      return result;
    }
    if (rows_ * a.width > kSmallBlock) {
      return std::nullopt; // the operation itself needs no copy: its result is a view
    }
    return add_step(step, result, {}, width);
  }

  // An operand with this width, or nullopt if it has another width. Repeats a number.
  std::optional<Operand> repeated(const Operand& x, int64_t width) {
    if (x.width == width) {
      return x;
    }
    if (!x.is_number()) {
      return std::nullopt;
    }
    const size_t item = inputs_[0].itemsize();
    auto& row = numbers_.emplace_back(std::make_unique_for_overwrite<char[]>(width * item));
    for (int64_t i = 0; i < width; ++i) {
      std::copy_n(x.data, item, row.get() + i * item);
    }
    return Operand{row.get(), 0, 0, 0, width, true};
  }

  Operand add_step(const ElementwiseSequence::Step& step, const Operand& a, const Operand& b, int64_t width) {
    const auto size = static_cast<uint64_t>(rows_ * width);
    results_.operations += size * (is_binary(step.operation) ? 2 : 1) + (step.is_result ? 0 : size);
    width_ = std::max(width_, width);
    Operand y{nullptr, num_steps_, 0, width, width, false};
    if (step.is_result) {
      auto shape = like_->shape();
      shape.back() = static_cast<int>(width);
      results_.arrays.push_back(allocate_result(shape, like_->dtype()));
      y.data = results_.arrays.back().data<char>();
    }
    steps_[num_steps_++] = {step.operation, a, b, y};
    return y;
  }

  // Computes rows first ... last - 1 of all steps.
  void run_block(int64_t first, int64_t last) const {
    const auto item = static_cast<int64_t>(inputs_[0].itemsize());
    const auto rows = [&](const Operand& x) {
      const char* begin = x.data == nullptr ? scratch(x.step) : x.data + first * x.stride * item;
      return Rows{begin + x.offset * item, x.stride};
    };
    std::array<ElementwiseStep, kMaxSteps> steps;
    for (size_t i = 0; i < num_steps_; ++i) {
      const auto& [operation, a, b, y] = steps_[i];
      const bool has_b = is_binary(operation);
      steps[i] = {operation, rows(a), has_b ? rows(b) : Rows{}, const_cast<void*>(rows(y).data), y.width};
    }
    kernel::elementwise_steps(steps.data(), static_cast<int>(num_steps_), last - first, type_);
  }

  const ElementwiseSequence& sequence_;
  const std::vector<mx::array>& inputs_;
  FloatType type_ = FloatType::float32;
  const mx::array* like_ = nullptr;
  int64_t rows_ = 0;
  int64_t width_ = 1; // of the widest step
  std::array<Operand, kMaxSteps + kMaxInputs> operands_;
  std::array<PlannedStep, kMaxSteps> steps_;
  size_t num_steps_ = 0;
  std::vector<std::unique_ptr<char[]>> numbers_; // repeated in rows
  ElementwiseResults results_{};
};

} // namespace

std::optional<ElementwiseResults> elementwise_sequence(
    const ElementwiseSequence& sequence, const std::vector<mx::array>& inputs, mx::Stream stream) {
  return computes_at_once(stream) ? Run(sequence, inputs).compute() : std::nullopt;
}

} // namespace executorch_mlx::cpu
