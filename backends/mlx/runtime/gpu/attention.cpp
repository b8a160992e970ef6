// Attention of one query token to a KV cache. MLX's attention needs the used part of the cache as an array, which takes
// two more operations, and the host needs more time for it.
#include <mlx/primitives.h>

#include <algorithm>
#include <bit>
#include <numbers>
#include <tuple>
#include <vector>

#include "cuda_kernel.h"
#include "fused.h"
#include "lazy.h"

namespace executorch_mlx::gpu {

namespace {

// Up to this number of positions, one block computes a query head. Beyond it, each block computes a part of the
// positions, and a second kernel combines the parts.
constexpr int kMaxUndivided = 512;
constexpr int kPositionsOfPart = 256;
constexpr int kMaxParts = 64;

// A block computes one query head for one part of the positions. Each group of kLanes threads holds one vector of a
// position: 16 bytes in each thread. q is [B, kHeads, 1, kDim]; keys and values are [B, kHeads / kShared, capacity,
// kDim]. If kParts is 0, y is [B, kHeads, 1, kDim]. Otherwise y is [B * kHeads, parts, kDim + 2]: for each part, the
// weighted sum of the values, the largest exponent and the sum of the weights.
const CudaKernel& attention_kernel() {
  static const CudaKernel kernel("attention_of_token", {"q", "keys", "values", "positions"}, {"y"}, R"(
  constexpr int kWide = 16 / sizeof(T);
  constexpr int kLanes = kDim / kWide;
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kBatch = 4;  // positions of a group in an iteration
  constexpr float kLowest = -1e30f;
  const int parts = gridDim.x / (q_shape[0] * kHeads);
  const int head = blockIdx.x / parts;  // counted over all batches
  const int length = positions_shape[0];
  const int size = (length + parts - 1) / parts;
  const int begin = blockIdx.x % parts * size;
  const int end = min(begin + size, length);
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const uint64_t cache = uint64_t(head / kShared) * keys_shape[2] * kDim + lane * kWide;
  float query[kWide], sums[kWide];
  for (int j = 0; j < kWide; ++j) {
    query[j] = static_cast<float>(q[head * kDim + lane * kWide + j]) * __int_as_float(kScale);
    sums[j] = 0.0f;
  }
  float largest = kLowest, total = 0.0f;
  for (int first = begin; first < end; first += kGroups * kBatch) {
    uint4 key[kBatch], value[kBatch];
    float score[kBatch];
    for (int i = 0; i < kBatch; ++i) {
      const int position = min(first + i * kGroups + group, length - 1);
      key[i] = *reinterpret_cast<const uint4*>(keys + cache + uint64_t(position) * kDim);
      value[i] = *reinterpret_cast<const uint4*>(values + cache + uint64_t(position) * kDim);
    }
    float new_largest = largest;
    for (int i = 0; i < kBatch; ++i) {
      score[i] = 0.0f;
      for (int j = 0; j < kWide; ++j) {
        score[i] += query[j] * static_cast<float>(reinterpret_cast<const T*>(&key[i])[j]);
      }
      for (int other = kLanes / 2; other > 0; other /= 2) {
        score[i] += __shfl_xor_sync(0xFFFFFFFFu, score[i], other);
      }
      score[i] = first + i * kGroups + group < end ? score[i] : -INFINITY;
      new_largest = fmaxf(new_largest, score[i]);
    }
    const float factor = exp2f(largest - new_largest);
    largest = new_largest;
    total *= factor;
    for (int j = 0; j < kWide; ++j) {
      sums[j] *= factor;
    }
    for (int i = 0; i < kBatch; ++i) {
      const float weight = exp2f(score[i] - largest);
      total += weight;
      for (int j = 0; j < kWide; ++j) {
        sums[j] += weight * static_cast<float>(reinterpret_cast<const T*>(&value[i])[j]);
      }
    }
  }
  __shared__ float all_largest[kGroups], all_totals[kGroups], all_sums[kGroups * kDim];
  if (lane == 0) {
    all_largest[group] = largest;
    all_totals[group] = total;
  }
  for (int j = 0; j < kWide; ++j) {
    all_sums[group * kDim + lane * kWide + j] = sums[j];
  }
  __syncthreads();
  largest = kLowest;
  for (int i = 0; i < kGroups; ++i) {
    largest = fmaxf(largest, all_largest[i]);
  }
  float sum = 0.0f;
  total = 0.0f;
  if (threadIdx.x < kDim) {
    for (int i = 0; i < kGroups; ++i) {
      const float factor = exp2f(all_largest[i] - largest);
      total += factor * all_totals[i];
      sum += factor * all_sums[i * kDim + threadIdx.x];
    }
    if (kParts) {
      float* const part = reinterpret_cast<float*>(y) + uint64_t(blockIdx.x) * (kDim + 2);
      part[threadIdx.x] = sum;
      part[kDim] = largest;
      part[kDim + 1] = total;
    } else {
      reinterpret_cast<T*>(y)[head * kDim + threadIdx.x] = static_cast<T>(sum / total);
    }
  }
)");
  return kernel;
}

// A block combines the parts of one query head. `q` is there for its dtype.
const CudaKernel& combine_kernel() {
  static const CudaKernel kernel("combine_attention", {"q", "parts"}, {"y"}, R"(
  const int count = parts_shape[1];
  const float* const part = parts + uint64_t(blockIdx.x) * count * (kDim + 2);
  float largest = part[kDim];
  for (int i = 1; i < count; ++i) {
    largest = fmaxf(largest, part[i * (kDim + 2) + kDim]);
  }
  float sum = 0.0f, total = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float factor = exp2f(part[i * (kDim + 2) + kDim] - largest);
    sum += factor * part[i * (kDim + 2) + threadIdx.x];
    total += factor * part[i * (kDim + 2) + kDim + 1];
  }
  y[blockIdx.x * kDim + threadIdx.x] = static_cast<T>(sum / total);
)");
  return kernel;
}

// Whether the memory of x is aligned to 16 bytes, or will be.
bool is_aligned(const mx::array& x) {
  return x.status() == mx::array::Status::unscheduled ? is_lazy(x, "SliceUpdate") && is_aligned(x.inputs()[0])
                                                      : x.offset() % 16 == 0;
}

// The array of which x is a lazy slice with its first x.shape(2) positions, if x is one; else null.
const mx::array* cache_of(const mx::array& x) {
  if (!is_lazy(x, "Slice") || x.ndim() != 4) {
    return nullptr;
  }
  const mx::array& cache = x.inputs()[0];
  const auto [start, stop, steps] = static_cast<const mx::Slice&>(x.primitive()).state();
  const bool is_prefix = start == mx::Shape(4, 0) && steps == mx::Shape(4, 1) && stop == x.shape();
  const bool has_all_others =
      cache.shape(0) == x.shape(0) && cache.shape(1) == x.shape(1) && cache.shape(3) == x.shape(3);
  return is_prefix && has_all_others && is_aligned(cache) ? &cache : nullptr;
}

} // namespace

std::optional<mx::array> attention_of_token(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, mx::Stream stream) {
  if (!is_cuda(stream) || q.ndim() != 4 || q.shape(2) != 1 || !has_float_dtype(q, k.dtype()) ||
      q.dtype() != v.dtype()) {
    return std::nullopt;
  }
  const mx::array* keys = cache_of(k);
  const mx::array* values = cache_of(v);
  const int dim = q.shape(3), heads = q.shape(1);
  const int lanes = dim * static_cast<int>(q.itemsize()) / 16;
  const bool fits = keys != nullptr && values != nullptr && keys->shape() == values->shape() &&
      k.shape() == v.shape() && k.shape(0) == q.shape(0) && k.shape(3) == dim && k.shape(1) > 0 &&
      heads % k.shape(1) == 0 && lanes <= kWarp &&
      std::has_single_bit(static_cast<unsigned>(lanes)) && lanes * 16 == dim * static_cast<int>(q.itemsize());
  if (!fits || q.size() == 0 || k.size() == 0 || q.shape(0) * heads > kMaxBlocks / kMaxParts) {
    return std::nullopt;
  }
  const int length = k.shape(2);
  const int rows = q.shape(0) * heads;
  const int parts = length <= kMaxUndivided ? 1 : std::min(blocks_of(length, kPositionsOfPart), kMaxParts);
  // MLX passes the shape of an array by value. This array only brings the number of positions to the kernel.
  const mx::array positions(static_cast<const float*>(nullptr), {length, 0}, mx::float32);
  const auto log2e = std::numbers::log2e_v<float>;  // the kernel computes powers of 2
  const auto results = attention_kernel()(
      {q, *keys, *values, positions},
      {parts == 1 ? q.shape() : mx::Shape{rows, parts, dim + 2}}, rows * parts, kThreads,
      {{"kThreads", kThreads}, {"kDim", dim}, {"kHeads", heads}, {"kShared", heads / k.shape(1)},
       {"kScale", std::bit_cast<int>(scale * log2e)}, {"kParts", parts > 1}},
      stream, {parts == 1 ? q.dtype() : mx::float32});
  return parts == 1 ? results[0]
                    : combine_kernel()({q, results[0]}, {q.shape()}, rows, dim, {{"kDim", dim}}, stream)[0];
}

} // namespace executorch_mlx::gpu
