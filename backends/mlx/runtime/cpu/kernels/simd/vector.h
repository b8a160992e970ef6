// Vectors of the instruction set that kernels.cpp is compiled for. Part of kernels.cpp.
#pragma once

#include "kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));  // the bits of float16 or bfloat16 values

template <typename V, typename T>
inline V load(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

// Loads the first `count` lanes from memory. The other lanes are zeros.
template <typename V, typename T>
inline V load_partial(const T* from, int count) {
  T lanes[sizeof(V) / sizeof(T)] = {};
  __builtin_memcpy(lanes, from, count * sizeof(T));
  return load<V>(lanes);
}

// The sum of all lanes. Adds halves of the vector, which is faster than adding one lane after the other.
inline float sum(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  typedef float Four __attribute__((vector_size(16)));
  Four halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
  const Four four = halves[0] + halves[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

// Converts the bits of float16 or bfloat16 values to float32. Exact, also for subnormal numbers, infinities and NaNs.
template <FloatType Type>
inline Floats to_float(Halves x) {
  const Words bits = __builtin_convertvector(x, Words);
  if constexpr (Type == FloatType::bfloat16) {
    return (Floats)(bits << 16);
  }
  const Words magnitude = (bits & 0x7fffu) << 13;
  const Words finite = (Words)((Floats)magnitude * 0x1p112f);  // changes the exponent bias from 15 to 127
  const Words value = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000u : finite;
  return (Floats)(value | (bits & 0x8000u) << 16);
}

// Loads elements of `Type` as float32. load_first() loads `count` elements and sets the other lanes to 0.
template <FloatType Type>
struct Elements {
  typedef uint16_t Element;
  static Floats load_all(const Element* from) {
    return to_float<Type>(load<Halves>(from));
  }
  static Floats load_first(const Element* from, int count) {
    return to_float<Type>(load_partial<Halves>(from, count));
  }
};

template <>
struct Elements<FloatType::float32> {
  typedef float Element;
  static Floats load_all(const Element* from) {
    return load<Floats>(from);
  }
  static Floats load_first(const Element* from, int count) {
    return load_partial<Floats>(from, count);
  }
};

template <FloatType Type>
void widen_from(const uint16_t* x, ptrdiff_t stride, float* y, ptrdiff_t count) {
  ptrdiff_t i = 0;
  for (; stride == 1 && i + kLanes <= count; i += kLanes) {
    const Floats floats = Elements<Type>::load_all(x + i);
    __builtin_memcpy(y + i, &floats, sizeof(floats));
  }
  for (; i < count; i += kLanes) {
    const ptrdiff_t lanes = count - i < kLanes ? count - i : kLanes;
    Halves halves = {};
    for (ptrdiff_t j = 0; j < lanes; ++j) {
      halves[j] = x[(i + j) * stride];
    }
    const Floats floats = to_float<Type>(halves);
    __builtin_memcpy(y + i, &floats, lanes * sizeof(float));
  }
}

void widen(const uint16_t* x, FloatType type, ptrdiff_t stride, float* y, ptrdiff_t count) {
  type == FloatType::bfloat16 ? widen_from<FloatType::bfloat16>(x, stride, y, count)
                              : widen_from<FloatType::float16>(x, stride, y, count);
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
