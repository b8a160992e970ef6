// Depthwise convolution: see blas.h.
#include <algorithm>
#include <vector>

#include "conversion.h"

namespace executorch_mlx {

namespace {

// Rounds down. `divisor` is positive.
int64_t floor_divide(int64_t x, int64_t divisor) {
  return x >= 0 ? x / divisor : -((divisor - 1 - x) / divisor);
}

// The elements [first, last) of the window on one axis that are inside of x, if the window is at `position`.
struct Range {
  int64_t first;
  int64_t last;
};

Range elements_inside(const ExecutorchMlxWindowAxis& axis, int64_t position) {
  const int64_t start = position * axis.stride - axis.padding;  // where the first element is
  const int64_t first = std::max<int64_t>(0, floor_divide(axis.dilation - 1 - start, axis.dilation));
  const int64_t last = std::min(axis.window, floor_divide(axis.size - 1 - start, axis.dilation) + 1);
  return {first, std::max(first, last)};
}

// The positions [first, last) at which the whole window is inside of x.
Range positions_inside(const ExecutorchMlxWindowAxis& axis) {
  const int64_t reach = (axis.window - 1) * axis.dilation;
  const int64_t first = std::min(axis.result, (axis.padding + axis.stride - 1) / axis.stride);
  const int64_t last = floor_divide(axis.size - 1 - reach + axis.padding, axis.stride) + 1;
  return {first, std::clamp(last, first, axis.result)};
}

constexpr int64_t kBlock = 64;  // positions of a row that a thread computes at once

// A row of the result: its positions on the last axis.
class Row {
 public:
  // x is the example that the row belongs to, and `position` has the positions of the row on the first two axes.
  Row(const ExecutorchMlxDepthwise& d, const float* x, const float* weights, const int64_t* position, float* y)
      : d_(d), weights_(weights), y_(y) {
    const Range outer = elements_inside(d.axes[0], position[0]), inner = elements_inside(d.axes[1], position[1]);
    for (int64_t i = outer.first; i < outer.last; ++i) {
      for (int64_t j = inner.first; j < inner.last; ++j) {
        const int64_t row = at(d.axes[0], position[0], i) * d.axes[1].size + at(d.axes[1], position[1], j);
        rows_.push_back(x + row * d.axes[2].size * d.channels);
        elements_.push_back((i * d.axes[1].window + j) * d.axes[2].window);
      }
    }
  }

  // Computes the positions [first, last) of the row.
  void run(int64_t first, int64_t last) {
    const Range whole = positions_inside(d_.axes[2]);
    const int64_t begin = std::clamp(whole.first, first, last), end = std::clamp(whole.last, begin, last);
    for (int64_t position = first; position < begin; ++position) {
      compute(position, 1);
    }
    compute(begin, end - begin);
    for (int64_t position = end; position < last; ++position) {
      compute(position, 1);
    }
  }

 private:
  // The index in x of element `element` of the window.
  static int64_t at(const ExecutorchMlxWindowAxis& axis, int64_t position, int64_t element) {
    return position * axis.stride - axis.padding + element * axis.dilation;
  }

  // Computes `count` positions from `position` on, at which the same elements of the window are inside of x.
  void compute(int64_t position, int64_t count) {
    if (count == 0) {
      return;
    }
    const auto& axis = d_.axes[2];
    const Range inside = elements_inside(axis, position);
    sources_.clear();
    factors_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      for (int64_t j = inside.first; j < inside.last; ++j) {
        sources_.push_back(rows_[i] + at(axis, position, j) * d_.channels);
        factors_.push_back(weights_ + (elements_[i] + j) * d_.channels);
      }
    }
    const WindowElements window{sources_.data(), factors_.data(), static_cast<int>(sources_.size())};
    kernels().depthwise_positions(
        window, axis.stride * d_.channels, y_ + position * d_.channels, static_cast<int>(count), d_.channels);
  }

  const ExecutorchMlxDepthwise& d_;
  const float* weights_;
  float* y_;
  std::vector<const float*> rows_;   // of x, under the window
  std::vector<int64_t> elements_;    // the first element of the window in each of these rows
  std::vector<const float*> sources_, factors_;
};

} // namespace

} // namespace executorch_mlx

extern "C" void executorch_mlx_depthwise(const ExecutorchMlxDepthwise* d, const float* x, const float* w, float* y) {
  using namespace executorch_mlx;
  const auto& axes = d->axes;
  const int64_t elements = axes[0].window * axes[1].window * axes[2].window;
  const AlignedFloats weights(elements * d->channels);  // [elements, channels]
  for (int64_t channel = 0; channel < d->channels; ++channel) {
    for (int64_t i = 0; i < elements; ++i) {
      weights.get()[i * d->channels + channel] = w[channel * elements + i];
    }
  }
  const int64_t example_size = axes[0].size * axes[1].size * axes[2].size * d->channels;
  const int64_t row_size = axes[2].result * d->channels;
  const int64_t blocks = (axes[2].result + kBlock - 1) / kBlock;
  // The time of a product is about an eighth of the time of an element that is read and written.
  const int64_t work = std::min(kBlock, axes[2].result) * d->channels * (elements / 8 + 1);
  const int64_t rows = d->batch * axes[0].result * axes[1].result;
  parallel_ranges(rows * blocks, work, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / blocks, start = i % blocks * kBlock;
      const int64_t plane = row / axes[1].result;
      const int64_t position[] = {plane % axes[0].result, row % axes[1].result};
      Row(*d, x + plane / axes[0].result * example_size, weights.get(), position, y + row * row_size)
          .run(start, std::min(start + kBlock, axes[2].result));
    }
  });
}
