// Products of few rows of activations in 8 bits with a quantized matrix, as int8.h defines them. Part of kernels.cpp.
//
// Vectors of a row of the matrix are multiplied as they are in memory, without panels. Each block of four lanes, a
// part, belongs to one group of the matrix. The sums of the parts of kLanes rows are then transposed, so that each lane
// has a column of the result.
#pragma once

#include "int8_panels.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kParts = kLanes / 4;  // parts of a vector, of 16 bytes each

// The sums of the four lanes of each block: lane 4 i + j of the result has the sum of block i of v[j].
inline Ints sums_of_blocks(const Ints* v) {
  typedef typename MakeIndices<kLanes>::Type All;
  const Ints first = interleave<1, 0>(v[0], v[1], All{}) + interleave<1, 2>(v[0], v[1], All{});
  const Ints second = interleave<1, 0>(v[2], v[3], All{}) + interleave<1, 2>(v[2], v[3], All{});
  return interleave<2, 0>(first, second, All{}) + interleave<2, 2>(first, second, All{});
}

// Exchanges the blocks of four lanes of kParts vectors: block i of v[j] becomes block j of v[i].
inline void transpose_blocks(Ints* v) {
  typedef typename MakeIndices<kLanes>::Type All;
  for (int distance = kParts / 2; distance > 0; distance /= 2) {
    for (int i = 0; i < kParts; ++i) {
      if ((i & distance) == 0) {
        Floats a = (Floats)v[i];
        Floats b = (Floats)v[i + distance];
        distance == 2 ? exchange<8 % kLanes>(a, b, All{}) : exchange<4>(a, b, All{});
        v[i] = (Ints)a;
        v[i + distance] = (Ints)b;
      }
    }
  }
}

// Every second lane of a and b, from lane `First` on.
template <int First, int... I>
inline Ints every_second(Ints a, Ints b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (2 * I + First)...);
}

// The integers of x that belong to one vector of a row of the matrix.
template <int Bits>
struct Int8Vector;

template <>
struct Int8Vector<8> {
  explicit Int8Vector(const int8_t* x) : bytes(four_bytes(load<Ints>(x))) {}
  Ints times(Words w) const {
    return add_products(Ints{}, w, bytes);
  }
  FourBytes bytes;
};

template <>
struct Int8Vector<4> {
  explicit Int8Vector(const int8_t* x) : Int8Vector(load<Ints>(x), load<Ints>(x + 4 * kLanes)) {}
  Ints times(Words w) const {
    return add_products(add_products(Ints{}, w & 0x0f0f0f0fu, even), w >> 4 & 0x0f0f0f0fu, odd);
  }
  FourBytes even;
  FourBytes odd;

 private:
  typedef typename MakeIndices<kLanes>::Type All;
  Int8Vector(Ints a, Ints b)
      : even(four_bytes(every_second<0>(a, b, All{}))), odd(four_bytes(every_second<1>(a, b, All{}))) {}
};

// Computes up to kLanes columns of M rows of y. A group of the matrix has PartsPerGroup parts.
template <int Bits, int PartsPerGroup, int M>
void dot_columns(const QuantizedMatrix& q, const Int8Rows& x, int first, int columns, float* y, ptrdiff_t ldy) {
  alignas(64) float scales[kChunkGroups * kLanes];
  alignas(64) float biases[kChunkGroups * kLanes];
  constexpr int Length = kLanes * 32 / Bits;  // columns of the matrix in a vector
  const ptrdiff_t stride = static_cast<ptrdiff_t>(q.k) * Bits / 8;
  const int last = columns - 1;
  const char* w[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    w[i] = reinterpret_cast<const char*>(q.w) + (first + (i < last ? i : last)) * stride;
  }
  prefetch_scales(q, first + kLanes);
  Floats acc[M] = {};
  Ints dots[M] = {};
  int parts = 0;  // how many parts of the present group `dots` includes
  int group = 0;  // the index of the present group in `scales` and `biases`
  for (int column = 0; column < q.k; column += Length) {
    if (column % kInt8Chunk == 0) {
      group = 0;
      const int next = column / q.group_size;
      const int count = x.groups - next < kInt8Chunk / q.group_size ? x.groups - next : kInt8Chunk / q.group_size;
      const ptrdiff_t index = static_cast<ptrdiff_t>(first) * x.groups + next;
      transpose_scales(q.scales, q.scale_type, index, x.groups, last, count, scales);
      transpose_scales(q.biases, q.scale_type, index, x.groups, last, count, biases);
    }
    Ints sums[M][kParts];
    repeat<M>([&](auto r) __attribute__((always_inline)) {
      const Int8Vector<Bits> integers(x.integers + r.value * x.stride + column);
      repeat<kParts>([&](auto part) __attribute__((always_inline)) {
        Ints products[4];
        repeat<4>([&](auto i) __attribute__((always_inline)) {
          const char* from = w[part.value * 4 + i.value] + column * Bits / 8;
          if constexpr (r.value == 0) {
            __builtin_prefetch(from + kLanes * stride);
          }
          products[i.value] = integers.times(load<Words>(from));
        });
        sums[r.value][part.value] = sums_of_blocks(products);
      });
      transpose_blocks(sums[r.value]);
    });
    repeat<kParts>([&](auto part) __attribute__((always_inline)) {
      ++parts;
      repeat<M>([&](auto r) __attribute__((always_inline)) { dots[r.value] += sums[r.value][part.value]; });
      if (PartsPerGroup == 1 || parts == PartsPerGroup) {
        parts = 0;
        const Floats scale = load<Floats>(scales + group * kLanes);
        const Floats bias = load<Floats>(biases + group * kLanes);
        const int g = column / kInt8Chunk * (kInt8Chunk / q.group_size) + group;
        repeat<M>([&](auto r) __attribute__((always_inline)) {
          const ptrdiff_t index = r.value * static_cast<ptrdiff_t>(x.groups) + g;
          const Floats factor = scale * broadcast(x.scales[index]);
          acc[r.value] = fused_multiply_add(factor, __builtin_convertvector(dots[r.value], Floats), acc[r.value]);
          acc[r.value] = fused_multiply_add(bias, broadcast(x.sums[index]), acc[r.value]);
          dots[r.value] = Ints{};
        });
        ++group;
      }
    });
  }
  for (int r = 0; r < M; ++r) {
    store_partial(acc[r], y + r * ldy + first, columns);
  }
}

template <int Bits, int M>
void multiply_few_int8(const QuantizedMatrix& q, const Int8Rows& x, int first, int last, float* y, ptrdiff_t ldy) {
  const auto run = [&](auto parts) {
    for (int column = first; column < last; column += kLanes) {
      const int columns = last - column < kLanes ? last - column : kLanes;
      dot_columns<Bits, decltype(parts)::value, M>(q, x, column, columns, y, ldy);
    }
  };
  constexpr int Smallest = kMinGroupSize * Bits / 128;
  q.group_size == 32 ? run(Constant<Smallest>{})
                     : q.group_size == 64 ? run(Constant<2 * Smallest>{}) : run(Constant<4 * Smallest>{});
}

// The most rows of x for which multiply_few_int8() is faster than panels.
constexpr int kFewInt8Rows = 4;

void multiply_int8(
    const QuantizedMatrix& q, const Int8Rows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  const bool is_few = m <= kFewInt8Rows && q.k * q.bits % (32 * kLanes) == 0;
  const auto run = [&](auto bits) {
    constexpr int Bits = decltype(bits)::value;
    if (!is_few) {
      return multiply_many_int8<Bits>(q, x, m, first, last, y, ldy);
    }
    call_with_constant<kFewInt8Rows>(m, [&](auto rows) {
      multiply_few_int8<Bits, decltype(rows)::value>(q, x, first, last, y, ldy);
    });
  };
  q.bits == 4 ? run(Constant<4>{}) : run(Constant<8>{});
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
