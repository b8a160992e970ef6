// Attention of one query token to a KV cache. MLX's attention needs the used part of the cache as an array, which takes
// two more operations, and the host needs more time for it. If the lazy operands permit it, the kernel also does the work
// before: norm and rotation of query and key, and the update of the cache.
#include <mlx/primitives.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <numbers>
#include <tuple>
#include <utility>
#include <vector>

#include "../error.h"
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

// How many bytes of the next matrix the L2 cache loads during attention.
constexpr size_t kMaxAhead = 8 << 20;
constexpr int kAheadOfThread = 4096;

// The kernels of attention. A block computes one query head for one part of the positions. Each group of kLanes threads
// holds one vector of a position: 16 bytes in each thread. Keys and values are [B, kHeads / kShared, capacity, kDim]. The
// shape of `sizes` is the number of positions, the number of parts, the offset of the rotation, and 0. If kParts is 0, y is
// [B, kHeads, 1, kDim]. Otherwise y is [B * kHeads, parts, kDim + 2]: for each part, the weighted sum of the values, the
// largest exponent and the sum of the weights.
//
// kSetup starts to load the first keys and values, and each iteration starts to load those of the next one. Between kSetup and kAttention, a kernel defines query_row, the query head. If
// kOwn is 1, the last position is not read from the cache, but from own_key and own_value.
constexpr char kSetup[] = R"(
  constexpr int kWide = 16 / sizeof(T);
  constexpr int kLanes = kDim / kWide;
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kBatch = 4;  // positions of a group in an iteration
  constexpr float kLowest = -1e30f;
  const int length = sizes_shape[0];
  const int parts = sizes_shape[1];
  const int head = blockIdx.x / parts;  // counted over all batches
  const int size = (length + parts - 1) / parts;
  const int begin = blockIdx.x % parts * size;
  const int end = min(begin + size, length);
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const uint64_t cache = uint64_t(head / kShared) * keys_shape[2] * kDim + lane * kWide;
  uint4 next_key[kBatch], next_value[kBatch];
  const auto load = [&](int first) {
    for (int i = 0; i < kBatch; ++i) {
      const int position = max(min(first + i * kGroups + group, length - 1 - kOwn), 0);
      next_key[i] = *reinterpret_cast<const uint4*>(keys + cache + uint64_t(position) * kDim);
      next_value[i] = *reinterpret_cast<const uint4*>(values + cache + uint64_t(position) * kDim);
    }
  };
  load(begin);
)";

constexpr char kAttention[] = R"(
  float query[kWide], sums[kWide];
  for (int j = 0; j < kWide; ++j) {
    query[j] = static_cast<float>(query_row[lane * kWide + j]) * __int_as_float(kScale);
    sums[j] = 0.0f;
  }
  float largest = kLowest, total = 0.0f;
  for (int first = begin; first < end; first += kGroups * kBatch) {
    uint4 key[kBatch], value[kBatch];
    for (int i = 0; i < kBatch; ++i) {
      key[i] = next_key[i];
      value[i] = next_value[i];
    }
    if (first + kGroups * kBatch < end) {
      load(first + kGroups * kBatch);
    }
    float score[kBatch];
    float new_largest = largest;
    for (int i = 0; i < kBatch; ++i) {
      const int position = first + i * kGroups + group;
      if (kOwn && position == length - 1) {
        key[i] = *reinterpret_cast<const uint4*>(own_key + lane * kWide);
        value[i] = *reinterpret_cast<const uint4*>(own_value + lane * kWide);
      }
      score[i] = 0.0f;
      for (int j = 0; j < kWide; ++j) {
        score[i] += query[j] * static_cast<float>(reinterpret_cast<const T*>(&key[i])[j]);
      }
      for (int other = kLanes / 2; other > 0; other /= 2) {
        score[i] += __shfl_xor_sync(0xFFFFFFFFu, score[i], other);
      }
      score[i] = position < end ? score[i] : -INFINITY;
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
)";

// q is [B, kHeads, 1, kDim].
const CudaKernel& attention_kernel() {
  static const CudaKernel kernel(
      "attention_of_token", {"q", "keys", "values", "sizes"}, {"y"},
      str("  constexpr int kOwn = 0;\n", kSetup, R"(
  const T* const query_row = q + head * kDim;
  const T* const own_key = nullptr;
  const T* const own_value = nullptr;
)", kAttention));
  return kernel;
}

// Also normalizes and rotates query and key, which are operands of a DeferredRope, and writes key and value to the cache.
// Each block computes the new key itself: in the cache it may not be there yet. The blocks beyond those of the query heads
// ask the L2 cache to load the beginning of `next`, the matrix that will multiply y: kAheadOfThread bytes for each thread.
const CudaKernel& attention_step_kernel() {
  static const CudaKernel kernel(
      "attention_step",
      {"new_query", "query_weight", "new_key", "key_weight", "new_value", "offset", "freqs", "keys", "values", "sizes",
       "next"},
      {"y"},
      str(R"(
  const int blocks = new_query_shape[0] * kHeads * sizes_shape[1];
  if (blockIdx.x >= blocks) {
#if __CUDA_ARCH__ >= 900
    const uint64_t at = (uint64_t(blockIdx.x - blocks) * kThreads + threadIdx.x) * kAheadOfThread;
    const auto address = __cvta_generic_to_global(reinterpret_cast<const char*>(next) + at);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(kAheadOfThread) : "memory");
#endif
    return;
  }
  constexpr int kOwn = 1;
)", kSetup, kNormRope, R"(
  __shared__ __align__(16) T query_row[kDim], own_key[kDim], own_value[kDim];
  const int batch = head / kHeads;
  const int source = head / kShared * kDim;  // of the new key and value
  const int rotated_by = kHasOffset ? sizes_shape[2] : offset[kPerRow ? batch : 0];
  const float angle = __int_as_float(kPositionScale) * static_cast<float>(rotated_by);
  switch (threadIdx.x / 32) {
    case 0:
      norm_rope(new_query + head * kDim, query_weight, angle, query_row);
      break;
    case 1:
      norm_rope(new_key + source, key_weight, angle, own_key);
      break;
    case 2:
      for (int i = threadIdx.x % 32; i < kDim; i += 32) {
        own_value[i] = new_value[source + i];
      }
  }
  __syncthreads();
  if (head % kShared == 0 && begin == 0 && group == 0) {
    const uint64_t last = cache + uint64_t(length - 1) * kDim;
    *reinterpret_cast<uint4*>(const_cast<T*>(keys) + last) = *reinterpret_cast<const uint4*>(own_key + lane * kWide);
    *reinterpret_cast<uint4*>(const_cast<T*>(values) + last) = *reinterpret_cast<const uint4*>(own_value + lane * kWide);
  }
)", kAttention));
  return kernel;
}

// A block combines the parts of one query head. `like` is empty, and there for its dtype.
const CudaKernel& combine_kernel() {
  static const CudaKernel kernel("combine_attention", {"like", "parts"}, {"y"}, R"(
  constexpr int kBatch = 8;  // parts of an iteration
  const int count = parts_shape[1];
  const float* const part = parts + uint64_t(blockIdx.x) * count * (kDim + 2);
  float largest = -INFINITY, sum = 0.0f, total = 0.0f;
  for (int first = 0; first < count; first += kBatch) {
    float part_sum[kBatch], part_largest[kBatch], part_total[kBatch];
    float new_largest = largest;
    for (int i = 0; i < kBatch; ++i) {
      const float* const from = part + min(first + i, count - 1) * (kDim + 2);
      part_sum[i] = from[threadIdx.x];
      part_largest[i] = first + i < count ? from[kDim] : -INFINITY;
      part_total[i] = from[kDim + 1];
      new_largest = fmaxf(new_largest, part_largest[i]);
    }
    const float factor = exp2f(largest - new_largest);
    largest = new_largest;
    sum *= factor;
    total *= factor;
    for (int i = 0; i < kBatch; ++i) {
      const float weight = exp2f(part_largest[i] - largest);
      sum += weight * part_sum[i];
      total += weight * part_total[i];
    }
  }
  y[blockIdx.x * kDim + threadIdx.x] = static_cast<T>(sum / total);
)");
  return kernel;
}

// The result of combine_kernel() for `parts`, the only input.
class CombineAttention : public DeferredOperation {
 public:
  CombineAttention(mx::Stream stream, mx::Shape shape, mx::Dtype dtype)
      : DeferredOperation(stream), shape_(std::move(shape)), like_(static_cast<const float*>(nullptr), {0}, dtype) {}

  const char* name() const override {
    return kName;
  }

  static constexpr char kName[] = "CombineAttention";

 private:
  mx::array compute(const std::vector<mx::array>& inputs) override {
    const int heads = inputs[0].shape(0), dim = shape_.back();
    return combine_kernel()({like_, inputs[0]}, {shape_}, heads, dim, {{"kDim", dim}}, stream())[0];
  }

  const mx::Shape shape_;
  const mx::array like_;
};

// Whether the memory of x is aligned to 16 bytes, or will be.
bool is_aligned(const mx::array& x) {
  const bool is_update = is_lazy(x, "SliceUpdate") || is_lazy(x, CacheUpdate::kName);
  return x.status() == mx::array::Status::unscheduled ? is_update && is_aligned(x.inputs()[0]) : x.offset() % 16 == 0;
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

// How a kernel divides the work, and the constants of both kernels.
struct Plan {
  Plan(const mx::array& q, const mx::array& k, float scale, std::optional<int> offset)
      : length(k.shape(2)),
        rows(q.shape(0) * q.shape(1)),
        dim(q.shape(3)),
        parts(length <= kMaxUndivided ? 1 : std::min(blocks_of(length, kPositionsOfPart), kMaxParts)),
        shape(parts == 1 ? q.shape() : mx::Shape{rows, parts, dim + 2}),
        dtype(parts == 1 ? q.dtype() : mx::float32),
        // MLX passes the shape of an array by value. This array only brings numbers to the kernel.
        sizes(static_cast<const float*>(nullptr), {length, parts, offset.value_or(0), 0}, mx::float32),
        constants{
            {"kThreads", kThreads}, {"kDim", dim}, {"kHeads", q.shape(1)}, {"kShared", q.shape(1) / k.shape(1)},
            // The kernel computes powers of 2.
            {"kScale", std::bit_cast<int>(scale * std::numbers::log2e_v<float>)}, {"kParts", parts > 1}} {}

  int length, rows, dim, parts;
  mx::Shape shape;  // of the kernel's result
  mx::Dtype dtype;
  mx::array sizes;
  CudaKernel::Constants constants;
};

// The result of attention_step_kernel(). The inputs are those of the kernel, without `sizes`. load_ahead() adds `next`.
class AttentionStep : public DeferredOperation {
 public:
  AttentionStep(mx::Stream stream, Plan plan) : DeferredOperation(stream), plan_(std::move(plan)) {}

  const char* name() const override {
    return kName;
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    declare_written(inputs[kKeys], stream());
    declare_written(inputs[kValues], stream());
    DeferredOperation::eval_gpu(inputs, outputs);
  }

  static constexpr char kName[] = "AttentionStep";
  static constexpr size_t kKeys = 7, kValues = 8, kNext = 9;

 private:
  mx::array compute(const std::vector<mx::array>& inputs) override {
    const bool has_next = inputs.size() > kNext;
    std::vector<mx::array> operands(inputs.begin(), inputs.begin() + kNext);
    operands.insert(operands.end(), {plan_.sizes, has_next ? address_of(inputs[kNext]) : inputs[0]});
    const size_t ahead = has_next ? std::min(inputs[kNext].nbytes(), kMaxAhead) : 0;
    const int blocks = plan_.rows * plan_.parts + static_cast<int>(ahead / (kThreads * kAheadOfThread));
    return attention_step_kernel()(
        std::move(operands), {plan_.shape}, blocks, kThreads, plan_.constants, stream(), {plan_.dtype})[0];
  }

  const Plan plan_;
};

// attention_of_token() of operands that attention_step_kernel() computes, too. Returns the result of this kernel.
std::optional<mx::array> attention_step(
    const mx::array& q, const mx::array& keys, const mx::array& values, Plan plan, mx::Stream stream) {
  const CacheUpdate* of_keys = open_update(keys);
  const CacheUpdate* of_values = open_update(values);
  if (!is_lazy(q, DeferredRope::kName) || of_keys == nullptr || of_values == nullptr || keys.id() == values.id()) {
    return std::nullopt;
  }
  // Whether the update writes the last position, and the kernel gets the memory of the cache and no copy.
  const auto writes_last = [&](const CacheUpdate& update, const mx::array& cache) {
    return update.position == plan.length - 1 && cache.flags().row_contiguous;
  };
  const mx::array& k = keys.inputs()[1];
  const mx::array& v = values.inputs()[1];
  const auto& rope = static_cast<const DeferredRope&>(q.primitive()).options;
  const bool fits = k.has_primitive() && k.primitive_id() == q.primitive_id() && k.id() != q.id() &&
      rope.heads.size() == 2 && writes_last(*of_keys, keys.inputs()[0]) && writes_last(*of_values, values.inputs()[0]);
  if (!fits) {
    return std::nullopt;
  }
  // The new value has one position, so that a transposition does not change the order of its elements.
  const mx::array* transposed = operand_of_transposition(v);
  const auto& operands = q.inputs();
  const int of_query = 2 * q.sibling_position();
  const int of_key = 2 - of_query;
  // A kernel that gets the offset by value does not wait for the memory of the host, where a single number lies.
  const mx::array& offset = operands[4];
  std::vector<mx::array> inputs{
      operands[of_query], operands[of_query + 1], operands[of_key], operands[of_key + 1],
      transposed != nullptr ? *transposed : v, offset, operands[5], keys.inputs()[0], values.inputs()[0]};
  plan.constants.insert(
      plan.constants.end(),
      {{"kNorm", rope.has_norm}, {"kEps", std::bit_cast<int>(rope.eps)},
       {"kPositionScale", std::bit_cast<int>(rope.scale)}, {"kPerRow", offset.size() > 1},
       {"kHasOffset", rope.offset.has_value()}, {"kAheadOfThread", kAheadOfThread}});
  const auto primitive = std::make_shared<AttentionStep>(stream, plan);
  const mx::array y(plan.shape, plan.dtype, primitive, std::move(inputs));
  CacheUpdate::take_over(keys, y);
  CacheUpdate::take_over(values, y);
  return y;
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
  const bool is_rotated = is_lazy(q, DeferredRope::kName);
  const Plan plan(
      q, k, scale,
      is_rotated ? static_cast<const DeferredRope&>(q.primitive()).options.offset : std::nullopt);
  auto y = attention_step(q, *keys, *values, plan, stream);
  if (!y) {
    y = attention_kernel()(
        {q, *keys, *values, plan.sizes}, {plan.shape}, plan.rows * plan.parts, kThreads, plan.constants, stream,
        {plan.dtype})[0];
  }
  if (plan.parts == 1) {
    return y;
  }
  auto combine = std::make_shared<CombineAttention>(stream, q.shape(), q.dtype());
  return mx::array(q.shape(), q.dtype(), std::move(combine), {*y});
}

void load_ahead(const mx::array& x, const mx::array& matrix) {
  const mx::array* y = &x;
  while (is_lazy(*y, "Reshape") || is_lazy(*y, "Transpose") || is_lazy(*y, CombineAttention::kName)) {
    y = &y->inputs()[0];
  }
  if (is_lazy(*y, AttentionStep::kName) && y->inputs().size() == AttentionStep::kNext) {
    mx::array step = *y;
    step.inputs().push_back(matrix);
  }
}

} // namespace executorch_mlx::gpu
