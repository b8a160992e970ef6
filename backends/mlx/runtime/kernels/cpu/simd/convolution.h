// Convolutions in small groups. kernels.h says what the function computes. Part of kernels.cpp.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kPositions = 8; // whose sums stay in registers, so that a weight is loaded once for all of them

// The lanes of x with these indices.
inline Floats permute(Floats x, Ints indices) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)indices, (__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_permutevar8x32_ps((__m256)x, (__m256i)indices);
#elif defined(__aarch64__)
  const Words bytes = (Words)indices * 0x04040404u + 0x03020100u; // of each element
  return (Floats)vqtbl1q_u8((uint8x16_t)x, (uint8x16_t)bytes);
#else
  Floats y;
  for (int lane = 0; lane < kLanes; ++lane) {
    y[lane] = x[indices[lane]];
  }
  return y;
#endif
}

// Computes `Count` positions from `position` on, for `lanes` channels from `channel` on. `lanes` is an int, or a
// Constant, with which the compiler leaves out the loads of partial vectors. first_inputs[l] is the lane with the first
// input of the group of lane l, if a vector of x begins with the group of lane 0.
template <int Count, bool IsDepthwise, typename Lanes>
void sum_window(const WindowElements& window, ptrdiff_t step, Ints first_inputs, float* y, int channels, int position,
    int channel, Lanes lanes) {
  Floats sums[Count] = {};
  for (int e = 0; e < window.count; ++e) {
    if constexpr (IsDepthwise) {
      const Floats weight = load_lanes(window.weights[e] + channel, lanes);
      const float* const from = window.sources[e] + position * step + channel;
      repeat<Count>([&](auto p) {
        sums[p.value] = multiply_add(load_lanes(from + p.value * step, lanes), weight, sums[p.value]);
      });
    } else {
      const float* const from = window.sources[e] + position * step + channel / window.outputs * window.inputs;
      const int inputs = lanes / window.outputs * window.inputs; // of all groups
      for (int i = 0; i < window.inputs; ++i) {
        const Floats weight = load_lanes(window.weights[e] + ptrdiff_t{i} * channels + channel, lanes);
        repeat<Count>([&](auto p) {
          const Floats x = permute(load_lanes(from + p.value * step, inputs), first_inputs + i);
          sums[p.value] = multiply_add(x, weight, sums[p.value]);
        });
      }
    }
  }
  float* const to = y + ptrdiff_t{position} * channels + channel;
  repeat<Count>([&](auto p) { store_lanes(sums[p.value], to + ptrdiff_t{p.value} * channels, lanes); });
}

template <bool IsDepthwise>
void convolve_groups(const WindowElements& window, ptrdiff_t step, float* y, int positions, int channels) {
  Ints first_inputs = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    first_inputs[lane] = lane / window.outputs * window.inputs;
  }
  for_row_tiles<kPositions>(positions, [&](auto count, int position) {
    int channel = 0;
    for (; channel + kLanes <= channels; channel += kLanes) {
      sum_window<count.value, IsDepthwise>(
          window, step, first_inputs, y, channels, position, channel, Constant<kLanes>{});
    }
    if (channel < channels) {
      sum_window<count.value, IsDepthwise>(
          window, step, first_inputs, y, channels, position, channel, channels - channel);
    }
  });
}

void convolve_small_groups(const WindowElements& window, ptrdiff_t step, float* y, int positions, int channels) {
  window.outputs == 1 ? convolve_groups<true>(window, step, y, positions, channels)
                      : convolve_groups<false>(window, step, y, positions, channels);
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
