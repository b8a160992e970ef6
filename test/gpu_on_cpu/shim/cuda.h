// Words and functions of CUDA for a CPU, for the sources of kernels, which define the integer types themselves.
#pragma once

#include "exchange.h"

#define __CUDA_ARCH__ 800
#define __device__
#define __global__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct uint4 { // not aligned to 16 bytes, as the memory of MLX on a CPU
  unsigned x, y, z, w;
};
struct Index {
  unsigned (*value)();
  operator unsigned() const { return value(); }
};
struct Position {
  Index x;
};
constexpr Position threadIdx{{gpu_thread}}, blockIdx{{gpu_group}}, blockDim{{gpu_threads}}, gridDim{{gpu_groups}};

inline void __syncthreads() { gpu_wait_for_group(); }
inline void __threadfence() {}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return OfWarp<T>(value).at(gpu_lane() ^ mask);
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T, typename U>
T atomicAdd(T* address, U value) {
  const T before = *address;
  *address += value;
  return before;
}
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
#define fabsf __builtin_fabsf
#define fmaxf __builtin_fmaxf
#define expf __builtin_expf
#define exp2f __builtin_exp2f
#define logf __builtin_logf
#define sinf __builtin_sinf
#define cosf __builtin_cosf

// The assembler instructions of the kernels.
inline float float_of_bfloat16(unsigned short bits) { return __uint_as_float(unsigned{bits} << 16); }
inline unsigned short bfloat16_of(float x) { // not of NaN
  const unsigned b = __float_as_uint(x);
  return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
inline unsigned short float16_of(float x) { return __builtin_bit_cast(unsigned short, static_cast<_Float16>(x)); }
inline float float_of_float16(unsigned short bits) { return __builtin_bit_cast(_Float16, bits); }

// mma.sync.aligned.m16n8k16: sums [16, 8] += a [16, 16] @ b [16, 8], which lie in the registers of the warp.
template <bool is_bfloat16>
void multiply_add_tiles(
    float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  struct Registers {
    unsigned a[4], b[2];
  };
  OfWarp<Registers> all(Registers{{a0, a1, a2, a3}, {b0, b1}});
  const auto half = [](unsigned pair, int k) {
    const unsigned short bits = pair >> (k % 2 ? 16 : 0);
    return is_bfloat16 ? float_of_bfloat16(bits) : float_of_float16(bits);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = gpu_lane() / 4 + i / 2 * 8, column = gpu_lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const unsigned b = all.at(column * 4 + k % 8 / 2).b[k / 8];
      if (b == 0) {
        continue; // of a vector that does not exist
      }
      const unsigned a = all.at(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2];
      sums[i] += half(a, k) * half(b, k);
    }
  }
}

// fma.rn.bf16x2 and fma.rn.f16x2: a * b + c of two numbers each, rounded once.
template <bool is_bfloat16>
unsigned fused_pairs(unsigned a, unsigned b, unsigned c) {
  unsigned pair = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto half = [&](unsigned x) {
      const unsigned short bits = x >> shift;
      return double{is_bfloat16 ? float_of_bfloat16(bits) : float_of_float16(bits)};
    };
    const double y = half(a) * half(b) + half(c); // exact, but for the last bits of a sum of very different numbers
    const unsigned bits = is_bfloat16 ? bfloat16_of(static_cast<float>(y)) : float16_of(static_cast<float>(y));
    pair |= bits << shift;
  }
  return pair;
}
