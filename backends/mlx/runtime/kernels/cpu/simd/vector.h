// Vectors of the instruction set that kernels.cpp is compiled for. Part of kernels.cpp.
#pragma once

#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// The lanes of a vector, and the number of registers for vectors.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 8, kRegisters = 16;
#endif
// The size of a tile of results that fits in the registers.
constexpr int kDotTileRows = kRegisters == 32 ? 6 : 4, kDotTileColumns = kRegisters == 32 ? 4 : 3;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2))); // the bits of float16 or bfloat16 values

template <auto Value>
struct Constant {
  static constexpr auto value = Value;

  constexpr operator decltype(Value)() const { return value; }
};

// Calls run(i) for the constants i = 0 ... Count - 1. Unlike a loop, it lets the compiler keep arrays that are indexed
// with i in registers.
template <int Count, int Index = 0, typename Run>
__attribute__((always_inline)) inline void repeat(Run&& run) {
  if constexpr (Index < Count) {
    run(Constant<Index>{});
    repeat<Count, Index + 1>(run);
  }
}

// Calls run(Constant<n>{}). n must be in [1, Max].
template <int Max, typename Run>
inline void call_with_constant(int n, Run&& run) {
  if constexpr (Max > 1) {
    if (n < Max) {
      return call_with_constant<Max - 1>(n, run);
    }
  }
  run(Constant<Max>{});
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// Calls run(Constant<type>{}). `type` is one of the listed types. Pairs, which are never listed last, are left out if
// the instruction set does not multiply them.
template <FloatType Type, FloatType... Others, typename Run>
inline void with_type(FloatType type, Run&& run) {
  if constexpr (sizeof...(Others) == 0) {
    return run(Constant<Type>{});
  } else {
    if constexpr (Type != FloatType::bfloat16_pair || kMultipliesPairs) {
      if (type == Type) {
        return run(Constant<Type>{});
      }
    }
    with_type<Others...>(type, run);
  }
}

// Divides m rows into tiles of at most Max rows, as equal as possible, and calls run(Constant<rows>{}, first) for each
// tile. `rows` is the number of rows of the tile, and `first` the index of its first row.
template <int Max, typename Run>
void for_row_tiles(int m, Run&& run) {
  const int64_t tiles = (int64_t{m} + Max - 1) / Max;
  for (int64_t i = 0; i < tiles; ++i) {
    const int first = static_cast<int>(m * i / tiles);
    const int rows = static_cast<int>(m * (i + 1) / tiles) - first;
    call_with_constant<Max>(rows, [&](auto constant) { run(constant, first); });
  }
}

// Divides rows or panels [begin, end) of a matrix into `Bands` bands of equal length: long pieces of memory. For each
// `row` of the first band, calls run(Constant<Bands>{}, row, length) to read row, row + length, row + 2 * length, ...:
// one of each band. Then calls run(Constant<1>{}, row, 1) for each row that is left. The processor prefetches several
// long pieces of memory faster than one. Prefetching starts slowly where a piece begins, so the bands are as long as
// possible.
template <int Bands, typename Run>
void for_bands(int begin, int end, Run&& run) {
  const int length = (end - begin) / Bands;
  for (int row = begin; row < begin + length; ++row) {
    run(Constant<Bands>{}, row, length);
  }
  for (int row = begin + length * Bands; row < end; ++row) {
    run(Constant<1>{}, row, 1);
  }
}

// A vector with x in all lanes. (Subtracting zero changes no number; adding it would change -0.)
inline Floats broadcast(float x) { return x - Floats{}; }

template <typename V, typename T>
inline V load(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

// Loads the first `count` lanes from memory. The other lanes are zeros.
template <typename V, typename T>
inline V load_partial(const T* from, int count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (V)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), from);
  }
#endif
  T lanes[sizeof(V) / sizeof(T)] = {};
  __builtin_memcpy(lanes, from, count * sizeof(T));
  return load<V>(lanes);
}

// Lets the compiler load x once, instead of once for each use.
inline void keep_in_register([[maybe_unused]] Floats& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

// Stores the first `count` lanes.
inline void store_partial(Floats v, float* to, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), (__m512)v);
#else
  __builtin_memcpy(to, &v, count * sizeof(float));
#endif
}

// The first `count` lanes in memory, of at most kLanes.
inline Floats load_lanes(const float* from, int count) {
  return count == kLanes ? load<Floats>(from) : load_partial<Floats>(from, count);
}

inline void store(Floats v, float* to) { __builtin_memcpy(to, &v, sizeof(v)); }

inline void store_lanes(Floats v, float* to, int count) {
  count == kLanes ? store(v, to) : store_partial(v, to, count);
}

constexpr ptrdiff_t kPrefetchDistance = 16 << 10; // bytes; hides the latency of memory

// The number of rows of `bytes` bytes by which a kernel prefetches ahead.
constexpr ptrdiff_t rows_to_prefetch(ptrdiff_t bytes, ptrdiff_t distance = kPrefetchDistance) {
  return bytes > 0 ? distance / bytes : 0;
}

// How many bytes ahead a kernel prefetches in each of `Bands` bands: 64 vectors in all bands together.
template <int Bands>
constexpr ptrdiff_t kBandPrefetchDistance = 64 * kLanes * 4 / Bands;

// Prefetches to the second-level cache: the first-level cache has too few miss buffers to hide the latency of memory.
// Never faults, even past the end of an array.
inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 2); }

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  typedef Indices<I...> Type;
};

// Exchanges elements of two vectors, for a transposition: the elements of a whose index has the bit `Distance`, and the
// elements of b whose index lacks this bit.
template <int Distance, int... I>
inline void exchange(Floats& a, Floats& b, Indices<I...>) {
  const Floats low = __builtin_shufflevector(a, b, (I & Distance ? I - Distance + kLanes : I)...);
  b = __builtin_shufflevector(a, b, (I & Distance ? I + kLanes : I + Distance)...);
  a = low;
}

// Transposes the square matrix with the rows v[0] ... v[kLanes - 1]. Always inlined, so that the rows are in registers.
template <int Distance = kLanes / 2>
__attribute__((always_inline)) inline void transpose(Floats* v) {
  typedef typename MakeIndices<kLanes>::Type All;
  for (int i = 0; i < kLanes; ++i) {
    if ((i & Distance) == 0) {
      exchange<Distance>(v[i], v[i + Distance], All{});
    }
  }
  if constexpr (Distance > 1) {
    transpose<Distance / 2>(v);
  }
}

// Adds the halves of blocks of lanes. a and b consist of blocks of `Block` lanes. Lane i of the upper half of each
// block is added to lane i of its lower half. The result has the blocks of a and then those of b, half as long.
template <int Block, int... I>
inline Floats fold(Floats a, Floats b, Indices<I...>) {
  constexpr int half = Block / 2;
  return __builtin_shufflevector(a, b, (I / half * Block + I % half)...) +
      __builtin_shufflevector(a, b, (I / half * Block + half + I % half)...);
}

// Returns a vector with `Count` sums: lane i has the sum of all lanes of v[i]. Count is a power of two. If it is less
// than kLanes, the sums repeat. In each sum, lane i + kLanes / 2 is added to lane i, then lane i + kLanes / 4, and so
// on. This order is the same for each vector and each Count.
template <int Count, int Block = kLanes>
inline Floats sums(const Floats* v) {
  typedef typename MakeIndices<kLanes>::Type All;
  if constexpr (Block == 1) {
    return v[0];
  } else if constexpr (Count == 1) {
    const Floats folded = fold<Block>(v[0], v[0], All{});
    return sums<1, Block / 2>(&folded);
  } else {
    Floats folded[Count / 2];
    for (int i = 0; i < Count / 2; ++i) {
      folded[i] = fold<Block>(v[2 * i], v[2 * i + 1], All{});
    }
    return sums<Count / 2, Block / 2>(folded);
  }
}

// The sum of all lanes, in the order of sums().
inline float sum(Floats v) { return sums<1>(&v)[0]; }

// Extends each element with zeros to 32 bits. GCC 12 would convert the lower and the upper lanes separately.
inline Words to_words(Halves x) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#elif defined(__aarch64__)
  return (Words)vmovl_u16((uint16x4_t)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}

// Converts the bits of float16 or bfloat16 values to float32. Exact, also for subnormal numbers, infinities and NaNs.
template <FloatType Type>
inline Floats to_float(Halves x) {
  if constexpr (Type == FloatType::bfloat16) {
    return (Floats)(to_words(x) << 16);
  }
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16((float16x4_t)x);
#else
  const Words bits = to_words(x);
  const Words magnitude = (bits & 0x7fffu) << 13;
  const Words finite = (Words)((Floats)magnitude * 0x1p112f); // changes the exponent bias from 15 to 127
  const Words value = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000u : finite;
  return (Floats)(value | (bits & 0x8000u) << 16);
#endif
}

// a * b + c, rounded once.
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  }
  return c;
#endif
}

// a * b + c, rounded once if the instruction set has such an instruction. The compiler itself fuses nothing, because
// kernels.cpp is compiled with -ffp-contract=off: it could fuse an expression in one kernel and not in another.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__FMA__) || defined(__aarch64__)
  return fused_multiply_add(a, b, c);
#else
  return a * b + c;
#endif
}

// multiply_add() for elements of `Type`. For bfloat16 pairs, each lane gets the sum of the products of both elements.
template <FloatType Type>
inline Floats multiply_add(Floats x, Floats w, Floats acc) {
#if defined(__AVX512BF16__)
  if constexpr (Type == FloatType::bfloat16_pair) {
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  if constexpr (Type == FloatType::bfloat16_pair) {
    return (Floats)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)x, (bfloat16x8_t)w);
  }
#endif
  return multiply_add(x, w, acc);
}

// Rounds to float16 or bfloat16, to the nearest value, ties to even. The result is in the low half of each lane.
template <FloatType Type>
inline Words to_half(Floats x) {
  const Words bits = (Words)x;
  const Words magnitude = bits & 0x7fffffffu;
  if constexpr (Type == FloatType::bfloat16) {
    const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return magnitude > 0x7f800000u ? bits >> 16 | 0x40u : rounded;
  }
  const Words normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  const Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000u; // the addition rounds to 2^-24
  const Words large = magnitude > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;
  const Words finite = magnitude < (113u << 23) ? subnormal : normal;
  return (magnitude >= (143u << 23) ? large : finite) | (bits >> 16 & 0x8000u);
}

// The low halves of the lanes.
inline Halves low_halves(Words x) {
#if defined(__AVX512F__)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__aarch64__)
  return (Halves)vmovn_u32((uint32x4_t)x);
#else
  return __builtin_convertvector(x, Halves);
#endif
}

// Rounds like to_half(), apart from the bits of a NaN.
template <FloatType Type>
inline Halves to_halves(Floats x) {
#if defined(__AVX512BF16__)
  if constexpr (Type == FloatType::bfloat16) {
    constexpr int kSubnormal = 0x20;
    if (_mm512_fpclass_ps_mask((__m512)x, kSubnormal) == 0) [[likely]] { // the conversion turns them into zeros
      return (Halves)_mm512_cvtneps_pbh((__m512)x);
    }
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  if constexpr (Type == FloatType::bfloat16) {
    return (Halves)vcvt_bf16_f32((float32x4_t)x);
  }
#endif
  if constexpr (Type == FloatType::float16) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    return (Halves)vcvt_f16_f32((float32x4_t)x);
#endif
  }
  return low_halves(to_half<Type>(x));
}

// Loads elements of `Type` as float32, and bfloat16 pairs as they are. Stores float32 as elements of `Type`, rounded
// like to_half(). load_first() loads `count` elements and sets the other lanes to 0; store_first() stores `count`
// lanes.
template <FloatType Type>
struct Elements {
  typedef uint16_t Element;
  static Floats load_all(const Element* from) { return to_float<Type>(load<Halves>(from)); }
  static Floats load_first(const Element* from, int count) { return to_float<Type>(load_partial<Halves>(from, count)); }
  static void store_all(Floats v, Element* to) {
    const Halves halves = to_halves<Type>(v);
    __builtin_memcpy(to, &halves, sizeof(halves));
  }
  static void store_first(Floats v, Element* to, int count) {
    const Halves halves = to_halves<Type>(v);
    __builtin_memcpy(to, &halves, count * sizeof(Element));
  }
};

template <>
struct Elements<FloatType::float32> {
  typedef float Element;
  static Floats load_all(const Element* from) { return load<Floats>(from); }
  static Floats load_first(const Element* from, int count) { return load_partial<Floats>(from, count); }
  static void store_all(Floats v, Element* to) { store(v, to); }
  static void store_first(Floats v, Element* to, int count) { store_partial(v, to, count); }
};

template <>
struct Elements<FloatType::bfloat16_pair> : Elements<FloatType::float32> {};

// Calls run(Elements<type>{}) for float32, float16 or bfloat16.
template <typename Run>
inline void with_elements(FloatType type, Run&& run) {
  with_type<FloatType::bfloat16, FloatType::float16, FloatType::float32>(
      type, [&](auto constant) { run(Elements<decltype(constant)::value>{}); });
}

// to[i] = function(from[i]) for i < count. `From` and `To` are kinds of Elements.
template <typename From, typename To, typename Function>
inline void map_elements(
    const typename From::Element* from, typename To::Element* to, ptrdiff_t count, const Function& function) {
  ptrdiff_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    To::store_all(function(From::load_all(from + i)), to + i);
  }
  if (const int left = static_cast<int>(count - i); left > 0) {
    To::store_first(function(From::load_first(from + i, left)), to + i, left);
  }
}

void narrow(const float* x, FloatType type, uint16_t* y, ptrdiff_t count) {
  with_type<FloatType::bfloat16, FloatType::float16>(type, [&](auto constant) {
    map_elements<Elements<FloatType::float32>, Elements<decltype(constant)::value>>(
        x, y, count, [](Floats v) { return v; });
  });
}

template <FloatType Type>
void widen_from(const uint16_t* x, ptrdiff_t stride, float* y, ptrdiff_t count) {
  ptrdiff_t i = 0;
  for (; stride == 1 && i + kLanes <= count; i += kLanes) {
    store(Elements<Type>::load_all(x + i), y + i);
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
