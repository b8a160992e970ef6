// Matrices in MLX's affine packing, where value = scale * q + bias with integers q. Part of kernels.cpp.
//
// kLanes packed 32-bit words of a row form a block. Shifting all words of a block by i * bits unpacks the elements i,
// i + per_word, i + 2 * per_word, ... of the block, where per_word is the number of elements in a word. `arrange` puts
// the elements of x in the same order. The dot product of x with a row is the sum of scale * sum(q * x) over all groups
// of the row, plus the sum of bias * sum(x) over all groups.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// The number of blocks in a row, counting an incomplete one.
inline int blocks_of(const QuantizedMatrix& q) {
  const int words = q.k * q.bits / 32;
  return (words + kLanes - 1) / kLanes;
}

size_t arranged_size(const QuantizedMatrix& q) {
  return static_cast<size_t>(blocks_of(q)) * kLanes * (32 / q.bits);
}

void arrange(const float* x, const QuantizedMatrix& q, float* arranged, float* sums) {
  const int per_word = 32 / q.bits;
  const int block = kLanes * per_word;
  const int blocks = blocks_of(q);
  for (int b = 0; b < blocks; ++b) {
    float* to = arranged + static_cast<ptrdiff_t>(b) * block;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int at = b * block + lane * per_word;
      for (int i = 0; i < per_word; ++i) {
        to[i * kLanes + lane] = at + i < q.k ? x[at + i] : 0;
      }
    }
  }
  for (int g = 0; g < q.k / q.group_size; ++g) {
    float total = 0;
    for (int i = 0; i < q.group_size; ++i) {
      total += x[g * q.group_size + i];
    }
    sums[g] = total;
  }
}

// Returns a pointer to scales[first] ... scales[first + count - 1] as float32: into `scales` itself if they are
// float32, or else to `buffer`, to which this function converts them. Biases are read in the same way.
inline const float* as_float32(const void* scales, FloatType type, ptrdiff_t first, int count, float* buffer) {
  if (type == FloatType::float32) {
    return static_cast<const float*>(scales) + first;
  }
  widen(static_cast<const uint16_t*>(scales) + first, type, 1, buffer, count);
  return buffer;
}

// Returns, as floats, the integers of `Bits` bits that start at bit `shift` of each word.
template <int Bits>
inline Floats unpack(Words words, int shift) {
#if defined(__AVX512F__)
  if constexpr (Bits == 4) {  // the permutation reads only the low four bits of an index
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> shift), table);
  }
#endif
  return __builtin_convertvector((Ints)((words >> shift) & ((1u << Bits) - 1)), Floats);
}

// Returns, for each word of a block, the scale of the group that the word belongs to. `from` points to the scale of the
// first word. From there to the end of the row there are `left` scales.
template <int WordsPerGroup>
inline Floats broadcast_scales(const float* from, int left) {
  if constexpr (WordsPerGroup >= kLanes) {
    return Floats{} + from[0];
  } else {
    constexpr int groups = kLanes / WordsPerGroup;
    const int available = left < groups ? left : groups;
#if defined(__AVX512F__)
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512 scales = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << available) - 1), from);
    return (Floats)_mm512_permutexvar_ps((__m512i)(lanes / WordsPerGroup), scales);
#else
    Floats result = {};
    for (int g = 0; g < groups; ++g) {
      for (int i = 0; i < WordsPerGroup; ++i) {
        result[g * WordsPerGroup + i] = g < available ? from[g] : 0;
      }
    }
    return result;
#endif
  }
}

// Prefetches `size` bytes. They may lie past the end of the array, because a prefetch never faults.
inline void prefetch(const char* from, ptrdiff_t size) {
  for (ptrdiff_t i = 0; i < size; i += 64) {
    __builtin_prefetch(from + i);
  }
}

// Computes the products of R rows of the matrix, from `row` on, with M rows of x.
template <int Bits, int WordsPerGroup, int M, int R>
void quantized_tile(
    const QuantizedMatrix& q, const float* arranged, const float* sums, int row, float* y, ptrdiff_t ldy) {
  constexpr int per_word = 32 / Bits;
  constexpr int block = kLanes * per_word;
  const int words = q.k / per_word;
  const int groups = words / WordsPerGroup;
  const size_t stride = arranged_size(q);
  float buffers[R][kMaxGroups];
  const float* scales[R];
  for (int j = 0; j < R; ++j) {
    scales[j] = as_float32(q.scales, q.scale_type, static_cast<ptrdiff_t>(row + j) * groups, groups, buffers[j]);
  }
  // The tile reads weights, scales and biases: three pieces of memory that are too short for the hardware prefetcher.
  // So the scales and biases of the next tile are prefetched here, and its weights below. With more than one row of x
  // this does not help, because the arithmetic takes longer than reading the memory.
  if constexpr (M == 1) {
    const ptrdiff_t size = static_cast<ptrdiff_t>(groups) * (q.scale_type == FloatType::float32 ? 4 : 2);
    prefetch(static_cast<const char*>(q.scales) + (row + R) * size, R * size);
    prefetch(static_cast<const char*>(q.biases) + (row + R) * size, R * size);
  }
  const uint32_t* w = q.w + static_cast<ptrdiff_t>(row) * words;
  Floats acc[M][R] = {};
  for (int at = 0, b = 0; at < words; at += kLanes, ++b) {
    Words packed[R];
    for (int j = 0; j < R; ++j) {
      const uint32_t* from = w + static_cast<ptrdiff_t>(j) * words + at;
      if constexpr (M == 1) {
        __builtin_prefetch(from + R * words);
      }
      packed[j] = at + kLanes <= words ? load<Words>(from) : load_partial<Words>(from, words - at);
    }
    Floats part[M][R] = {};
    for (int i = 0; i < per_word; ++i) {
      Floats values[R];
      for (int j = 0; j < R; ++j) {
        values[j] = unpack<Bits>(packed[j], i * Bits);
      }
      for (int r = 0; r < M; ++r) {
        const Floats x = load<Floats>(arranged + r * stride + static_cast<ptrdiff_t>(b) * block + i * kLanes);
        for (int j = 0; j < R; ++j) {
          part[r][j] += x * values[j];
        }
      }
    }
    const int group = at / WordsPerGroup;
    for (int j = 0; j < R; ++j) {
      const Floats scale = broadcast_scales<WordsPerGroup>(scales[j] + group, groups - group);
      for (int r = 0; r < M; ++r) {
        acc[r][j] += part[r][j] * scale;
      }
    }
  }
  const int whole = groups / kLanes * kLanes;
  for (int j = 0; j < R; ++j) {
    const float* biases =
        as_float32(q.biases, q.scale_type, static_cast<ptrdiff_t>(row + j) * groups, groups, buffers[j]);
    for (int r = 0; r < M; ++r) {
      const float* x_sums = sums + r * groups;
      for (int g = 0; g < whole; g += kLanes) {
        acc[r][j] += load<Floats>(biases + g) * load<Floats>(x_sums + g);
      }
      float total = sum(acc[r][j]);
      for (int g = whole; g < groups; ++g) {
        total += biases[g] * x_sums[g];
      }
      y[r * ldy + row + j] = total;
    }
  }
}

template <int Bits, int WordsPerGroup, int M>
void quantized_rows_for_m(
    const QuantizedMatrix& q, const float* arranged, const float* sums, int first, int last, float* y, ptrdiff_t ldy) {
  constexpr int R = M == 1 ? 4 : 2;
  int j = first;
  for (; j + R <= last; j += R) {
    quantized_tile<Bits, WordsPerGroup, M, R>(q, arranged, sums, j, y, ldy);
  }
  for (; j < last; ++j) {
    quantized_tile<Bits, WordsPerGroup, M, 1>(q, arranged, sums, j, y, ldy);
  }
}

template <int Bits, int WordsPerGroup>
void quantized_rows_for_group(
    const QuantizedMatrix& q, const float* arranged, const float* sums, int m, int first, int last, float* y,
    ptrdiff_t ldy) {
  switch (m) {
    case 1:
      return quantized_rows_for_m<Bits, WordsPerGroup, 1>(q, arranged, sums, first, last, y, ldy);
    case 2:
      return quantized_rows_for_m<Bits, WordsPerGroup, 2>(q, arranged, sums, first, last, y, ldy);
    case 3:
      return quantized_rows_for_m<Bits, WordsPerGroup, 3>(q, arranged, sums, first, last, y, ldy);
    default:
      return quantized_rows_for_m<Bits, WordsPerGroup, 4>(q, arranged, sums, first, last, y, ldy);
  }
}

template <int Bits>
void quantized_rows_for_bits(
    const QuantizedMatrix& q, const float* arranged, const float* sums, int m, int first, int last, float* y,
    ptrdiff_t ldy) {
  switch (q.group_size) {
    case 32:
      return quantized_rows_for_group<Bits, Bits>(q, arranged, sums, m, first, last, y, ldy);
    case 64:
      return quantized_rows_for_group<Bits, 2 * Bits>(q, arranged, sums, m, first, last, y, ldy);
    default:
      return quantized_rows_for_group<Bits, 4 * Bits>(q, arranged, sums, m, first, last, y, ldy);
  }
}

void quantized_rows(
    const QuantizedMatrix& q, const float* arranged, const float* sums, int m, int first, int last, float* y,
    ptrdiff_t ldy) {
  switch (q.bits) {
    case 2:
      return quantized_rows_for_bits<2>(q, arranged, sums, m, first, last, y, ldy);
    case 4:
      return quantized_rows_for_bits<4>(q, arranged, sums, m, first, last, y, ldy);
    default:
      return quantized_rows_for_bits<8>(q, arranged, sums, m, first, last, y, ldy);
  }
}

typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));

// Unpacks eight integers. If `bits` is 8, these are the integers of word[0] and word[1]. For fewer bits, these are the
// integers part * 8 ... part * 8 + 7 of word[0].
inline Eight unpack_eight(const uint32_t* word, int bits, int part) {
  const EightWords steps = {0, 1, 2, 3, 4, 5, 6, 7};
  const uint32_t mask = (1u << bits) - 1;
  if (bits == 8) {
    const EightWords both = {word[0], word[0], word[0], word[0], word[1], word[1], word[1], word[1]};
    return __builtin_convertvector((EightInts)((both >> ((steps & 3) * 8)) & mask), Eight);
  }
  const EightWords all = EightWords{} + (word[0] >> (part * 8 * bits));
  return __builtin_convertvector((EightInts)((all >> (steps * static_cast<uint32_t>(bits))) & mask), Eight);
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
    const uint32_t* w = q.w + static_cast<ptrdiff_t>(row) * words;
    for (int k = 0; k < q.k; k += 8) {
      const int bit = k * q.bits;
      const int group = k / q.group_size;
      const Eight x = unpack_eight(w + bit / 32, q.bits, bit % 32 / (8 * q.bits)) * scales[group] + biases[group];
      __builtin_memcpy(out + k, &x, sizeof(x));
    }
  }
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
