#include "metal_kernel.h"

#include <optional>
#include <utility>

#include "../error.h"

namespace executorch_mlx::gpu {

namespace {

constexpr char kHeader[] = R"(
#include <metal_stdlib>
#pragma METAL fp contract(off)
#define GPU_FUNCTION inline
#define GPU_CONSTANT constant
#define GPU_DEVICE device
#define GPU_SHARED threadgroup
#define GPU_THREAD thread
#define GPU_GROUP_MEMORY threadgroup
#define GPU_ATOMIC_UINT metal::atomic_uint
#define GPU_BARRIER() metal::threadgroup_barrier(metal::mem_flags::mem_device | metal::mem_flags::mem_threadgroup)
inline uint32_t gpu_bits(float x) { return as_type<uint32_t>(x); }
inline float gpu_float(uint32_t bits) { return as_type<float>(bits); }
inline float gpu_add(float a, float b) { return a + b; }
inline float gpu_subtract(float a, float b) { return a - b; }
inline float gpu_multiply(float a, float b) { return a * b; }
inline float gpu_divide(float a, float b) { return a / b; }
inline float gpu_abs(float x) { return metal::precise::fabs(x); }
inline float gpu_log(float x) { return metal::precise::log(x); }
inline float gpu_exp2(float x) { return metal::precise::exp2(x); }
inline float gpu_exp(float x) { return metal::precise::exp(x); }
inline float gpu_rsqrt(float x) { return metal::precise::rsqrt(x); }
inline float gpu_sin(float x) { return metal::precise::sin(x); }
inline float gpu_cos(float x) { return metal::precise::cos(x); }
inline float gpu_sum_of_warp(float x) { return metal::simd_sum(x); }
inline float gpu_shuffle_xor(float x, uint32_t mask) { return metal::simd_shuffle_xor(x, static_cast<uint16_t>(mask)); }
inline void gpu_store(threadgroup metal::atomic_uint* counter, uint32_t value) {
  metal::atomic_store_explicit(counter, value, metal::memory_order_relaxed);
}
inline uint32_t gpu_load(threadgroup metal::atomic_uint* counter) {
  return metal::atomic_load_explicit(counter, metal::memory_order_relaxed);
}
inline uint32_t gpu_increment(threadgroup metal::atomic_uint* counter) {
  return metal::atomic_fetch_add_explicit(counter, 1u, metal::memory_order_relaxed);
}
)";
constexpr char kPrologue[] = R"(
  const uint32_t group = threadgroup_position_in_grid.x;
  const uint32_t own_thread = thread_position_in_threadgroup.x;
)";

} // namespace

MetalKernel::MetalKernel(const std::string& name, const std::vector<std::string>& inputs,
    const std::vector<std::string>& outputs, const std::string& body, const std::string& text)
    : function_(
          mx::fast::metal_kernel(str("executorch_mlx_", name), inputs, outputs, kPrologue + body, kHeader + text)) {}

std::vector<mx::array> MetalKernel::operator()(const std::vector<mx::array>& inputs,
    const std::vector<mx::Shape>& shapes, const std::vector<mx::Dtype>& dtypes, int groups, int threads,
    const Constants& constants, mx::Stream stream) const {
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> arguments = {{"T", inputs[0].dtype()}};
  arguments.insert(arguments.end(), constants.begin(), constants.end());
  return function_(inputs, shapes, dtypes, {groups * threads, 1, 1}, {threads, 1, 1}, arguments, std::nullopt,
      /*verbose=*/false, stream);
}

} // namespace executorch_mlx::gpu
