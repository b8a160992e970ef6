// Products of activations in 8 bits with quantized weights: the definition of the results, the activations, and the
// arithmetic. int8_panels.h multiplies. Part of kernels.cpp.
//
// Each group of a row of x becomes integers in [-127, 127] and a scale. The dot product of the integers of a group of x
// and of the matrix is exact in 32 bits, in any order. With d[g] the dot product of group g, a result is
//
//     total = 0; for g = 0, 1, ...: total = fma(w.scale[g] * x.scale[g], d[g], total)
//                                   total = fma(w.bias[g], x.sum[g], total)
//
// in float32, where x.sum is x.scale times the sum of the integers. It depends on the two rows alone, and all
// instruction sets give the same bits.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// -- four bytes in each lane ----------------------------------------------------------------------

// Four signed bytes in each lane, in a form for add_products().
#if defined(__AVX512VNNI__)
typedef Ints FourBytes;

inline FourBytes four_bytes(Ints x) {
  return x;
}

// acc + the sum of the four products of each lane. The bytes of w are unsigned.
inline Ints add_products(Ints acc, Words w, FourBytes x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}
#elif defined(__AVX2__)
typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(kLanes * 4)));

struct FourBytes {
  Shorts even;
  Shorts odd;
};

inline FourBytes four_bytes(Ints x) {
  return {((Shorts)x << 8) >> 8, (Shorts)x >> 8};
}

inline Ints multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

inline Ints add_products(Ints acc, Words w, FourBytes x) {
  const Shorts even = (Shorts)(w & 0x00ff00ffu);
  const Shorts odd = (Shorts)((UnsignedShorts)w >> 8);
  return acc + multiply_pairs(even, x.even) + multiply_pairs(odd, x.odd);
}
#else
typedef Ints FourBytes;

inline FourBytes four_bytes(Ints x) {
  return x;
}

inline Ints add_products(Ints acc, Words w, FourBytes x) {
  for (int shift = 0; shift < 32; shift += 8) {
    acc += (Ints)(w >> shift & 255u) * ((Ints)((Words)x << (24 - shift)) >> 24);
  }
  return acc;
}
#endif

// -- activations ----------------------------------------------------------------------------------

// The order of eight integers of x, or of sixteen.
inline Floats byte_order(Floats v, Constant<8>) {
  return v;
}
inline Floats byte_order(Floats v, Constant<4>) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
#else
  return __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7);
#endif
}

// Rounds to the nearest integer, ties to even. |x| is less than 2^22.
inline Ints rounded(Floats x) {
  round_product(x);
  return (Ints)(x + 0x1.8p23f) - 0x4b400000;
}

inline void store_bytes(Ints x, int8_t* to) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
#if defined(__AVX512F__)
  const Bytes bytes = (Bytes)_mm512_cvtepi32_epi8((__m512i)x);
#else
  const Bytes bytes = __builtin_convertvector(x, Bytes);
#endif
  __builtin_memcpy(to, &bytes, sizeof(bytes));
}

// The bits of the largest magnitude of a group. NaN counts as larger than infinity.
inline uint32_t largest_magnitude(const float* x, int size) {
  Ints largest = {};
  for (int i = 0; i < size; i += kLanes) {
    const Ints magnitude = load<Ints>(x + i) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    result = largest[lane] > result ? largest[lane] : result;
  }
  return static_cast<uint32_t>(result);
}

template <int Bits>
void quantize_row_of(const float* x, int groups, int size, int8_t* integers, float* scales, float* sums) {
  for (int g = 0; g < groups; ++g, x += size, integers += size) {
    const uint32_t bits = largest_magnitude(x, size);
    float largest;
    __builtin_memcpy(&largest, &bits, sizeof(largest));
    const bool is_zero = largest < kSmallestGroupMaximum;
    const bool is_finite = bits < 0x7f800000u;
    const float inverse = is_zero || !is_finite ? 0 : 127 / largest;
    Ints sum = {};
    for (int i = 0; i < size; i += kLanes) {
      const Floats values = is_finite ? load<Floats>(x + i) : Floats{};
      const Ints q = rounded(byte_order(values, Constant<Bits>{}) * inverse);
      sum += q;
      store_bytes(q, integers + i);
    }
    int32_t total = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      total += sum[lane];
    }
    scales[g] = is_zero ? 0 : is_finite ? largest / 127 : __builtin_nanf("");
    sums[g] = scales[g] * static_cast<float>(total);
  }
}

void quantize_row(const float* x, const QuantizedMatrix& q, int8_t* integers, float* scales, float* sums) {
  const int groups = q.k / q.group_size;
  q.bits == 4 ? quantize_row_of<4>(x, groups, q.group_size, integers, scales, sums)
              : quantize_row_of<8>(x, groups, q.group_size, integers, scales, sums);
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
