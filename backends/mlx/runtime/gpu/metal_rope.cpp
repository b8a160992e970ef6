// norm_rope() on an Apple GPU.
#include <bit>
#include <string>
#include <vector>

#include "decode_kernels_text.h"
#include "lazy.h"
#include "metal_kernel.h"

namespace executorch_mlx::gpu {

namespace {

// A warp computes a row of kDim elements: see norm_rope_text() in fused.cpp. `sizes` are the batches and the length.
std::string body(int arrays) {
  std::string text = R"(
  using namespace executorch_mlx_decode;
  const uint32_t batches = sizes[0];
  const uint32_t length = sizes[1];
  uint64_t row = static_cast<uint64_t>(group) * (kThreads / kWarp) + own_thread / kWarp;
  const GPU_DEVICE T* x = x0;
  const GPU_DEVICE T* weight = weight0;
  GPU_DEVICE T* y = y0;
  uint32_t heads = kHeads0;
)";
  if (arrays == 2) {
    text += R"(
  const uint64_t rows = static_cast<uint64_t>(batches) * length * heads;
  if (row >= rows) {
    row -= rows;
    x = x1;
    weight = weight1;
    y = y1;
    heads = kHeads1;
  }
)";
  }
  return text + R"(
  const uint32_t head = row % heads;
  const uint32_t position = row / heads % length;
  const uint32_t batch = row / heads / length;
  if (batch < batches) {
    const float angle = gpu_float(kScale) * static_cast<float>(position + offset[kPerRow ? batch : 0]);
    const uint64_t to = ((static_cast<uint64_t>(batch) * heads + head) * length + position) * kDim;
    norm_rope<kDim, T>(x + row * kDim, weight, kNorm, gpu_float(kEps), angle, freqs, y + to, own_thread % kWarp);
  }
)";
}

MetalKernel make_kernel(int arrays) {
  const std::vector<std::string> one{"x0", "weight0", "offset", "freqs", "sizes"};
  const std::vector<std::string> two{"x0", "weight0", "x1", "weight1", "offset", "freqs", "sizes"};
  const std::vector<std::string> outputs{"y0", "y1"};
  return {arrays == 1 ? "norm_rope_1" : "norm_rope_2", arrays == 1 ? one : two,
      {outputs.begin(), outputs.begin() + arrays}, body(arrays), kDecodeKernelsText};
}

} // namespace

mx::array FusibleRope::compute_on_metal(std::vector<mx::array> inputs) {
  static const MetalKernel one = make_kernel(1), two = make_kernel(2);
  std::vector<mx::Shape> shapes;
  size_t rows = 0;
  for (const int heads : options.heads) {
    shapes.push_back({options.batches, heads, options.length, options.dim});
    rows += static_cast<size_t>(options.batches) * heads * options.length;
  }
  const Constants constants{{"kThreads", kThreads}, {"kDim", options.dim}, {"kHeads0", options.heads.front()},
      {"kHeads1", options.heads.back()}, {"kNorm", options.has_norm}, {"kEps", std::bit_cast<int>(options.eps)},
      {"kScale", std::bit_cast<int>(options.scale)}, {"kPerRow", offset_of(inputs).size() > 1}};
  const std::vector<mx::Dtype> dtypes(shapes.size(), inputs[0].dtype());
  inputs.push_back(mx::array({options.batches, options.length}, mx::int32));
  return (shapes.size() == 1 ? one : two)(
      inputs, shapes, dtypes, blocks_of(rows, kThreads / kWarp), kThreads, constants, stream())[0];
}

} // namespace executorch_mlx::gpu
