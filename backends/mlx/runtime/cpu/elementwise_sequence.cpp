// Sequences of small elementwise operations. Allocating the result of one of them takes longer than computing it, so
// that results which only later steps read get no arrays.
#include <algorithm>
#include <array>
#include <memory>

#include "accelerate.h"
#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

namespace {

constexpr size_t kMaxElements = 16 << 10;  // of one array
constexpr size_t kMaxSteps = ElementwiseSequence::kMaxSteps;
constexpr size_t kMaxInputs = 2 * kMaxSteps;

// An operand: an array with the rows of the sequence, or one row or number for all of them.
struct Operand {
  Rows rows;
  int64_t width;
  bool is_shared;

  bool is_number() const {
    return is_shared && width == 1;
  }
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
    executorch_mlx_elementwise_steps(steps_.data(), num_steps_, rows_);
    return std::move(results_);
  }

 private:
  // Finds the rows of all inputs. The input with the most axes has the shape of the sequence but for the last axis.
  bool read_inputs() {
    for (const auto& x : inputs_) {
      if (x.dtype() != mx::float32 || x.size() == 0 || x.size() > kMaxElements || !x.is_available()) {
        return false;
      }
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
      if (!operand) {
        return false;
      }
      operands_[kMaxSteps + i] = *operand;
    }
    return true;
  }

  std::optional<Operand> input(const mx::array& x) const {
    const bool has_rows =
        x.ndim() == like_->ndim() && std::equal(x.shape().begin(), x.shape().end() - 1, like_->shape().begin());
    if (has_rows) {
      const auto stride = row_stride(x);
      return stride ? std::optional(Operand{{x.data<float>(), *stride}, x.shape(-1), false}) : std::nullopt;
    }
    const bool is_row = x.ndim() == 1 && (x.size() == 1 || x.strides(0) == 1);
    if (x.size() == 1 || is_row) {
      return Operand{{x.data<float>(), 0}, static_cast<int64_t>(x.size()), true};
    }
    return std::nullopt;
  }

  std::optional<Operand> prepare(const ElementwiseSequence::Step& step) {
    const Operand& a = operands_[step.a];
    if (step.operation == Elementwise::copy) {
      return columns(step, a);
    }
    if (!is_binary(step.operation)) {
      return a.is_shared ? std::nullopt : add_step(step, a.rows, {}, a.width);
    }
    const Operand& b = operands_[step.b];
    if (a.is_shared && b.is_shared) {
      return std::nullopt;
    }
    const int64_t width = a.is_number() ? b.width : a.width;
    const auto a_rows = repeated(a, width);
    const auto b_rows = repeated(b, width);
    return a_rows && b_rows ? add_step(step, *a_rows, *b_rows, width) : std::nullopt;
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
    const Rows rows{a.rows.data + start, a.rows.stride};
    if (step.is_result) {
      return add_step(step, rows, {}, width);
    }
    results_.operations += static_cast<uint64_t>(rows_ * (a.width + width));
    return Operand{rows, width, false};
  }

  // The rows of an operand with this width, or nullopt if it has another width. Repeats a number.
  std::optional<Rows> repeated(const Operand& x, int64_t width) {
    if (x.width == width) {
      return x.rows;
    }
    if (!x.is_number()) {
      return std::nullopt;
    }
    float* row = allocate_scratch(width);
    std::fill_n(row, width, *x.rows.data);
    return Rows{row, 0};
  }

  std::optional<Operand> add_step(const ElementwiseSequence::Step& step, Rows a, Rows b, int64_t width) {
    const int64_t size = rows_ * width;
    if (size > static_cast<int64_t>(kMaxElements)) {
      return std::nullopt;
    }
    float* y = step.is_result ? allocate_array(width) : allocate_scratch(size);
    results_.operations +=
        static_cast<uint64_t>(size * (is_binary(step.operation) ? 2 : 1) + (step.is_result ? 0 : size));
    steps_[num_steps_++] = {.operation = step.operation, .a = a, .b = b, .y = y, .width = width};
    return Operand{{y, width}, width, false};
  }

  float* allocate_array(int64_t width) {
    auto shape = like_->shape();
    shape.back() = static_cast<int>(width);
    results_.arrays.push_back(allocate_result(shape, mx::float32));
    return results_.arrays.back().data<float>();
  }

  // Memory that the next sequence of this thread uses again. Each step takes at most two pieces: a repeated number and
  // a result.
  float* allocate_scratch(int64_t size) {
    constexpr size_t kPiece = kMaxElements;
    static thread_local const auto memory = std::make_unique_for_overwrite<float[]>(2 * kMaxSteps * kPiece);
    float* result = memory.get() + scratch_used_;
    scratch_used_ += (static_cast<size_t>(size) + 15) / 16 * 16;
    return result;
  }

  const ElementwiseSequence& sequence_;
  const std::vector<mx::array>& inputs_;
  const mx::array* like_ = nullptr;
  int64_t rows_ = 0;
  std::array<Operand, kMaxSteps + kMaxInputs> operands_;
  std::array<ElementwiseStep, kMaxSteps> steps_;
  int num_steps_ = 0;
  size_t scratch_used_ = 0;
  ElementwiseResults results_{};
};

} // namespace

std::optional<ElementwiseResults> elementwise_sequence(
    const ElementwiseSequence& sequence, const std::vector<mx::array>& inputs, mx::Stream stream) {
  return computes_at_once(stream) ? Run(sequence, inputs).compute() : std::nullopt;
}

} // namespace executorch_mlx::cpu
