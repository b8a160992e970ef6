// The loop over the time steps of a recurrent layer.
//
// Each thread has a range of units. In a time step, it computes the columns of all gates for its units and then its
// part of the new state, so that the threads wait for each other only once in each time step. A thread keeps its units:
// its part of the weights then stays in the second-level cache of its processor. It computes one tile of its units
// after the other, so that the values of the cell stay in the first-level cache.
#include <atomic>
#include <thread>
#include <vector>

#include "conversion.h"
#include "elementwise.h"
#include "recurrent_loop.h"

namespace executorch_mlx {

namespace {

constexpr int kLine = 16; // floats of a cache line
constexpr int kTileUnits = kRecurrentPanel; // the columns of a gate then fill a panel
constexpr int64_t kMinParallelWork = 1 << 15; // weights, from which on several threads share a time step

int parts_of(int units, int gates) {
  const bool is_small = int64_t{units} * units * gates < kMinParallelWork;
  return is_small ? 1 : std::max(1, std::min(kernel::threads(), units / kLine));
}

// The first unit of a part. All parts begin at a cache line of the state.
int first_unit(int units, int parts, int part) {
  return part == parts ? units : static_cast<int>(int64_t{units} * part / parts / kLine * kLine);
}

// Calls run(first, count) for the units of each tile of a part.
template <typename Run>
void for_tiles(int units, int parts, int part, Run&& run) {
  const int end = first_unit(units, parts, part + 1);
  for (int first = first_unit(units, parts, part); first < end; first += kTileUnits) {
    run(first, std::min(kTileUnits, end - first));
  }
}

// The state that the product reads. Its rows are not a power of two apart, so that they do not compete for the same
// cache lines. There are two copies, because a thread writes the new state while others still read the old one.
class Hidden {
 public:
  Hidden(int rows, int units)
      : stride((units + kLine - 1) / kLine * kLine + kLine), size_(rows * stride), memory_(2 * size_) {}

  float* at(int step) const { return memory_.get() + step % 2 * size_; }

  const int64_t stride;

 private:
  int64_t size_;
  AlignedFloats memory_;
};

// The computations for the units of a tile.
class Tile {
 public:
  Tile(const kernel::RecurrentLoop& r, const Hidden& hidden, int first, int units, const float* packed)
      : r_(r), hidden_(hidden), first_(first), units_(units), packed_(packed), memory_(size()) {
    float* next = memory_.get();
    const auto add_value = [&](int blocks, bool has_rows) {
      const int64_t width = int64_t{blocks} * units_;
      values_.push_back({next, has_rows ? width : 0});
      blocks_.push_back(blocks);
      next += (has_rows ? r_.rows * width : width) + kLine;
    };
    add_value(r.gates, true);
    for (int i = 0; i < r.num_carries; ++i) {
      add_value(1, true);
      read(r.carries[i].initial, 0, 1 + i);
    }
    copy_to_hidden(0, 1 + r.hidden);
    for (int i = 0; i < r.num_inputs; ++i) {
      const auto& input = r.inputs[i];
      add_value(input.blocks == 0 ? r.max_blocks : input.blocks, input.row_stride != 0);
      read(input, 0, inputs_begin() + i);
    }
    for (int i = 0; i < r.num_steps; ++i) {
      add_step(r.steps[i], [&] { add_value(r.steps[i].blocks, true); });
    }
  }

  // Computes one time step.
  void run(int step) const {
    multiply(step);
    for (int i = 0; i < r_.num_inputs && step > 0; ++i) {
      if (r_.inputs[i].step_stride != 0) {
        read(r_.inputs[i], step, inputs_begin() + i);
      }
    }
    kernel::elementwise_steps(steps_.data(), static_cast<int>(steps_.size()), r_.rows, FloatType::float32);
    write(step);
  }

 private:
  int inputs_begin() const { return 1 + r_.num_carries; }

  // An upper bound of the floats of all values, each of which begins anywhere in a cache line.
  size_t size() const {
    int64_t blocks = r_.gates + r_.num_carries;
    for (int i = 0; i < r_.num_inputs; ++i) {
      blocks += std::max(r_.inputs[i].blocks, r_.max_blocks);
    }
    for (int i = 0; i < r_.num_steps; ++i) {
      blocks += r_.steps[i].blocks;
    }
    const int values = inputs_begin() + r_.num_inputs + r_.num_steps;
    return static_cast<size_t>(blocks * units_ * r_.rows + int64_t{values} * kLine);
  }

  template <typename AddValue>
  void add_step(const CellStep& step, AddValue&& add_value) {
    const Value a = values_[step.a];
    if (step.operation == Elementwise::copy) {
      values_.push_back({a.data + int64_t{step.first_block} * units_, a.stride});
      blocks_.push_back(step.blocks);
      return;
    }
    add_value();
    const Value b = is_binary(step.operation) ? values_[step.b] : Value{};
    steps_.push_back({.operation = step.operation,
        .a = {a.data, a.stride},
        .b = {b.data, b.stride},
        .y = values_.back().data,
        .width = int64_t{step.blocks} * units_});
  }

  // Reads the blocks of the units of this tile.
  void read(const CellInput& input, int step, int value) const {
    const float* from = input.data + step * input.step_stride;
    float* to = values_[value].data;
    if (input.blocks == 0) {
      std::fill_n(to, int64_t{blocks_[value]} * units_, *from);
      return;
    }
    const int rows = input.row_stride == 0 ? 1 : r_.rows;
    for (int row = 0; row < rows; ++row, from += input.row_stride) {
      for (int block = 0; block < input.blocks; ++block, to += units_) {
        std::copy_n(from + int64_t{block} * r_.units + first_, units_, to);
      }
    }
  }

  // The product of the state and the weights, plus the addend. A panel has the columns of one gate.
  void multiply(int step) const {
    const auto& [addend, step_stride, row_stride, blocks] = r_.addend;
    for (int gate = 0; gate < r_.gates; ++gate) {
      kernels().multiply_recurrent_panel(hidden_.at(step), hidden_.stride, r_.rows,
          packed_ + int64_t{gate} * units_ * r_.units, units_, r_.units,
          addend == nullptr ? nullptr : addend + step * step_stride + int64_t{gate} * r_.units + first_, row_stride,
          values_[0].data + gate * units_, r_.gates * units_);
    }
  }

  void copy_to_hidden(int step, int value) const {
    for (int row = 0; row < r_.rows; ++row) {
      const Value& from = values_[value];
      std::copy_n(from.data + row * from.stride, units_, hidden_.at(step) + row * hidden_.stride + first_);
    }
  }

  // Writes the outputs of a time step, and the state for the next one.
  void write(int step) const {
    const bool is_last = step + 1 == r_.time_steps;
    for (int i = 0; i < r_.num_outputs; ++i) {
      const auto& output = r_.outputs[i];
      if (output.step_stride == 0 && !is_last) {
        continue;
      }
      const Value& from = values_[output.value];
      for (int block = 0; block < blocks_[output.value]; ++block) {
        float* to = output.data + step * output.step_stride + int64_t{block} * r_.units + first_;
        for (int row = 0; row < r_.rows; ++row) {
          std::copy_n(from.data + row * from.stride + int64_t{block} * units_, units_, to + row * output.row_stride);
        }
      }
    }
    copy_to_hidden(step + 1, r_.carries[r_.hidden].next);
    for (int i = 0; i < r_.num_carries; ++i) {
      std::copy_n(values_[r_.carries[i].next].data, int64_t{r_.rows} * units_, values_[1 + i].data);
    }
  }

  // The distance between rows is 0 if all rows are the same.
  struct Value {
    float* data;
    int64_t stride;
  };

  const kernel::RecurrentLoop& r_;
  const Hidden& hidden_;
  int first_;
  int units_;
  const float* packed_;
  AlignedFloats memory_;
  std::vector<Value> values_;
  std::vector<int> blocks_;
  std::vector<ElementwiseStep> steps_;
};

// Runs the time steps of all parts. Thread i computes part i, and waits after each time step until all parts have
// finished it. If the thread of a part has not begun, or seems to have been interrupted, another one computes the time
// step in its place. A call therefore also ends if it gets fewer threads than there are parts.
class TimeSteps {
 public:
  TimeSteps(const std::vector<std::vector<Tile>>& parts, int count)
      : parts_(parts), count_(count), progress_(parts.size()) {}

  void run_thread(int own) {
    progress_[own].has_thread.store(true, std::memory_order_relaxed);
    for (int step = progress_[own].begun.load(std::memory_order_relaxed); step < count_; ++step) {
      finish(step);
      try_run(own, step);
    }
    finish(count_);
  }

 private:
  static constexpr int kPatience = 2000; // checks before a thread takes over the work of another one
  static constexpr int kSpins = 20000; // checks before a thread lets others have its processor

  struct alignas(128) Progress { // the processor fetches pairs of cache lines
    std::atomic<int> begun{0}; // time steps that a thread has begun
    std::atomic<int> finished{0};
    std::atomic<bool> has_thread{false};
  };

  void try_run(int part, int step) {
    auto& [begun, finished, has_thread] = progress_[part];
    int expected = step;
    if (begun.compare_exchange_strong(expected, step + 1, std::memory_order_acquire)) {
      run_tiles(parts_[part], step);
      finished.store(step + 1, std::memory_order_release);
    }
  }

  // Every other time step goes through the tiles, and so through the weights, from their end, because what was read
  // last is still in the cache.
  static void run_tiles(const std::vector<Tile>& tiles, int step) {
    const size_t count = tiles.size();
    for (size_t i = 0; i < count; ++i) {
      tiles[step % 2 == 0 ? i : count - 1 - i].run(step);
    }
  }

  // Returns when all parts have finished the first `steps` time steps.
  void finish(int steps) {
    for (size_t i = 0; i < parts_.size(); ++i) {
      auto& [begun, finished, has_thread] = progress_[i];
      for (int checks = 0; finished.load(std::memory_order_acquire) < steps; ++checks) {
        const bool is_waiting = begun.load(std::memory_order_relaxed) < steps;
        if (is_waiting && (checks > kPatience || !has_thread.load(std::memory_order_relaxed))) {
          try_run(static_cast<int>(i), steps - 1);
        } else if (checks < kSpins) {
          pause_briefly();
        } else {
          std::this_thread::yield();
        }
      }
    }
  }

  const std::vector<std::vector<Tile>>& parts_;
  const int count_;
  std::vector<Progress> progress_;
};

} // namespace

void kernel::pack_recurrent(const float* b, int64_t row_stride, int units, int gates, float* packed) {
  const int parts = parts_of(units, gates);
  for (int part = 0; part < parts; ++part) {
    for_tiles(units, parts, part, [&](int first, int count) {
      for (int gate = 0; gate < gates; ++gate) {
        for (int k = 0; k < units; ++k, packed += count) {
          std::copy_n(b + k * row_stride + int64_t{gate} * units + first, count, packed);
        }
      }
    });
  }
}

void kernel::recurrent_loop(const RecurrentLoop& r) {
  const int count = parts_of(r.units, r.gates);
  const Hidden hidden(r.rows, r.units);
  std::vector<std::vector<Tile>> parts(count);
  for (int i = 0; i < count; ++i) {
    for_tiles(r.units, count, i, [&](int first, int units) {
      parts[i].emplace_back(r, hidden, first, units, r.packed + int64_t{first} * r.gates * r.units);
    });
  }
  TimeSteps steps(parts, r.time_steps);
  parallel(count, [&](int i) { steps.run_thread(i); });
}

} // namespace executorch_mlx
