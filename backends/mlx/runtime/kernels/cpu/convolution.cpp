// Convolutions. If several groups fit in a vector, each lane computes a channel of y, and a row of positions
// shares the weights in registers. Otherwise, the windows of x are copied to rows, a block at a time, and multiplied by
// the weights like the rows of a matrix.
#include <algorithm>
#include <vector>

#include "convolution.h"
#include "products.h"

namespace executorch_mlx {

namespace {

// Rounds down. `divisor` is positive.
int64_t floor_divide(int64_t x, int64_t divisor) { return x >= 0 ? x / divisor : -((divisor - 1 - x) / divisor); }

int64_t channels_of_x(const kernel::Convolution& c) { return int64_t{c.groups} * c.inputs; }

int64_t channels_of_y(const kernel::Convolution& c) { return int64_t{c.groups} * c.outputs; }

int64_t window_elements(const kernel::Convolution& c) { return c.axes[0].window * c.axes[1].window * c.axes[2].window; }

// The floats of an example of the batch x.
int64_t example_size(const kernel::Convolution& c) {
  return c.axes[0].size * c.axes[1].size * c.axes[2].size * channels_of_x(c);
}

// The index in x of element `element` of the window.
int64_t place_in_x(const kernel::WindowAxis& axis, int64_t position, int64_t element) {
  return position * axis.stride - axis.padding + element * axis.dilation;
}

// The elements [first, last) of the window on one axis that are inside of x, if the window is at `position`.
struct Range {
  int64_t first;
  int64_t last;
};

Range elements_inside(const kernel::WindowAxis& axis, int64_t position) {
  const int64_t start = place_in_x(axis, position, 0);
  const int64_t first = std::max<int64_t>(0, floor_divide(axis.dilation - 1 - start, axis.dilation));
  const int64_t last = std::min(axis.window, floor_divide(axis.size - 1 - start, axis.dilation) + 1);
  return {first, std::max(first, last)};
}

// The positions [first, last) at which the whole window is inside of x.
Range positions_inside(const kernel::WindowAxis& axis) {
  const int64_t reach = (axis.window - 1) * axis.dilation;
  const int64_t first = std::min(axis.result, (axis.padding + axis.stride - 1) / axis.stride);
  const int64_t last = floor_divide(axis.size - 1 - reach + axis.padding, axis.stride) + 1;
  return {first, std::clamp(last, first, axis.result)};
}

constexpr int64_t kBlock = 64; // positions of a row that a thread computes at once

// A row of the result: its positions on the last axis.
class Row {
 public:
  // x is the example that the row belongs to, and `position` has the positions of the row on the first two axes.
  Row(const kernel::Convolution& c, const float* x, const float* weights, const int64_t* position, float* y)
      : c_(c), weights_(weights), y_(y) {
    const Range outer = elements_inside(c.axes[0], position[0]), inner = elements_inside(c.axes[1], position[1]);
    for (int64_t i = outer.first; i < outer.last; ++i) {
      for (int64_t j = inner.first; j < inner.last; ++j) {
        const int64_t plane = place_in_x(c.axes[0], position[0], i);
        const int64_t row = plane * c.axes[1].size + place_in_x(c.axes[1], position[1], j);
        rows_.push_back(x + row * c.axes[2].size * channels_of_x(c));
        elements_.push_back((i * c.axes[1].window + j) * c.axes[2].window);
      }
    }
  }

  // Computes the positions [first, last) of the row.
  void run(int64_t first, int64_t last) {
    const Range whole = positions_inside(c_.axes[2]);
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
  // Computes `count` positions from `position` on, at which the same elements of the window are inside of x.
  void compute(int64_t position, int64_t count) {
    if (count == 0) {
      return;
    }
    const auto& axis = c_.axes[2];
    const Range inside = elements_inside(axis, position);
    sources_.clear();
    weights_of_sources_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      for (int64_t j = inside.first; j < inside.last; ++j) {
        sources_.push_back(rows_[i] + place_in_x(axis, position, j) * channels_of_x(c_));
        weights_of_sources_.push_back(weights_ + (elements_[i] + j) * c_.inputs * channels_of_y(c_));
      }
    }
    const WindowElements window{
        sources_.data(), weights_of_sources_.data(), static_cast<int>(sources_.size()), c_.inputs, c_.outputs};
    const auto channels = static_cast<int>(channels_of_y(c_));
    kernels().convolve_small_groups(
        window, axis.stride * channels_of_x(c_), y_ + position * channels, static_cast<int>(count), channels);
  }

  const kernel::Convolution& c_;
  const float* weights_;
  float* y_;
  std::vector<const float*> rows_; // of x, under the window
  std::vector<int64_t> elements_; // the first element of the window in each of these rows
  std::vector<const float*> sources_, weights_of_sources_;
};

// Whether several groups fit in a vector, for which convolve_small_groups() is faster.
bool has_small_groups(const kernel::Convolution& c) {
  const int lanes = kernels().panel_rows;
  return c.outputs < lanes && lanes % c.outputs == 0 && c.inputs <= c.outputs;
}

// Transposes the weights to [elements, inputs, channels of y].
void pack_small_groups(const kernel::Convolution& c, const float* w, float* packed) {
  const int64_t channels = channels_of_y(c), length = window_elements(c) * c.inputs;
  for (int64_t channel = 0; channel < channels; ++channel) {
    for (int64_t i = 0; i < length; ++i) {
      packed[i * channels + channel] = w[channel * length + i];
    }
  }
}

void convolve_small_groups(const kernel::Convolution& c, const float* x, const float* packed, float* y) {
  const auto& axes = c.axes;
  const int64_t channels = channels_of_y(c), length = window_elements(c) * c.inputs;
  const int64_t row_size = axes[2].result * channels;
  const int64_t blocks = (axes[2].result + kBlock - 1) / kBlock;
  // The time of a product is about an eighth of the time of an element that is read and written.
  const int64_t work = std::min(kBlock, axes[2].result) * channels * (length / 8 + 1);
  const int64_t rows = c.batch * axes[0].result * axes[1].result;
  parallel_ranges(rows * blocks, work, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / blocks, start = i % blocks * kBlock;
      const int64_t plane = row / axes[1].result;
      const int64_t position[] = {plane % axes[0].result, row % axes[1].result};
      Row(c, x + plane / axes[0].result * example_size(c), packed, position, y + row * row_size)
          .run(start, std::min(start + kBlock, axes[2].result));
    }
  });
}

// -- products of windows --------------------------------------------------------------------------------------------

constexpr int kPanelColumns = 64; // channels of y that a panel of weights computes; only the last one has fewer
constexpr int kWindowPositions = 96; // whose windows are copied to rows at once
constexpr int kWindowSteps = 512; // elements of a row that are copied at once; the copy stays in the cache

inline void copy_floats(const float* from, int64_t count, float* to) {
  if (count > kPanelColumns) {
    std::copy_n(from, count, to);
    return;
  }
  for (int64_t i = 0; i < count; ++i) { // a call would take longer
    to[i] = from[i];
  }
}

// Copies the windows of x of one group to rows. The elements of a row are those of the weights of a channel of y.
class Windows {
 public:
  Windows(const kernel::Convolution& c, const float* x)
      : c_(c),
        x_(x),
        is_joined_(c.groups == 1 && c.axes[2].dilation == 1),
        run_(is_joined_ ? c.axes[2].window * c.inputs : c.inputs) {}

  // Whether the windows are rows of x themselves.
  bool are_rows() const {
    return std::all_of(std::begin(c_.axes), std::end(c_.axes), [](const auto& axis) {
      return axis.window == 1 && axis.stride == 1 && axis.padding == 0 && axis.result == axis.size;
    });
  }

  // Copies the elements [first, last) of the windows at `count` positions, from `position` on.
  void copy(int64_t position, int64_t count, int group, int64_t first, int64_t last, float* to) const {
    const auto& axes = c_.axes;
    for (int64_t i = position; i < position + count; ++i) {
      const int64_t row = i / axes[2].result, plane = row / axes[1].result;
      const float* example = x_ + plane / axes[0].result * example_size(c_) + int64_t{group} * c_.inputs;
      to = copy_window(example, {plane % axes[0].result, row % axes[1].result, i % axes[2].result}, first, last, to);
    }
  }

 private:
  struct Position {
    int64_t axes[3];
  };

  float* copy_window(const float* example, const Position& position, int64_t first, int64_t last, float* to) const {
    const auto& axes = c_.axes;
    const int64_t steps = is_joined_ ? 1 : axes[2].window; // runs on the last axis
    for (int64_t run = first / run_; run * run_ < last; ++run) {
      const int64_t begin = std::max<int64_t>(0, first - run * run_), end = std::min(run_, last - run * run_);
      const int64_t outer = place_in_x(axes[0], position.axes[0], run / steps / axes[1].window);
      const int64_t inner = place_in_x(axes[1], position.axes[1], run / steps % axes[1].window);
      const int64_t place = place_in_x(axes[2], position.axes[2], run % steps);
      const bool is_inside = outer >= 0 && outer < axes[0].size && inner >= 0 && inner < axes[1].size;
      // The elements of the run that are inside of x.
      const int64_t low = std::clamp(-place * c_.inputs, begin, end);
      const int64_t high = is_inside ? std::clamp((axes[2].size - place) * c_.inputs, low, end) : low;
      std::fill(to, to + (low - begin), 0.0f);
      if (high > low) {
        const int64_t offset = ((outer * axes[1].size + inner) * axes[2].size + place) * channels_of_x(c_);
        copy_floats(example + offset + low, high - low, to + (low - begin));
      }
      std::fill(to + (high - begin), to + (end - begin), 0.0f);
      to += end - begin;
    }
    return to;
  }

  const kernel::Convolution& c_;
  const float* x_;
  bool is_joined_; // whether the elements of a window on the last axis follow each other in x
  int64_t run_; // elements of a window that follow each other in x
};

// The weights of all groups in panels of columns: of channels of y.
class WeightPanels {
 public:
  explicit WeightPanels(const kernel::Convolution& c)
      : length_(window_elements(c) * c.inputs),
        outputs_(c.outputs),
        panels_((c.outputs + kPanelColumns - 1) / kPanelColumns),
        width_((c.outputs + kMaxLanes - 1) / kMaxLanes * kMaxLanes) {}

  // The panels of a group.
  int64_t count() const { return panels_; }

  // The floats of a group.
  int64_t size() const { return length_ * width_; }

  // The number of columns of a panel, and the distance between its rows.
  int columns(int64_t panel) const {
    return static_cast<int>(std::min<int64_t>(kPanelColumns, outputs_ - panel * kPanelColumns));
  }
  int width(int64_t panel) const {
    return static_cast<int>(std::min<int64_t>(kPanelColumns, width_ - panel * kPanelColumns));
  }

  // Where panel `panel` of a group begins: [length, width].
  int64_t offset(int64_t group, int64_t panel) const { return length_ * (group * width_ + panel * kPanelColumns); }

  // Where the rows of w begin that panel `panel` of a group holds.
  int64_t source(int64_t group, int64_t panel) const { return length_ * (group * outputs_ + panel * kPanelColumns); }

 private:
  static constexpr int kMaxLanes = 16; // a multiple of those of all instruction sets

  int64_t length_;
  int64_t outputs_;
  int64_t panels_;
  int64_t width_;
};

void pack_large_groups(const kernel::Convolution& c, const float* w, float* packed) {
  const WeightPanels panels(c);
  const auto length = static_cast<int>(window_elements(c) * c.inputs);
  parallel_ranges(c.groups * panels.count(), int64_t{length} * kPanelColumns, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t group = i / panels.count(), panel = i % panels.count();
      kernels().transpose_rows(w + panels.source(group, panel), FloatType::float32, length, panels.columns(panel),
          length, packed + panels.offset(group, panel), panels.width(panel));
    }
  });
}

// Multiplies the windows, copied to rows, by the packed weights.
void multiply_windows(const kernel::Convolution& c, const float* x, const float* packed, float* y) {
  const WeightPanels weights(c);
  const Windows windows(c, x);
  const bool are_rows = windows.are_rows();
  const int64_t length = window_elements(c) * c.inputs;
  const int64_t positions = c.batch * c.axes[0].result * c.axes[1].result * c.axes[2].result;
  const int64_t blocks = (positions + kWindowPositions - 1) / kWindowPositions;
  const int64_t tasks = blocks * c.groups;
  // If there are few tasks, each is divided into parts of its panels. Every part copies the windows.
  const int64_t wanted = 4 * kernel::threads();
  const int64_t parts = std::clamp<int64_t>((wanted + tasks - 1) / tasks, 1, weights.count());
  const auto run = [&](int64_t task) {
    const int64_t block = task / parts / c.groups, part = task % parts;
    const int group = static_cast<int>(task / parts % c.groups);
    const int64_t position = block * kWindowPositions;
    const int count = static_cast<int>(std::min<int64_t>(kWindowPositions, positions - position));
    static thread_local const AlignedFloats buffer(kWindowPositions * kWindowSteps);
    static thread_local const AlignedFloats whole_vectors(kWindowPositions * kPanelColumns);
    float* const results = y + position * channels_of_y(c) + int64_t{group} * c.outputs;
    for (int64_t first = 0; first < length; first += kWindowSteps) {
      const int64_t last = std::min(length, first + kWindowSteps);
      const float* rows = buffer.get();
      if (are_rows) {
        rows = x + position * channels_of_x(c) + int64_t{group} * c.inputs + first;
      } else {
        windows.copy(position, count, group, first, last, buffer.get());
      }
      const int64_t distance = are_rows ? channels_of_x(c) : last - first;
      for (int64_t i = weights.count() * part / parts; i < weights.count() * (part + 1) / parts; ++i) {
        const int width = weights.width(i), columns = weights.columns(i);
        const bool is_whole = columns == width;
        float* const to = is_whole ? results + i * kPanelColumns : whole_vectors.get();
        kernels().multiply_columns(rows, distance, count, packed + weights.offset(group, i) + first * width,
            FloatType::float32, width, width, static_cast<int>(last - first), first > 0, nullptr, 0, to,
            is_whole ? channels_of_y(c) : width);
        for (int row = 0; !is_whole && last == length && row < count; ++row) {
          std::copy_n(to + row * width, columns, results + row * channels_of_y(c) + i * kPanelColumns);
        }
      }
    }
  };
  const int64_t work = std::min<int64_t>(kWindowPositions, positions) * length * c.outputs / parts / 8;
  parallel_ranges(tasks * parts, work, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      run(task);
    }
  });
}

} // namespace

int64_t kernel::convolution_weights(const Convolution& c) {
  return has_small_groups(c) ? window_elements(c) * c.inputs * channels_of_y(c) : WeightPanels(c).size() * c.groups;
}

void kernel::pack_convolution(const Convolution& c, const float* w, float* packed) {
  has_small_groups(c) ? pack_small_groups(c, w, packed) : pack_large_groups(c, w, packed);
}

void kernel::convolution(const Convolution& c, const float* x, const float* packed, float* y) {
  count_product_call();
  has_small_groups(c) ? convolve_small_groups(c, x, packed, y) : multiply_windows(c, x, packed, y);
}

} // namespace executorch_mlx
