// The scale search of scale_search.py for groups of floats, in one pass over memory.
//
// The torch code in scale_search.py defines the results. This code does the same operations in the same order, and
// gives the same bits as torch on a CPU with AVX2.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int kLanes = 16;      // the groups that are computed at a time: one in each lane of a vector
constexpr int kMaxGroup = 128;  // the largest group size
constexpr int kRounds = 2;
constexpr double kShrinks[] = {1.0, 0.95, 0.9, 0.85, 0.8, 0.75};
constexpr float kSmallestScale = 1e-7f;
constexpr float kLargestWeight = 1e18f;         // sums of squares stay finite
constexpr float kToInteger = 1.5f * (1 << 23);  // adding and subtracting it rounds a small float, ties to even

// A value of each of 16 groups. The compiler splits these vectors if the instruction set has shorter ones.
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

enum Dtype { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct Search {
  const float* x;  // [groups, group_size]
  int64_t groups;
  int group_size;
  int bits;
  int dtype;                // of scales and biases, a Dtype
  const float* importance;  // [importance_groups, group_size], repeated for the groups of `x`, or null
  int64_t importance_groups;
  uint8_t* codes;  // [groups, group_size]
  float* scales;   // [groups]; the values are representable in `dtype`
  float* biases;   // [groups]
};

// The functions below are inlined into `fit`, which is compiled for several instruction sets.
#define INLINE inline __attribute__((always_inline))

// Rounds to the nearest values of `dtype`, ties to even.
INLINE void round_to(Floats& values, int dtype) {
  if (dtype == kFloat32) {
    return;
  }
  const Words bits = std::bit_cast<Words>(values), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const int dropped = dtype == kFloat16 ? 13 : 16;  // bits of the mantissa
  Words rounded = magnitude + ((1u << (dropped - 1)) - 1) + (magnitude >> dropped & 1);
  rounded &= ~((1u << dropped) - 1);
  if (dtype == kFloat16) {
    // Below 2^-14, the values of float16 are the multiples of 2^-24.
    const Floats subnormal = (std::bit_cast<Floats>(magnitude) + 0.5f) - 0.5f;
    rounded = magnitude < 0x38800000u ? std::bit_cast<Words>(subnormal) : rounded;
    rounded = rounded > 0x477fe000u ? Words{} + 0x7f800000u : rounded;  // above 65504: infinity
  }
  values = std::bit_cast<Floats>(rounded | sign);
}

// Sums the `size` values of each group in the order of torch.sum over a contiguous axis: four partial sums of vectors of
// eight floats, then the sum of these, then the sum of the eight floats.
template <typename Value>
INLINE Floats sum(int size, Value value) {
  Floats result{};
  for (int i = 0; i < 8; ++i) {
    Floats total{};
    for (int first = i; first < i + 32; first += 8) {
      Floats part = value(first);
      for (int e = first + 32; e < size; e += 32) {
        part += value(e);
      }
      total = first == i ? part : total + part;
    }
    result = i == 0 ? total : result + total;
  }
  return result;
}

// Returns the nearest integers in [0, largest].
INLINE Floats integers(const Floats& x, const Floats& scale, const Floats& bias, float largest) {
  Floats q = (x - bias) / scale;
  q = q > 0.0f ? q : Floats{};
  q = q < largest ? q : Floats{} + largest;
  return (q + kToInteger) - kToInteger;
}

// Searches the scales of the groups from `first` on, at most `kLanes` of them. Returns whether their weights are finite.
template <bool is_weighted>
INLINE bool fit_lanes(const Search& s, int64_t first) {
  const int size = s.group_size, count = static_cast<int>(std::min<int64_t>(kLanes, s.groups - first));
  const float largest = static_cast<float>((1 << s.bits) - 1);
  Floats x[kMaxGroup], q[kMaxGroup], weight[is_weighted ? kMaxGroup : 1];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t group = first + std::min(lane, count - 1);  // spare lanes repeat the last group
    for (int e = 0; e < size; ++e) {
      x[e][lane] = s.x[group * size + e];
      if constexpr (is_weighted) {
        weight[e][lane] = s.importance[group % s.importance_groups * size + e];
      }
    }
  }
  const auto weighted = [&](const Floats& value, int e) {
    if constexpr (is_weighted) {
      return value * weight[e];
    } else {
      return value;
    }
  };

  Floats minimum = x[0], maximum = x[0];
  Words is_finite = Words{} - 1;
  for (int e = 0; e < size; ++e) {
    minimum = x[e] < minimum ? x[e] : minimum;
    maximum = x[e] > maximum ? x[e] : maximum;
    is_finite &= std::bit_cast<Words>((x[e] < kLargestWeight) & (x[e] > -kLargestWeight));
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!is_finite[lane]) {
      return false;
    }
  }
  Floats total = Floats{} + static_cast<float>(size);
  if constexpr (is_weighted) {
    total = sum(size, [&](int e) { return weight[e]; });
  }
  const Floats mean_x = sum(size, [&](int e) { return weighted(x[e], e); }) / total;

  Floats best_error{}, best_scale{}, best_bias{};
  for (const double shrink : kShrinks) {
    const Floats range = maximum - minimum;
    Floats scale = range * static_cast<float>(shrink) / largest;
    scale = scale > kSmallestScale ? scale : Floats{} + kSmallestScale;
    Floats bias = minimum + range * static_cast<float>((1 - shrink) / 2);
    for (int round = 0; round < kRounds; ++round) {
      for (int e = 0; e < size; ++e) {
        q[e] = integers(x[e], scale, bias, largest);
      }
      // The least squares for these integers.
      const Floats mean_q = sum(size, [&](int e) { return weighted(q[e], e); }) / total;
      for (int e = 0; e < size; ++e) {
        q[e] -= mean_q;
      }
      const Floats variance = sum(size, [&](int e) { return weighted(q[e], e) * q[e]; });
      const Floats slope = sum(size, [&](int e) { return weighted(q[e], e) * x[e]; }) / variance;
      const auto is_valid = (variance > 0.0f) & (slope > kSmallestScale);
      scale = is_valid ? slope : scale;
      bias = is_valid ? mean_x - slope * mean_q : bias;
    }
    round_to(scale, s.dtype);
    round_to(bias, s.dtype);
    for (int e = 0; e < size; ++e) {
      const Floats difference = integers(x[e], scale, bias, largest) * scale + bias - x[e];
      q[e] = difference * difference;
    }
    const Floats error = sum(size, [&](int e) { return weighted(q[e], e); });
    const auto is_better = shrink == kShrinks[0] ? best_error == best_error : error < best_error;
    best_error = is_better ? error : best_error;
    best_scale = is_better ? scale : best_scale;
    best_bias = is_better ? bias : best_bias;
  }

  for (int e = 0; e < size; ++e) {
    q[e] = integers(x[e], best_scale, best_bias, largest);
  }
  for (int lane = 0; lane < count; ++lane) {
    s.scales[first + lane] = best_scale[lane];
    s.biases[first + lane] = best_bias[lane];
    for (int e = 0; e < size; ++e) {
      s.codes[(first + lane) * size + e] = static_cast<uint8_t>(q[e][lane]);
    }
  }
  return true;
}

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#endif
bool fit(const Search& s, int64_t first, int64_t end) {
  for (; first < end; first += kLanes) {
    if (!(s.importance != nullptr ? fit_lanes<true>(s, first) : fit_lanes<false>(s, first))) {
      return false;
    }
  }
  return true;
}

}  // namespace

// Quantizes the groups of `x`, see `Search`, with `threads` threads. Returns 1, or 0 if a weight is too large or not
// finite; the results are then undefined. `group_size` is 32, 64 or 128, and `bits` at most 8.
extern "C" __attribute__((visibility("default"))) int executorch_mlx_fit_groups(
    const float* x, int64_t groups, int group_size, int bits, int dtype, const float* importance,
    int64_t importance_groups, uint8_t* codes, float* scales, float* biases, int threads) {
  const Search search{x, groups, group_size, bits, dtype, importance, importance_groups, codes, scales, biases};
  const int64_t share = ((groups + threads - 1) / threads + kLanes - 1) / kLanes * kLanes;
  std::vector<char> is_finite(threads, 1);
  std::vector<std::thread> others;
  for (int i = 1; i < threads && i * share < groups; ++i) {
    others.emplace_back([&, i] { is_finite[i] = fit(search, i * share, std::min((i + 1) * share, groups)); });
  }
  is_finite[0] = fit(search, 0, std::min(share, groups));
  for (std::thread& other : others) {
    other.join();
  }
  return std::all_of(is_finite.begin(), is_finite.end(), [](char x) { return x; });
}
