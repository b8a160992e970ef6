// Products of activations as integers with quantized weights: the definition of the results, the activations, and the
// arithmetic. integer_panels.h multiplies. Part of kernels.cpp.
//
// Each group of a row of x becomes integers and a scale. Activations in 8 bits have integers in [-127, 127], of one
// digit. float32 activations have integers of 24 bits, which is about the precision of float32 for the largest value of
// the group: three digits in base 256, each in [-128, 127]. float16 and bfloat16 activations have 16 bits: two digits.
// The dot product of the digits of a group of x and the integers of the matrix is exact in 32 bits, in any order. With
// d[g] the dot product of group g, a result is
//
//     total = 0; for g = 0, 1, ...: total = fma(w.scale[g] * x.scale[g], d[g], total)
//                                   total = fma(w.bias[g], x.sum[g], total)
//
// in float32, where x.sum is x.scale times the sum of the integers. For three digits with the dot products d0, d1 and
// d2, the lowest digit first, d is fma(d2, 65536, d1 * 256 + d0): the last addend is an exact integer, which is rounded
// to float32. For two digits, d is d1 * 256 + d0, rounded to float32. A result depends on the two rows alone, and all
// instruction sets give the same bits.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// -- four bytes in each lane ----------------------------------------------------------------------

// The four bytes of x in each lane.
inline Ints broadcast_word(const int8_t* x) { return load<int32_t>(x) - Ints{}; }

// Sums of products with integers w of `Bits` bits. load() reads four integers of x, which take kBytes bytes each, into
// all lanes. After finish(), `total` has the sums. finish() must be called after at most kAdditions calls of add(); 0:
// after any number.
template <int Bits>
struct Sums;

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(kLanes * 4)));

// The sum of the two products of 16 bits in each lane.
inline Ints multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// Adds in 16 bits, in which eight sums of two products fit: a product is at most 15 * 128 in magnitude.
template <>
struct Sums<4> {
  static constexpr int kBytes = 1;
  static constexpr int kAdditions = 8;
  Ints total;
  Shorts pairs;

  static Ints load(const int8_t* x) { return broadcast_word(x); }
  void add(Words w, Ints x) {
#if defined(__AVX512BW__)
    pairs += (Shorts)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
#else
    pairs += (Shorts)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
#endif
  }
  void finish() {
    total += multiply_pairs(pairs, Shorts{} + 1);
    pairs = Shorts{};
  }
};

// Multiplies pairs of 16 bits: the even bytes of w, then the odd ones. The integers of x have 16 bits and are in this
// order, because to unpack them would take as long as to multiply them.
template <>
struct Sums<8> {
  struct Pairs {
    Shorts even, odd;
  };
  static constexpr int kBytes = 2;
  static constexpr int kAdditions = 0;
  Ints total;

  static Pairs load(const int8_t* x) { return {(Shorts)broadcast_word(x), (Shorts)broadcast_word(x + 4)}; }
  void add(Words w, const Pairs& x) {
    total += multiply_pairs((Shorts)(w & 0x00ff00ffu), x.even);
    total += multiply_pairs((Shorts)((UnsignedShorts)w >> 8), x.odd);
  }
  void finish() {}
};
#else
// acc + the sum of the four products of each lane. The bytes of w are unsigned, those of x are signed.
inline Ints add_products(Ints acc, Words w, Ints x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (Ints)vusdotq_s32((int32x4_t)acc, (uint8x16_t)w, (int8x16_t)x);
#else
  for (int shift = 0; shift < 32; shift += 8) {
    acc += (Ints)(w >> shift & 255u) * ((Ints)((Words)x << (24 - shift)) >> 24);
  }
  return acc;
#endif
}

template <int Bits>
struct Sums {
  static constexpr int kBytes = 1;
  static constexpr int kAdditions = 0;
  Ints total;

  static Ints load(const int8_t* x) { return broadcast_word(x); }
  void add(Words w, Ints x) { total = add_products(total, w, x); }
  void finish() {}
};

#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
// acc + the sum of the four products of each lane. All bytes are signed.
inline Ints add_signed_products(Ints acc, Ints w, Ints x) {
  return (Ints)vdotq_s32((int32x4_t)acc, (int8x16_t)w, (int8x16_t)x);
}

template <>
inline void Sums<4>::add(Words w, Ints x) {
  total = add_signed_products(total, (Ints)w, x);
}

// The instruction multiplies signed bytes: w - 128, and 128 times the integers of x.
template <>
struct Sums<8> {
  struct Operand {
    Ints integers;
    Ints products; // with 128
  };
  static constexpr int kBytes = 1;
  static constexpr int kAdditions = 0;
  Ints total;

  static Operand load(const int8_t* x) {
    const Ints integers = broadcast_word(x);
    return {integers, add_signed_products(Ints{}, Ints{} + 0x40404040, integers) * 2};
  }
  void add(Words w, const Operand& x) {
    total = add_signed_products(total + x.products, (Ints)(w ^ 0x80808080u), x.integers);
  }
  void finish() {}
};
#endif
#endif

// -- activations ----------------------------------------------------------------------------------

// The elements of x that a vector holds, from place i on, if they are in the order of the integers of the matrix. In a
// word of integers of 4 bits, these are the even ones and then the odd ones.
template <int Bits>
inline Floats load_in_integer_order(const float* x, int i) {
  const Floats v = load<Floats>(x + i);
  if constexpr (Bits == 8 && Sums<8>::kBytes == 1) {
    return v;
  }
#if defined(__AVX512F__)
  return Bits == 8 ? __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)
                   : __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
#elif defined(__aarch64__)
  const Floats other = load<Floats>(x + (i ^ kLanes)); // the other half of the eight integers of a word
  return i % 8 == 0 ? __builtin_shufflevector(v, other, 0, 2, 4, 6) : __builtin_shufflevector(other, v, 1, 3, 5, 7);
#else
  return Bits == 8 ? __builtin_shufflevector(v, v, 0, 2, 1, 3, 4, 6, 5, 7)
                   : __builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7);
#endif
}

// Rounds to the nearest integer, ties to even. |x| is at most 2^23.
inline Ints rounded(Floats x) {
  const Ints sign = (Ints)x >> 31; // -1 or 0
  const Ints magnitude = (Ints)((Floats)((Ints)x & 0x7fffffff) + 0x1p23f) - 0x4b000000;
  return (magnitude ^ sign) - sign;
}

// Writes kLanes integers, which fit in `Bytes` bytes.
template <int Bytes>
inline void store_integers(Ints x, int8_t* to) {
  if constexpr (Bytes == 2) {
    typedef int16_t Integers __attribute__((vector_size(kLanes * 2)));
    const Integers integers = __builtin_convertvector(x, Integers);
    __builtin_memcpy(to, &integers, sizeof(integers));
  } else {
#if defined(__aarch64__)
    const int8x8_t integers = vreinterpret_s8_s16(vmovn_s32((int32x4_t)x));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(vuzp1_s8(integers, integers)), 0);
    __builtin_memcpy(to, &four, sizeof(four));
#else
    typedef int8_t Integers __attribute__((vector_size(kLanes)));
#if defined(__AVX512F__)
    const Integers integers = (Integers)_mm512_cvtepi32_epi8((__m512i)x);
#else
    const Integers integers = __builtin_convertvector(x, Integers);
#endif
    __builtin_memcpy(to, &integers, sizeof(integers));
#endif
  }
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

inline int32_t sum_of_lanes(Ints x) {
  int32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += x[lane];
  }
  return total;
}

// Writes the digits of q: the lowest one to `to`, and the others at the distance `stride`.
template <int Digits, int Bytes>
inline void store_digits(Ints q, int8_t* to, ptrdiff_t stride) {
  for (int d = 0; d < Digits; ++d, to += stride) {
    const Ints digit = d == Digits - 1 ? q : q << 24 >> 24;
    store_integers<Bytes>(digit, to);
    q = (q - digit) >> 8;
  }
}

// The exponent e of a positive normal number in [2^e, 2^(e + 1)), or 128 for infinity. power_of_two() is the inverse.
inline int exponent_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return static_cast<int>(bits >> 23) - 127;
}

inline float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

// The scale of a group, and what its values are multiplied by. A group of zeros has 0 for both.
struct GroupScale {
  float scale;
  float inverse;
};

template <int Digits>
inline GroupScale group_scale(float largest) {
  if (largest < kSmallestGroupMaximum) {
    return {0, 0};
  }
  if constexpr (Digits == 1) {
    return {largest / 127, 127 / largest};
  }
  // A power of two, so that nothing is rounded but the integers. Three digits reach 127 * 65536 + 127 * 256 + 127 =
  // 0x7f7f7f, and two reach 0x7f7f. The largest integer is between half of that and that.
  constexpr int bits = 8 * Digits - 1;
  constexpr float limit = Digits == 3 ? 0x7f7f7f : 0x7f7f;
  const int exponent = exponent_of(largest * ((1 << bits) / limit));
  return {power_of_two(exponent - bits + 1), power_of_two(bits - 1 - exponent)};
}

// Returns run(Constant<digits>{}). `digits` is 1, 2 or 3.
template <typename Run>
inline auto with_digits(int digits, Run&& run) {
  return digits == 1 ? run(Constant<1>{}) : digits == 2 ? run(Constant<2>{}) : run(Constant<3>{});
}

// Returns whether the digits represent all groups.
template <int Bits, int Digits>
bool round_row_of(const float* x, int groups, int size, const IntegerRows& rows, ptrdiff_t row) {
  constexpr int Bytes = Sums<Bits>::kBytes;
  int8_t* integers = rows.integers + row * Digits * rows.stride;
  float* scales = rows.scales + row * groups;
  float* sums = rows.sums + row * groups;
  bool fits = true;
  for (int g = 0; g < groups; ++g, x += size, integers += size * Bytes) {
    const uint32_t bits = largest_magnitude(x, size);
    float largest;
    __builtin_memcpy(&largest, &bits, sizeof(largest));
    const bool is_finite = bits < 0x7f800000u;
    const auto [scale, inverse] = is_finite ? group_scale<Digits>(largest) : GroupScale{__builtin_nanf(""), 0};
    Ints sum = {};
    for (int i = 0; i < size; i += kLanes) {
      const Floats values = is_finite ? load_in_integer_order<Bits>(x, i) : Floats{};
      const Ints q = rounded(values * inverse);
      sum += q;
      store_digits<Digits, Bytes>(q, integers + i * Bytes, rows.stride);
    }
    scales[g] = scale;
    sums[g] = scale * static_cast<float>(sum_of_lanes(sum));
    fits &= is_finite && (scale != 0 || largest == 0);
  }
  return fits;
}

int bytes_of_integer(int bits) { return bits == 4 ? Sums<4>::kBytes : Sums<8>::kBytes; }

bool round_row(const float* x, const QuantizedMatrix& q, const IntegerRows& rows, ptrdiff_t row) {
  const int groups = q.k / q.group_size;
  return with_digits(rows.digits, [&](auto digits) {
    constexpr int Digits = decltype(digits)::value;
    return q.bits == 4 ? round_row_of<4, Digits>(x, groups, q.group_size, rows, row)
                       : round_row_of<8, Digits>(x, groups, q.group_size, rows, row);
  });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
