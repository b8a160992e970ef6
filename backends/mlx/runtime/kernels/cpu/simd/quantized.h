// Matrices in MLX's affine packing, where value = scale * q + bias with integers q. Part of kernels.cpp.
//
// The values are computed in float32, in registers, and multiplied in the order of dot.h. A product with a quantized
// matrix therefore has the same bits as the product with the matrix that dequantize_rows() writes.
#pragma once

#include "panels.h"
#include "transposed.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// Returns a pointer to scales[first] ... scales[first + count - 1] as float32: into `scales` itself if they are
// float32, or else to `buffer`, to which this function converts them. Biases are read in the same way.
inline const float* as_float32(const void* scales, FloatType type, ptrdiff_t first, int count, float* buffer) {
  if (type == FloatType::float32) {
    return static_cast<const float*>(scales) + first;
  }
  widen(static_cast<const uint16_t*>(scales) + first, type, 1, buffer, count);
  return buffer;
}

// An unsigned integer type of `Size` bytes.
template <int Size>
struct BytesOf {
  typedef uint32_t Type;
};
template <>
struct BytesOf<2> {
  typedef uint16_t Type;
};
template <>
struct BytesOf<1> {
  typedef uint8_t Type;
};

// One group of a row. values() returns the values of kLanes consecutive integers, which begin at the byte `from`. They
// are in packed order: the order in which a vector holds the integers after they are unpacked.
template <int Bits>
class Group {
 public:
  Group() = default;
  Group(float scale, float bias) : scale_(broadcast(scale)), bias_(broadcast(bias)) {}

  Floats values(const char* from) const { return multiply_add(integers(from), scale_, bias_); }

 private:
  static Floats integers(const char* from) {
    if constexpr (Bits == 8) {
#if defined(__aarch64__)
      const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(load<uint32_t>(from)));
      return (Floats)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
#else
      typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
      const Bytes bytes = load<Bytes>(from);
#if defined(__AVX512F__)
      return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#elif defined(__AVX2__) // GCC would convert the elements below one by one
      return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)));
#else
      return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
#endif
    } else {
      Words shifts;
      for (int lane = 0; lane < kLanes; ++lane) {
        shifts[lane] = lane * Bits;
      }
      typedef typename BytesOf<kLanes * Bits / 8>::Type Word; // holds kLanes integers
      const Words words = (Words{} + static_cast<uint32_t>(load<Word>(from))) >> shifts;
      return __builtin_convertvector((Ints)(words & ((1u << Bits) - 1)), Floats);
    }
  }

  Floats scale_;
  Floats bias_;
};

// Changes packed order to the order of the integers in the matrix. packed_order() is the inverse. With AVX-512 and 4
// bits, the two orders differ.
template <int Bits>
inline Floats natural_order(Floats values) {
  return values;
}

template <int Bits>
inline Floats packed_order(Floats values) {
  return values;
}

#if defined(__AVX512F__)
// Integers of 2 or 4 bits are indices into a table of the group's 16 values. (With 2 bits the values repeat.)
template <int Bits>
class IndexedGroup {
 public:
  IndexedGroup() = default;
  IndexedGroup(float scale, float bias) : table_(multiply_add(integers(), broadcast(scale), broadcast(bias))) {}

  Floats values(const char* from) const {
    typedef long long Pairs __attribute__((vector_size(64)));
    const Words shifts = Bits == 4 ? Words{0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28}
                                   : Words{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Words words = Bits == 4 ? (Words)(load<long long>(from) - Pairs{}) : load<uint32_t>(from) - Words{};
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> shifts), (__m512)table_);
  }

 private:
  static Floats integers() {
    return Bits == 4 ? Floats{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
                     : Floats{0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
  }

  Floats table_; // the permutation reads only the low four bits of an index
};

template <>
class Group<4> : public IndexedGroup<4> {
  using IndexedGroup::IndexedGroup;
};

template <>
class Group<2> : public IndexedGroup<2> {
  using IndexedGroup::IndexedGroup;
};

// The lanes of an IndexedGroup<4> take their integers from two words in turn.
template <>
inline Floats natural_order<4>(Floats v) {
  return __builtin_shufflevector(v, v, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
}

template <>
inline Floats packed_order<4>(Floats v) {
  return __builtin_shufflevector(v, v, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
}
#endif

template <typename Run>
inline void call_with_bits(int bits, Run&& run) {
  bits == 2 ? run(Constant<2>{}) : bits == 4 ? run(Constant<4>{}) : run(Constant<8>{});
}

void arrange_for_quantized(const float* x, const QuantizedMatrix& q, float* arranged) {
  call_with_bits(q.bits, [&](auto bits) {
    for (int i = 0; i < q.k; i += kLanes) {
      store(packed_order<decltype(bits)::value>(load<Floats>(x + i)), arranged + i);
    }
  });
}

// Prefetches `size` bytes. They may lie past the end of the array, because a prefetch never faults.
inline void prefetch(const char* from, ptrdiff_t size) {
  for (ptrdiff_t i = 0; i < size; i += 64) {
    __builtin_prefetch(from + i);
    asm volatile(""); // without a side effect, GCC removes calls of this function
  }
}

// Computes the products of M rows of x with the rows row, row + between, ..., row + (R - 1) * between of the matrix.
template <int Bits, int M, int R>
void quantized_tile(
    const QuantizedMatrix& q, const float* x, ptrdiff_t ldx, int row, int between, float* y, ptrdiff_t ldy) {
  const int words = q.k * Bits / 32;
  const int groups = q.k / q.group_size;
  float buffers[2][R][kMaxGroups];
  const float* scales[R];
  const float* biases[R];
  const ptrdiff_t size = static_cast<ptrdiff_t>(groups) * (q.scale_type == FloatType::float32 ? 4 : 2);
  for (int j = 0; j < R; ++j) {
    const ptrdiff_t matrix_row = row + static_cast<ptrdiff_t>(j) * between;
    scales[j] = as_float32(q.scales, q.scale_type, matrix_row * groups, groups, buffers[0][j]);
    biases[j] = as_float32(q.biases, q.scale_type, matrix_row * groups, groups, buffers[1][j]);
    // Prefetches the scales and biases of the next row. They are too short for the hardware prefetcher.
    prefetch(static_cast<const char*>(q.scales) + (matrix_row + 1) * size, size);
    prefetch(static_cast<const char*>(q.biases) + (matrix_row + 1) * size, size);
  }
  const char* w = reinterpret_cast<const char*>(q.w + static_cast<ptrdiff_t>(row) * words);
  const ptrdiff_t row_distance = static_cast<ptrdiff_t>(words) * 4 * between; // in bytes
  Floats acc[M * R] = {};
  for (int g = 0; g < groups; ++g) {
    Group<Bits> group[R];
    repeat<R>([&](auto j) __attribute__((always_inline)) {
      group[j.value] = Group<Bits>(scales[j.value][g], biases[j.value][g]);
      prefetch(w + j.value * row_distance + kBandPrefetchDistance<R>);
    });
    for (int i = 0; i < q.group_size; i += kLanes, x += kLanes, w += kLanes * Bits / 8) {
      Floats values[R];
      repeat<R>([&](auto j) __attribute__((always_inline)) {
        values[j.value] = group[j.value].values(w + j.value * row_distance);
      });
      repeat<M>([&](auto r) __attribute__((always_inline)) {
        Floats elements = load<Floats>(x + r.value * ldx);
        if constexpr (R > 1) {
          keep_in_register(elements);
        }
        repeat<R>([&](auto j) __attribute__((always_inline)) {
          Floats& sum = acc[r.value * R + j.value];
          sum = multiply_add(elements, values[j.value], sum);
        });
      });
    }
  }
  Floats results[M * R];
  repeat<M * R>([&](auto i) __attribute__((always_inline)) { results[i.value] = natural_order<Bits>(acc[i.value]); });
  write_sums<M, R>(results, y + row, ldy, between);
}

// Returns the number of rows of the matrix, which are columns of the result, in a tile with `rows` rows of x.
// Integers of 8 bits take the fewest registers to unpack.
constexpr int quantized_columns(int rows, int bits) {
  if (kRegisters == 32) {
    return rows <= 4 ? 4 : 3;
  }
  return rows == 1 ? (bits == 8 ? 4 : 3) : rows <= 4 ? 2 : 1;
}

// With more rows of x, 16 registers hold sums for one row of the matrix only, and the tile loads x again for the next
// row. This takes longer than to unpack the matrix again if x is larger than the first-level cache.
constexpr int kSmallTileRows = kRegisters == 32 ? kMaxQuantizedRows : 4;
constexpr int64_t kCachedElements = 10 << 10;

void quantized_rows(const QuantizedMatrix& q, const float* arranged, ptrdiff_t ldx, int m, int first, int last,
    float* y, ptrdiff_t ldy) {
  call_with_bits(q.bits, [&](auto bits) {
    constexpr int Bits = decltype(bits)::value;
    if constexpr (kSmallTileRows < kMaxQuantizedRows) {
      if (m > kSmallTileRows && m * int64_t{q.k} > kCachedElements) {
        return for_bands<quantized_columns(kSmallTileRows, Bits)>(first, last, [&](auto bands, int row, int between) {
          for_row_tiles<kSmallTileRows>(m, [&](auto rows, int x_row) {
            quantized_tile<Bits, decltype(rows)::value, decltype(bands)::value>(
                q, arranged + x_row * ldx, ldx, row, between, y + x_row * ldy, ldy);
          });
        });
      }
    }
    call_with_constant<kMaxQuantizedRows>(m, [&](auto rows) {
      constexpr int M = decltype(rows)::value;
      for_bands<quantized_columns(M, Bits)>(first, last, [&](auto bands, int row, int between) {
        quantized_tile<Bits, M, decltype(bands)::value>(q, arranged, ldx, row, between, y, ldy);
      });
    });
  });
}

void dequantize_rows(const QuantizedMatrix& q, int first, int last, float* out, ptrdiff_t ldo) {
  const int words = q.k * q.bits / 32;
  const int groups = q.k / q.group_size;
  float scale_buffer[kMaxGroups];
  float bias_buffer[kMaxGroups];
  for (int row = first; row < last; ++row, out += ldo) {
    const ptrdiff_t first_group = static_cast<ptrdiff_t>(row) * groups;
    const float* scales = as_float32(q.scales, q.scale_type, first_group, groups, scale_buffer);
    const float* biases = as_float32(q.biases, q.scale_type, first_group, groups, bias_buffer);
    const char* w = reinterpret_cast<const char*>(q.w + static_cast<ptrdiff_t>(row) * words);
    call_with_bits(q.bits, [&](auto bits) {
      constexpr int Bits = decltype(bits)::value;
      float* to = out;
      for (int g = 0; g < groups; ++g) {
        const Group<Bits> group(scales[g], biases[g]);
        for (int i = 0; i < q.group_size; i += kLanes, to += kLanes, w += kLanes * Bits / 8) {
          store(natural_order<Bits>(group.values(w)), to);
        }
      }
    });
  }
}

// A vector of packed words has words of kLanes rows. It is unpacked to vectors of a panel, where rows lie side by side.
template <int Bits>
void pack_quantized_panel_of(const QuantizedMatrix& q, int first, int rows, float* panel) {
  constexpr int kPerWord = 32 / Bits;
  const int words = q.k * Bits / 32;
  const int groups = q.k / q.group_size;
  const SectionOffsets offsets(q.k);
  const int group_shift = __builtin_ctz(q.group_size);
  const ptrdiff_t first_group = static_cast<ptrdiff_t>(first) * groups;
  float columns[2][kMaxGroups * kLanes]; // for each group, the scales and the biases of the rows
  const ptrdiff_t offset = first_group * (q.scale_type == FloatType::float32 ? 4 : 2);
  const auto transpose_groups = [&](const void* of_groups, float* to) {
    transpose_rows(static_cast<const char*>(of_groups) + offset, q.scale_type, groups, rows, groups, to, kLanes);
  };
  transpose_groups(q.scales, columns[0]);
  transpose_groups(q.biases, columns[1]);
  const auto* w = reinterpret_cast<const float*>(q.w + static_cast<ptrdiff_t>(first) * words);
  for (int i = 0; i < words; i += kLanes) {
    Floats bits[kLanes];
    load_transposed<FloatType::float32>(w, words, rows, words, i, bits);
    for (int word = i; word < words && word < i + kLanes; ++word) {
      const int element = word * kPerWord;
      const ptrdiff_t group = element >> group_shift;
      const Floats scale = load<Floats>(columns[0] + group * kLanes), bias = load<Floats>(columns[1] + group * kLanes);
      const Words integers = (Words)bits[word - i];
      const ptrdiff_t* const sections = offsets.of + element % kLanes;
      float* const to = panel + element / kLanes * kStepStride;
      repeat<kPerWord>([&](auto j) __attribute__((always_inline)) {
        const Ints integer = (Ints)(integers >> j.value * Bits & ((1u << Bits) - 1));
        const Floats value = multiply_add(__builtin_convertvector(integer, Floats), scale, bias);
        store(value, to + sections[j.value % kLanes] + j.value / kLanes * kStepStride);
      });
    }
  }
}

void pack_quantized_panel(const QuantizedMatrix& q, int first, int rows, float* panel) {
  call_with_bits(q.bits, [&](auto bits) { pack_quantized_panel_of<decltype(bits)::value>(q, first, rows, panel); });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
