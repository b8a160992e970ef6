// Defines the macros and functions that the source code of the GPU kernels uses, so that C++ compiles this source code
// and a CPU runs it. A GPU's group of threads (a CUDA block, a Metal threadgroup) becomes threads of this process that
// share a barrier. Without a barrier, the group has one thread.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace executorch_mlx::gpu {

struct GroupBarrier {
  virtual void wait() = 0;

 protected:
  ~GroupBarrier() = default;
};

inline thread_local GroupBarrier* group_barrier = nullptr;

} // namespace executorch_mlx::gpu

#define GPU_FUNCTION inline
#define GPU_CONSTANT
#define GPU_DEVICE
#define GPU_SHARED
#define GPU_ATOMIC_UINT std::atomic<uint32_t>
#define GPU_BARRIER() (::executorch_mlx::gpu::group_barrier ? ::executorch_mlx::gpu::group_barrier->wait() : void())

inline uint32_t gpu_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float gpu_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline float gpu_add(float a, float b) { return a + b; }
inline float gpu_subtract(float a, float b) { return a - b; }
inline float gpu_multiply(float a, float b) { return a * b; }
inline float gpu_divide(float a, float b) { return a / b; }
inline float gpu_abs(float x) { return std::fabs(x); }
inline float gpu_log(float x) { return std::log(x); }
inline float gpu_exp2(float x) { return std::exp2(x); }
inline void gpu_store(std::atomic<uint32_t>* counter, uint32_t value) { counter->store(value); }
inline uint32_t gpu_load(std::atomic<uint32_t>* counter) { return counter->load(); }
inline uint32_t gpu_increment(std::atomic<uint32_t>* counter) { return counter->fetch_add(1); }
