// Compiled once for each instruction set, into the namespace EXECUTORCH_MLX_ISA. It includes nothing
// that has inline functions of its own: the linker would keep one copy of them, for whichever
// instruction set.
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
typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
typedef int32_t EightInts __attribute__((vector_size(32)));

template <typename V, typename T>
inline V load(const T* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <typename V, typename T>
inline V load_some(const T* from, int count) {
  T some[sizeof(V) / sizeof(T)] = {};
  __builtin_memcpy(some, from, count * sizeof(T));
  return load<V>(some);
}

// Halves onto halves: one lane after the other would wait for every addition.
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

// -- rows of float32 or of half precision --------------------------------------------------------

typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

template <FloatType Type>
inline Floats wide(Halves x) {
  const Words bits = __builtin_convertvector(x, Words);
  if constexpr (Type == FloatType::bfloat16) {
    return (Floats)(bits << 16);
  }
  const Words magnitude = (bits & 0x7fffu) << 13;
  const Words finite = (Words)((Floats)magnitude * 0x1p112f);
  const Words value = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000u : finite;
  return (Floats)(value | (bits & 0x8000u) << 16);
}

template <FloatType Type>
struct Row {
  typedef uint16_t Number;
  static Floats lanes(const Number* from) {
    return wide<Type>(load<Halves>(from));
  }
  static Floats some(const Number* from, int count) {
    return wide<Type>(load_some<Halves>(from, count));
  }
};

template <>
struct Row<FloatType::float32> {
  typedef float Number;
  static Floats lanes(const Number* from) {
    return load<Floats>(from);
  }
  static Floats some(const Number* from, int count) {
    return load_some<Floats>(from, count);
  }
};

// One row of w after the other, as memory has them: of rows side by side each begins anew at its own
// page, which gets two thirds of what memory can give.
template <FloatType Type, int M>
void dot_row(
    const float* x, ptrdiff_t ldx, const typename Row<Type>::Number* w, int k, float alpha, float beta, float* y,
    ptrdiff_t ldy) {
  constexpr int U = M == 1 ? 4 : 2;  // sums that do not wait for each other
  Floats acc[M][U] = {};
  int i = 0;
  for (; i + U * kLanes <= k; i += U * kLanes) {
    for (int u = 0; u < U; ++u) {
      const int at = i + u * kLanes;
      const Floats row = Row<Type>::lanes(w + at);
      for (int r = 0; r < M; ++r) {
        acc[r][u] += load<Floats>(x + r * ldx + at) * row;
      }
    }
  }
  for (; i + kLanes <= k; i += kLanes) {
    const Floats row = Row<Type>::lanes(w + i);
    for (int r = 0; r < M; ++r) {
      acc[r][0] += load<Floats>(x + r * ldx + i) * row;
    }
  }
  if (i < k) {
    const Floats row = Row<Type>::some(w + i, k - i);
    for (int r = 0; r < M; ++r) {
      acc[r][0] += load_some<Floats>(x + r * ldx + i, k - i) * row;
    }
  }
  for (int r = 0; r < M; ++r) {
    Floats sums = acc[r][0];
    for (int u = 1; u < U; ++u) {
      sums += acc[r][u];
    }
    const float total = sum(sums);
    float& out = y[r * ldy];
    out = alpha * total + (beta == 0 ? 0 : beta * out);
  }
}

template <FloatType Type, int M>
void dot_rows_of(
    const float* x, ptrdiff_t ldx, const void* w, ptrdiff_t ldw, int n, int k, float alpha, float beta, float* y,
    ptrdiff_t ldy) {
  const auto* rows = static_cast<const typename Row<Type>::Number*>(w);
  for (int j = 0; j < n; ++j) {
    dot_row<Type, M>(x, ldx, rows + j * ldw, k, alpha, beta, y + j, ldy);
  }
}

template <FloatType Type>
void dot_rows_in(
    const float* x, ptrdiff_t ldx, int m, const void* w, ptrdiff_t ldw, int n, int k, float alpha, float beta,
    float* y, ptrdiff_t ldy) {
  switch (m) {
    case 1:
      return dot_rows_of<Type, 1>(x, ldx, w, ldw, n, k, alpha, beta, y, ldy);
    case 2:
      return dot_rows_of<Type, 2>(x, ldx, w, ldw, n, k, alpha, beta, y, ldy);
    case 3:
      return dot_rows_of<Type, 3>(x, ldx, w, ldw, n, k, alpha, beta, y, ldy);
    default:
      return dot_rows_of<Type, 4>(x, ldx, w, ldw, n, k, alpha, beta, y, ldy);
  }
}

void dot_rows(
    const float* x, ptrdiff_t ldx, int m, const void* w, FloatType type, ptrdiff_t ldw, int n, int k, float alpha,
    float beta, float* y, ptrdiff_t ldy) {
  switch (type) {
    case FloatType::float32:
      return dot_rows_in<FloatType::float32>(x, ldx, m, w, ldw, n, k, alpha, beta, y, ldy);
    case FloatType::float16:
      return dot_rows_in<FloatType::float16>(x, ldx, m, w, ldw, n, k, alpha, beta, y, ldy);
    case FloatType::bfloat16:
      return dot_rows_in<FloatType::bfloat16>(x, ldx, m, w, ldw, n, k, alpha, beta, y, ldy);
  }
}

// -- affine quantization ------------------------------------------------------------------------
//
// A vector holds kLanes words of the packing: one block. Its numbers at bit i * bits are the ones
// at positions i, i + per_word, ... of the block, so x is arranged that way beforehand. With
// w = scale * q + bias, the product is sum(scale * sum(q * x)) + sum(bias * sum(x)), group by group.

inline int blocks_of(const QuantizedRows& q) {
  const int words = q.k * q.bits / 32;
  return (words + kLanes - 1) / kLanes;
}

size_t arranged_size(const QuantizedRows& q) {
  return static_cast<size_t>(blocks_of(q)) * kLanes * (32 / q.bits);
}

void arrange(const float* x, const QuantizedRows& q, float* arranged, float* sums) {
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

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Scales are finite: infinities and NaN of float16 come out as large numbers.
inline float from_half(uint16_t bits) {
  const float magnitude = from_bits(static_cast<uint32_t>(bits & 0x7fff) << 13) * 0x1p112f;
  return bits & 0x8000 ? -magnitude : magnitude;
}

// `count` scales from number `first` on as float32: where they are, or in `room`.
inline const float* as_float32(const void* scales, FloatType type, ptrdiff_t first, int count, float* room) {
  if (type == FloatType::float32) {
    return static_cast<const float*>(scales) + first;
  }
  const uint16_t* from = static_cast<const uint16_t*>(scales) + first;
  for (int i = 0; i < count; ++i) {
    room[i] = type == FloatType::bfloat16 ? from_bits(static_cast<uint32_t>(from[i]) << 16) : from_half(from[i]);
  }
  return room;
}

// The numbers 0 to 2^Bits - 1 at bit `shift` of every lane.
template <int Bits>
inline Floats unpack(Words words, int shift) {
#if defined(__AVX512F__)
  if constexpr (Bits == 4) {  // the permutation looks at the low four bits only
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> shift), table);
  }
#endif
  return __builtin_convertvector((Ints)((words >> shift) & ((1u << Bits) - 1)), Floats);
}

// The scale of every lane of a block, the first of which is at `from`. `left` scales are there.
template <int PerGroup>
inline Floats spread(const float* from, int left) {
  if constexpr (PerGroup >= kLanes) {
    return Floats{} + from[0];
  } else {
    constexpr int groups = kLanes / PerGroup;
    const int there = left < groups ? left : groups;
#if defined(__AVX512F__)
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512 some = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << there) - 1), from);
    return (Floats)_mm512_permutexvar_ps((__m512i)(lanes / PerGroup), some);
#else
    Floats result = {};
    for (int g = 0; g < groups; ++g) {
      for (int i = 0; i < PerGroup; ++i) {
        result[g * PerGroup + i] = g < there ? from[g] : 0;
      }
    }
    return result;
#endif
  }
}

constexpr int kMostGroups = 1024;  // that fit the room for converted scales

// Has `size` bytes brought near. They may lie beyond what there is.
inline void prefetch(const char* from, ptrdiff_t size) {
  for (ptrdiff_t i = 0; i < size; i += 64) {
    __builtin_prefetch(from + i);
  }
}

// R rows of the matrix at `row`, M of x.
template <int Bits, int PerGroup, int M, int R>
void quantized_tile(
    const QuantizedRows& q, const float* arranged, const float* sums, int row, float* y, ptrdiff_t ldy) {
  constexpr int per_word = 32 / Bits;
  constexpr int block = kLanes * per_word;
  const int words = q.k / per_word;
  const int groups = words / PerGroup;
  const size_t stride = arranged_size(q);
  float room[R][kMostGroups];
  const float* scales[R];
  for (int j = 0; j < R; ++j) {
    scales[j] = as_float32(q.scales, q.scale_type, static_cast<ptrdiff_t>(row + j) * groups, groups, room[j]);
  }
  // A few rows of the matrix are three short pieces of memory, each of which would be waited for: those
  // of the next tile are asked for now. With more rows of x the arithmetic is longer than the wait.
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
      packed[j] = at + kLanes <= words ? load<Words>(from) : load_some<Words>(from, words - at);
    }
    Floats part[M][R] = {};
    for (int i = 0; i < per_word; ++i) {
      Floats numbers[R];
      for (int j = 0; j < R; ++j) {
        numbers[j] = unpack<Bits>(packed[j], i * Bits);
      }
      for (int r = 0; r < M; ++r) {
        const Floats x = load<Floats>(arranged + r * stride + static_cast<ptrdiff_t>(b) * block + i * kLanes);
        for (int j = 0; j < R; ++j) {
          part[r][j] += x * numbers[j];
        }
      }
    }
    const int group = at / PerGroup;
    for (int j = 0; j < R; ++j) {
      const Floats scale = spread<PerGroup>(scales[j] + group, groups - group);
      for (int r = 0; r < M; ++r) {
        acc[r][j] += part[r][j] * scale;
      }
    }
  }
  const int whole = groups / kLanes * kLanes;
  for (int j = 0; j < R; ++j) {
    const float* biases =
        as_float32(q.biases, q.scale_type, static_cast<ptrdiff_t>(row + j) * groups, groups, room[j]);
    for (int r = 0; r < M; ++r) {
      const float* of_x = sums + r * groups;
      for (int g = 0; g < whole; g += kLanes) {
        acc[r][j] += load<Floats>(biases + g) * load<Floats>(of_x + g);
      }
      float total = sum(acc[r][j]);
      for (int g = whole; g < groups; ++g) {
        total += biases[g] * of_x[g];
      }
      y[r * ldy + row + j] = total;
    }
  }
}

template <int Bits, int PerGroup, int M>
void quantized_rows_of(
    const QuantizedRows& q, const float* arranged, const float* sums, int first, int last, float* y, ptrdiff_t ldy) {
  constexpr int R = M == 1 ? 4 : 2;
  int j = first;
  for (; j + R <= last; j += R) {
    quantized_tile<Bits, PerGroup, M, R>(q, arranged, sums, j, y, ldy);
  }
  for (; j < last; ++j) {
    quantized_tile<Bits, PerGroup, M, 1>(q, arranged, sums, j, y, ldy);
  }
}

template <int Bits, int PerGroup>
void quantized_rows_by(
    const QuantizedRows& q, const float* arranged, const float* sums, int m, int first, int last, float* y,
    ptrdiff_t ldy) {
  switch (m) {
    case 1:
      return quantized_rows_of<Bits, PerGroup, 1>(q, arranged, sums, first, last, y, ldy);
    case 2:
      return quantized_rows_of<Bits, PerGroup, 2>(q, arranged, sums, first, last, y, ldy);
    case 3:
      return quantized_rows_of<Bits, PerGroup, 3>(q, arranged, sums, first, last, y, ldy);
    default:
      return quantized_rows_of<Bits, PerGroup, 4>(q, arranged, sums, first, last, y, ldy);
  }
}

template <int Bits>
void quantized_rows_in(
    const QuantizedRows& q, const float* arranged, const float* sums, int m, int first, int last, float* y,
    ptrdiff_t ldy) {
  switch (q.group_size) {
    case 32:
      return quantized_rows_by<Bits, Bits>(q, arranged, sums, m, first, last, y, ldy);
    case 64:
      return quantized_rows_by<Bits, 2 * Bits>(q, arranged, sums, m, first, last, y, ldy);
    default:
      return quantized_rows_by<Bits, 4 * Bits>(q, arranged, sums, m, first, last, y, ldy);
  }
}

void quantized_rows(
    const QuantizedRows& q, const float* arranged, const float* sums, int m, int first, int last, float* y,
    ptrdiff_t ldy) {
  switch (q.bits) {
    case 2:
      return quantized_rows_in<2>(q, arranged, sums, m, first, last, y, ldy);
    case 4:
      return quantized_rows_in<4>(q, arranged, sums, m, first, last, y, ldy);
    default:
      return quantized_rows_in<8>(q, arranged, sums, m, first, last, y, ldy);
  }
}

// Eight numbers that begin at bit 0 of `word`, or at the next word's for 8 bits.
inline Eight eight_numbers(const uint32_t* word, int bits, int part) {
  const EightWords steps = {0, 1, 2, 3, 4, 5, 6, 7};
  const uint32_t mask = (1u << bits) - 1;
  if (bits == 8) {
    const EightWords both = {word[0], word[0], word[0], word[0], word[1], word[1], word[1], word[1]};
    return __builtin_convertvector((EightInts)((both >> ((steps & 3) * 8)) & mask), Eight);
  }
  const EightWords all = EightWords{} + (word[0] >> (part * 8 * bits));
  return __builtin_convertvector((EightInts)((all >> (steps * static_cast<uint32_t>(bits))) & mask), Eight);
}

void dequantize_rows(const QuantizedRows& q, int first, int last, float* out, ptrdiff_t ldo) {
  const int words = q.k * q.bits / 32;
  const int groups = q.k / q.group_size;
  float scale_room[kMostGroups];
  float bias_room[kMostGroups];
  for (int row = first; row < last; ++row, out += ldo) {
    const float* scales = as_float32(q.scales, q.scale_type, static_cast<ptrdiff_t>(row) * groups, groups, scale_room);
    const float* biases = as_float32(q.biases, q.scale_type, static_cast<ptrdiff_t>(row) * groups, groups, bias_room);
    const uint32_t* w = q.w + static_cast<ptrdiff_t>(row) * words;
    for (int k = 0; k < q.k; k += 8) {
      const int bit = k * q.bits;
      const int group = k / q.group_size;
      const Eight x = eight_numbers(w + bit / 32, q.bits, bit % 32 / (8 * q.bits)) * scales[group] + biases[group];
      __builtin_memcpy(out + k, &x, sizeof(x));
    }
  }
}

// -- half precision -----------------------------------------------------------------------------

template <FloatType Type>
void widen_from(const uint16_t* x, ptrdiff_t step, float* y, ptrdiff_t count) {
  ptrdiff_t i = 0;
  for (; step == 1 && i + kLanes <= count; i += kLanes) {
    const Floats floats = Row<Type>::lanes(x + i);
    __builtin_memcpy(y + i, &floats, sizeof(floats));
  }
  for (; i < count; i += kLanes) {
    const ptrdiff_t some = count - i < kLanes ? count - i : kLanes;
    Halves halves = {};
    for (ptrdiff_t j = 0; j < some; ++j) {
      halves[j] = x[(i + j) * step];
    }
    const Floats floats = wide<Type>(halves);
    __builtin_memcpy(y + i, &floats, some * sizeof(float));
  }
}

void widen(const uint16_t* x, FloatType type, ptrdiff_t step, float* y, ptrdiff_t count) {
  type == FloatType::bfloat16 ? widen_from<FloatType::bfloat16>(x, step, y, count)
                              : widen_from<FloatType::float16>(x, step, y, count);
}

// -- one pass over memory -----------------------------------------------------------------------

// Cody and Waite's reduction to |r| <= log(2) / 2, and the polynomial of Cephes' expf.
inline Floats exp(Floats x) {
  constexpr float kRounds = 12582912;  // 1.5 * 2^23: what is added to it is rounded to a whole number
  const Floats highest = Floats{} + 88.72283f;
  const Floats lowest = Floats{} - 87.33654f;
  const Floats within = x < lowest ? lowest : x;
  const Floats rounded = within * 1.44269504f + kRounds;
  const Floats n = rounded - kRounds;
  const Floats r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  constexpr float kCoefficients[] = {
      1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  Floats p = Floats{} + 1.9875691500e-4f;
  for (const float c : kCoefficients) {
    p = p * r + c;
  }
  const Floats mantissa = p * (r * r) + r + 1;
  // The exponent of 128 is that of infinity: in two steps.
  const Words half = ((Words)rounded << 23) + (126u << 23);
  const Floats y = mantissa * (Floats)half * 2;
  return x > highest ? Floats{} + __builtin_inff() : y;
}

inline Floats silu_of(Floats x) {
  return x / (1 + exp(-x));
}

void silu(const float* x, float* y, ptrdiff_t count) {
  ptrdiff_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats v = silu_of(load<Floats>(x + i));
    __builtin_memcpy(y + i, &v, sizeof(v));
  }
  if (i < count) {
    const Floats v = silu_of(load_some<Floats>(x + i, static_cast<int>(count - i)));
    __builtin_memcpy(y + i, &v, (count - i) * sizeof(float));
  }
}

float exponentials(float* x, ptrdiff_t count) {
  const ptrdiff_t whole = count / kLanes * kLanes;
  Floats highest = Floats{} - __builtin_inff();
  for (ptrdiff_t i = 0; i < whole; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    highest = v > highest ? v : highest;
  }
  float maximum = highest[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    maximum = highest[lane] > maximum ? highest[lane] : maximum;
  }
  for (ptrdiff_t i = whole; i < count; ++i) {
    maximum = x[i] > maximum ? x[i] : maximum;
  }
  const auto exponential = [&](Floats v) {
    const Floats below = v - maximum;
    return below < -87.33654f ? Floats{} : exp(below);
  };
  Floats sums = {};
  for (ptrdiff_t i = 0; i < whole; i += kLanes) {
    const Floats v = exponential(load<Floats>(x + i));
    __builtin_memcpy(x + i, &v, sizeof(v));
    sums += v;
  }
  float total = sum(sums);
  if (whole < count) {
    const Floats v = exponential(load_some<Floats>(x + whole, static_cast<int>(count - whole)));
    for (ptrdiff_t i = whole; i < count; ++i) {
      x[i] = v[i - whole];
      total += x[i];
    }
  }
  return total;
}

void rms_norm(const float* x, const float* weight, float* y, ptrdiff_t rows, ptrdiff_t width, float eps) {
  for (ptrdiff_t row = 0; row < rows; ++row, x += width, y += width) {
    Floats squares[4] = {};
    ptrdiff_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
      for (int u = 0; u < 4; ++u) {
        const Floats v = load<Floats>(x + i + u * kLanes);
        squares[u] += v * v;
      }
    }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < width; ++i) {
      total += x[i] * x[i];
    }
    const float factor = 1 / __builtin_sqrtf(total / static_cast<float>(width) + eps);
    for (ptrdiff_t j = 0; j < width; ++j) {
      y[j] = weight ? x[j] * factor * weight[j] : x[j] * factor;
    }
  }
}

void rotate(
    const float* __restrict x, const float* __restrict cosines, const float* __restrict sines, float* __restrict y,
    ptrdiff_t half) {
  for (ptrdiff_t i = 0; i < half; ++i) {
    y[i] = x[i] * cosines[i] - x[half + i] * sines[i];
    y[half + i] = x[i] * sines[i] + x[half + i] * cosines[i];
  }
}

} // namespace

extern const Kernels kernels = {
    dot_rows, arrange, arranged_size, quantized_rows, dequantize_rows, widen, silu, exponentials, rms_norm, rotate};

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
