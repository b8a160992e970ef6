// The passes of the sampler over the vocabulary. kernels.h says what each of them computes. Part of kernels.cpp.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

template <FloatType Type>
void scan_logits_of(const typename Elements<Type>::Element* x, ptrdiff_t count, float* y, float* block_maxima) {
  const Floats lowest = Floats{} - __builtin_inff();
  for (ptrdiff_t begin = 0; begin < count; begin += kLogitBlock) {
    const ptrdiff_t end = begin + kLogitBlock < count ? begin + kLogitBlock : count;
    Floats highest = lowest;
    ptrdiff_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const Floats v = Elements<Type>::load_all(x + i);
      const Floats cleaned = v == v ? v : lowest;
      store(cleaned, y + i);
      highest = cleaned > highest ? cleaned : highest;
    }
    float maximum = highest[0];
    for (int lane = 1; lane < kLanes; ++lane) {
      maximum = highest[lane] > maximum ? highest[lane] : maximum;
    }
    if (i < end) {
      const Floats v = Elements<Type>::load_first(x + i, static_cast<int>(end - i));
      for (ptrdiff_t lane = 0; i < end; ++i, ++lane) {
        y[i] = v[lane] == v[lane] ? v[lane] : -__builtin_inff();
        maximum = y[i] > maximum ? y[i] : maximum;
      }
    }
    block_maxima[begin / kLogitBlock] = maximum;
  }
}

void widen_logits(const void* x, FloatType type, ptrdiff_t count, float* y, float* block_maxima) {
  with_type<FloatType::float32, FloatType::float16, FloatType::bfloat16>(type, [&](auto constant) {
    constexpr FloatType Type = decltype(constant)::value;
    scan_logits_of<Type>(static_cast<const typename Elements<Type>::Element*>(x), count, y, block_maxima);
  });
}

// Returns 2^x for x in (-126, 0], by the Taylor polynomial of 2^r, |r| <= 1/2. Returns 0 for a lower x.
inline Floats power_of_2(Floats x) {
  constexpr float kRounding = 12582912; // 1.5 * 2^23: adding it rounds to an integer
  const Floats lowest = broadcast(-127.0f);
  const Floats clamped = x < lowest ? lowest : x;
  const Floats rounded = clamped + kRounding;
  const Floats r = clamped - (rounded - kRounding);
  constexpr float kCoefficients[] = {
      1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
  Floats p = broadcast(1.5252734e-5f);
  for (const float c : kCoefficients) {
    p = multiply_add(p, r, broadcast(c));
  }
  const Floats y = p * (Floats)(((Words)rounded << 23) + (127u << 23));
  return x > -126.0f ? y : Floats{};
}

double sum_probability_weights(const float* y, ptrdiff_t count, float maximum, float scale) {
  double total = 0;
  for (ptrdiff_t begin = 0; begin < count; begin += kLogitBlock) {
    const ptrdiff_t end = begin + kLogitBlock < count ? begin + kLogitBlock : count;
    Floats sums = {};
    ptrdiff_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      sums += power_of_2((maximum - load<Floats>(y + i)) * scale);
    }
    if (i < end) {
      const int left = static_cast<int>(end - i);
      Floats rest = power_of_2((maximum - load_partial<Floats>(y + i, left)) * scale);
      for (int lane = left; lane < kLanes; ++lane) {
        rest[lane] = 0;
      }
      sums += rest;
    }
    total += sum(sums);
  }
  return total;
}

template <int Distance>
inline Words rotate_left(Words x) {
  return x << Distance | x >> (32 - Distance);
}

template <int A, int B, int C, int D>
inline void four_rounds(Words& x, Words& y) {
  x += y;
  y = rotate_left<A>(y) ^ x;
  x += y;
  y = rotate_left<B>(y) ^ x;
  x += y;
  y = rotate_left<C>(y) ^ x;
  x += y;
  y = rotate_left<D>(y) ^ x;
}

void random_words(
    uint32_t key0, uint32_t key1, uint32_t first, uint32_t second, ptrdiff_t count, uint32_t* low, uint32_t* high) {
  const uint32_t key2 = key0 ^ key1 ^ 0x1BD11BDA;
  Words lane = {};
  for (int i = 0; i < kLanes; ++i) {
    lane[i] = i;
  }
  for (ptrdiff_t i = 0; i < count; i += kLanes) {
    Words x = lane + (first + static_cast<uint32_t>(i)) + key0;
    Words y = lane + (second + static_cast<uint32_t>(i)) + key1;
    four_rounds<13, 15, 26, 6>(x, y);
    x += key1;
    y += key2 + 1;
    four_rounds<17, 29, 16, 24>(x, y);
    x += key2;
    y += key0 + 2;
    four_rounds<13, 15, 26, 6>(x, y);
    x += key0;
    y += key1 + 3;
    four_rounds<17, 29, 16, 24>(x, y);
    x += key1;
    y += key2 + 4;
    four_rounds<13, 15, 26, 6>(x, y);
    x += key2;
    y += key0 + 5;
    const ptrdiff_t left = count - i < kLanes ? count - i : kLanes;
    __builtin_memcpy(low + i, &x, left * sizeof(uint32_t));
    __builtin_memcpy(high + i, &y, left * sizeof(uint32_t));
  }
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
