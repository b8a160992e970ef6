// Depthwise convolutions. kernels.h says what the function computes. Part of kernels.cpp.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kPositions = 8;  // whose sums stay in registers, so that a weight is loaded once for all of them

// Computes `Count` positions from `position` on, for `lanes` channels from `channel` on. `lanes` is an int, or a
// Constant, with which the compiler leaves out the loads of partial vectors.
template <int Count, typename Lanes>
void sum_window(
    const WindowElements& window, ptrdiff_t step, float* y, int channels, int position, int channel, Lanes lanes) {
  Floats sums[Count] = {};
  for (int i = 0; i < window.count; ++i) {
    const Floats weight = load_lanes(window.weights[i] + channel, lanes);
    const float* const from = window.sources[i] + position * step + channel;
    repeat<Count>([&](auto p) {
      sums[p.value] = multiply_add(load_lanes(from + p.value * step, lanes), weight, sums[p.value]);
    });
  }
  float* const to = y + ptrdiff_t{position} * channels + channel;
  repeat<Count>([&](auto p) { store_lanes(sums[p.value], to + ptrdiff_t{p.value} * channels, lanes); });
}

void depthwise_positions(const WindowElements& window, ptrdiff_t step, float* y, int positions, int channels) {
  for_row_tiles<kPositions>(positions, [&](auto count, int position) {
    int channel = 0;
    for (; channel + kLanes <= channels; channel += kLanes) {
      sum_window<count.value>(window, step, y, channels, position, channel, Constant<kLanes>{});
    }
    if (channel < channels) {
      sum_window<count.value>(window, step, y, channels, position, channel, channels - channel);
    }
  });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
