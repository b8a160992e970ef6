// Quantizes the groups of a weight as scale_search.py does, in one pass over memory.
//
// The torch code in scale_search.py defines the results. This code does the same operations in the same order, and
// gives the same bits as torch on a CPU with AVX2.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kLanes = 16; // the groups that are computed at a time: one in each lane of a vector
constexpr int kRounds = 2;
constexpr double kShrinks[] = {1.0, 0.95, 0.9, 0.85, 0.8, 0.75};
constexpr float kSmallestScale = 1e-7f;
constexpr float kLargestWeight = 1e18f; // sums of squares stay finite
constexpr float kToInteger = 1.5f * (1 << 23); // adding and subtracting it rounds a small float, ties to even
constexpr float kLargestFraction = 1 << 23; // floats from here on are integers

#if defined(__aarch64__)
typedef __fp16 Half; // GCC 12 lacks _Float16 in C++ there
#else
typedef _Float16 Half;
#endif

// A value of each of 16 groups. The compiler splits these vectors if the instruction set has shorter ones.
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

enum Dtype { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct Weight {
  const void* x; // [groups, group_size], of dtype `x_dtype`
  int x_dtype;
  int64_t groups;
  int group_size;
  int bits;
  bool searches; // whether the scales are searched, as by `fit`; else they are those of `fit_range`
  const float* importance; // [importance_groups, group_size], repeated for the groups of `x`, or null
  int64_t importance_groups;
  uint8_t* packed; // [groups, group_size * bits / 8]
  int dtype; // of scales and biases
  void* scales; // [groups]
  void* biases; // [groups]
};

// 16 groups, and their quantization. The first index is that of the element in its group.
template <int size>
struct Lanes {
  Floats x[size], q[size]; // q: integers from 0 to 2^bits - 1
  Floats scale, bias; // the values are representable in the dtype of the scales
};

// The functions below are inlined into `quantize_groups`, which is compiled for several instruction sets.
#define INLINE inline __attribute__((always_inline))

// Rounds to the nearest values of `dtype`, ties to even.
INLINE void round_to(Floats& values, int dtype) {
  if (dtype == kFloat32) {
    return;
  }
  const Words bits = std::bit_cast<Words>(values), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  const int dropped = dtype == kFloat16 ? 13 : 16; // bits of the mantissa
  Words rounded = magnitude + ((1u << (dropped - 1)) - 1) + (magnitude >> dropped & 1);
  rounded &= ~((1u << dropped) - 1);
  if (dtype == kFloat16) {
    // Below 2^-14, the values of float16 are the multiples of 2^-24.
    const Floats subnormal = (std::bit_cast<Floats>(magnitude) + 0.5f) - 0.5f;
    rounded = magnitude < 0x38800000u ? std::bit_cast<Words>(subnormal) : rounded;
    rounded = rounded > 0x477fe000u ? Words{} + 0x7f800000u : rounded; // above 65504: infinity
  }
  values = std::bit_cast<Floats>(rounded | sign);
}

// Sums the `size` values of each group in the order of torch.sum over a contiguous axis: four partial sums of vectors
// of eight floats, then the sum of these, then the sum of the eight floats.
template <int size, typename Value>
INLINE Floats sum(Value value) {
  Floats result{};
#pragma GCC unroll 1 // without it, this file takes twice as long to compile
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

// Rounds to the nearest integer, ties to even.
INLINE Floats rounded(const Floats& x) {
  const Words sign = std::bit_cast<Words>(x) & 0x80000000u;
  const Floats magnitude = std::bit_cast<Floats>(std::bit_cast<Words>(x) ^ sign);
  const Floats nearest = (magnitude + kLargestFraction) - kLargestFraction;
  return std::bit_cast<Floats>(std::bit_cast<Words>(magnitude < kLargestFraction ? nearest : magnitude) | sign);
}

INLINE Floats larger(const Floats& a, const Floats& b) { return a > b ? a : b; }
INLINE Floats smaller(const Floats& a, const Floats& b) { return a < b ? a : b; }
INLINE Floats absolute(const Floats& x) { return std::bit_cast<Floats>(std::bit_cast<Words>(x) & 0x7fffffffu); }

// Whether `condition` holds in all lanes.
INLINE bool all(const Words& condition) {
  bool result = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    result &= condition[lane] != 0;
  }
  return result;
}

// The squared error of integers `q` with `scale` and `bias`, of each element.
INLINE Floats squared_error(const Floats& x, const Floats& q, const Floats& scale, const Floats& bias) {
  const Floats difference = q * scale + bias - x;
  return difference * difference;
}

// Does what `fit` does. `first` is the number of the first group.
template <int size, bool is_weighted>
INLINE void search(const Weight& w, int64_t first, const Floats& minimum, const Floats& maximum, Lanes<size>& lanes) {
  const float largest = static_cast<float>((1 << w.bits) - 1);
  Floats weight[is_weighted ? size : 1];
  if constexpr (is_weighted) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t group = std::min(first + lane, w.groups - 1) % w.importance_groups;
      for (int e = 0; e < size; ++e) {
        weight[e][lane] = w.importance[group * size + e];
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

  const Floats(&x)[size] = lanes.x;
  Floats(&q)[size] = lanes.q;
  Floats total = Floats{} + static_cast<float>(size);
  if constexpr (is_weighted) {
    total = sum<size>([&](int e) { return weight[e]; });
  }
  const Floats mean_x = sum<size>([&](int e) { return weighted(x[e], e); }) / total;

  Floats best_error{}, best_scale{}, best_bias{};
  for (const double shrink : kShrinks) {
    const Floats range = maximum - minimum;
    Floats scale = larger(range * static_cast<float>(shrink) / largest, Floats{} + kSmallestScale);
    Floats bias = minimum + range * static_cast<float>((1 - shrink) / 2);
    for (int round = 0; round < kRounds; ++round) {
      for (int e = 0; e < size; ++e) {
        q[e] = integers(x[e], scale, bias, largest);
      }
      // The least squares for these integers.
      const Floats mean_q = sum<size>([&](int e) { return weighted(q[e], e); }) / total;
      for (int e = 0; e < size; ++e) {
        q[e] -= mean_q;
      }
      const Floats variance = sum<size>([&](int e) { return weighted(q[e], e) * q[e]; });
      const Floats slope = sum<size>([&](int e) { return weighted(q[e], e) * x[e]; }) / variance;
      const auto is_valid = (variance > 0.0f) & (slope > kSmallestScale);
      scale = is_valid ? slope : scale;
      bias = is_valid ? mean_x - slope * mean_q : bias;
    }
    round_to(scale, w.dtype);
    round_to(bias, w.dtype);
    const Floats error = sum<size>(
        [&](int e) { return weighted(squared_error(x[e], integers(x[e], scale, bias, largest), scale, bias), e); });
    const auto is_better = shrink == kShrinks[0] ? best_error == best_error : error < best_error;
    best_error = is_better ? error : best_error;
    best_scale = is_better ? scale : best_scale;
    best_bias = is_better ? bias : best_bias;
  }
  for (int e = 0; e < size; ++e) {
    q[e] = integers(x[e], best_scale, best_bias, largest);
  }
  lanes.scale = best_scale;
  lanes.bias = best_bias;
}

// Does what `fit_range` does. Returns false if a scale or bias is too large for its dtype.
template <int size>
INLINE bool fit_range(const Weight& w, const Floats& minimum, const Floats& maximum, Lanes<size>& lanes) {
  const float largest = static_cast<float>((1 << w.bits) - 1), half = static_cast<float>(1 << (w.bits - 1));
  // The range of the values, as in `quantize` of custom_ops/packing.py.
  Floats step = larger((maximum - minimum) / largest, Floats{} + kSmallestScale);
  const auto is_downward = absolute(minimum) <= absolute(maximum);
  step = is_downward ? -step : step;
  const Floats edge = is_downward ? maximum : minimum;
  const Floats steps_to_zero = rounded(edge / step);
  const auto at_zero = steps_to_zero == 0.0f;
  Floats scale = at_zero ? step : edge / steps_to_zero;
  Floats bias = at_zero ? Floats{} : edge;
  round_to(scale, w.dtype);
  round_to(bias, w.dtype);
  // The range that is symmetric about 0.
  Floats even_step = larger(larger(absolute(minimum), absolute(maximum)) / (half - 1), Floats{} + kSmallestScale);
  round_to(even_step, w.dtype);
  Floats origin = even_step * -half;
  round_to(origin, w.dtype);
  if (!all(std::bit_cast<Words>((absolute(scale) < kLargestWeight) & (absolute(bias) < kLargestWeight) &
          (absolute(origin) < kLargestWeight)))) {
    return false;
  }
  const auto error_of = [&](const Floats& s, const Floats& b) {
    return sum<size>([&](int e) { return squared_error(lanes.x[e], integers(lanes.x[e], s, b, largest), s, b); });
  };
  const auto is_better = error_of(even_step, origin) < error_of(scale, bias);
  lanes.scale = is_better ? even_step : scale;
  lanes.bias = is_better ? origin : bias;
  for (int e = 0; e < size; ++e) {
    lanes.q[e] = integers(lanes.x[e], lanes.scale, lanes.bias, largest);
  }
  return true;
}

// Reads the groups from `first` on. Spare lanes repeat the last group.
template <int size, typename Element, typename ToFloat>
INLINE void read(const Weight& w, int64_t first, Lanes<size>& lanes, ToFloat to_float) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Element* group = static_cast<const Element*>(w.x) + std::min(first + lane, w.groups - 1) * size;
    for (int e = 0; e < size; ++e) {
      lanes.x[e][lane] = to_float(group[e]);
    }
  }
}

template <int size>
INLINE void read(const Weight& w, int64_t first, Lanes<size>& lanes) {
  if (w.x_dtype == kFloat32) {
    read<size, float>(w, first, lanes, [](float x) { return x; });
  } else if (w.x_dtype == kFloat16) {
    read<size, Half>(w, first, lanes, [](Half x) { return static_cast<float>(x); });
  } else {
    read<size, uint16_t>(w, first, lanes, [](uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); });
  }
}

INLINE void write_number(void* numbers, int64_t index, float x, int dtype) {
  if (dtype == kFloat32) {
    static_cast<float*>(numbers)[index] = x;
  } else if (dtype == kFloat16) {
    static_cast<Half*>(numbers)[index] = static_cast<Half>(x);
  } else {
    static_cast<uint16_t*>(numbers)[index] = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  }
}

// Writes the packed integers of a group: a stream of bits, least significant bit first.
template <int size>
INLINE void pack(const uint8_t (&codes)[size], int bits, uint8_t* packed) {
  if (bits == 8) {
    std::memcpy(packed, codes, size);
  } else if (bits == 4) {
    for (int e = 0; e < size; e += 2) {
      packed[e / 2] = static_cast<uint8_t>(codes[e] | codes[e + 1] << 4);
    }
  } else {
    uint32_t stream = 0;
    for (int e = 0, pending = 0; e < size; ++e) {
      stream |= static_cast<uint32_t>(codes[e]) << pending;
      for (pending += bits; pending >= 8; pending -= 8, stream >>= 8) {
        *packed++ = static_cast<uint8_t>(stream);
      }
    }
  }
}

template <int size>
INLINE void write(const Weight& w, int64_t first, const Lanes<size>& lanes) {
  for (int lane = 0; lane < kLanes && first + lane < w.groups; ++lane) {
    uint8_t codes[size];
    for (int e = 0; e < size; ++e) {
      codes[e] = static_cast<uint8_t>(lanes.q[e][lane]);
    }
    const int64_t group = first + lane;
    pack<size>(codes, w.bits, w.packed + group * (size * w.bits / 8));
    write_number(w.scales, group, lanes.scale[lane], w.dtype);
    write_number(w.biases, group, lanes.bias[lane], w.dtype);
  }
}

// Quantizes the groups from `first` to `end` - 1. Returns whether `executorch_mlx_quantize` can return 1.
template <int size>
INLINE bool quantize(const Weight& w, int64_t first, int64_t end) {
  Lanes<size> lanes;
  for (; first < end; first += kLanes) {
    read(w, first, lanes);
    Floats minimum = lanes.x[0], maximum = lanes.x[0];
    Words is_finite = Words{} - 1;
    for (const Floats& x : lanes.x) {
      minimum = smaller(x, minimum);
      maximum = larger(x, maximum);
      is_finite &= std::bit_cast<Words>(absolute(x) < kLargestWeight);
    }
    if (!all(is_finite)) {
      return false;
    }
    if (!w.searches) {
      if (!fit_range(w, minimum, maximum, lanes)) {
        return false;
      }
    } else if (w.importance != nullptr) {
      search<size, true>(w, first, minimum, maximum, lanes);
    } else {
      search<size, false>(w, first, minimum, maximum, lanes);
    }
    write(w, first, lanes);
  }
  return true;
}

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#endif
bool quantize_groups(const Weight& w, int64_t first, int64_t end) {
  switch (w.group_size) {
    case 32:
      return quantize<32>(w, first, end);
    case 64:
      return quantize<64>(w, first, end);
    default:
      return quantize<128>(w, first, end);
  }
}

} // namespace

// Quantizes the groups of `x`, see `Weight`, with `threads` threads. Returns 1, or 0 if a weight is too large or not
// finite, or a scale or bias is too large for its dtype; the results are then undefined. `group_size` is 32, 64 or 128,
// and `bits` at most 8.
extern "C" __attribute__((visibility("default"))) int executorch_mlx_quantize(const void* x, int x_dtype,
    int64_t groups, int group_size, int bits, int searches, const float* importance, int64_t importance_groups,
    uint8_t* packed, int dtype, void* scales, void* biases, int threads) {
  const Weight weight{x, x_dtype, groups, group_size, bits, searches != 0, importance, importance_groups, packed, dtype,
      scales, biases};
  const int64_t share = ((groups + threads - 1) / threads + kLanes - 1) / kLanes * kLanes;
  std::vector<char> is_done(threads, 1);
  std::vector<std::thread> others;
  for (int i = 1; i < threads && i * share < groups; ++i) {
    others.emplace_back([&, i] { is_done[i] = quantize_groups(weight, i * share, std::min((i + 1) * share, groups)); });
  }
  is_done[0] = quantize_groups(weight, 0, std::min(share, groups));
  for (std::thread& other : others) {
    other.join();
  }
  return std::all_of(is_done.begin(), is_done.end(), [](char x) { return x; });
}
