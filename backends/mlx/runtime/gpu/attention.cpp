// Attention of one query token, or of one for each of several rows, to a KV cache. MLX's attention needs the used part
// of the cache as an array, which takes two more operations for each row, and the host needs more time for it. If the
// lazy operands permit it, the kernel also does the work before: norm and rotation of query and key, and the update of
// the cache.
#include <mlx/primitives.h>

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <numbers>
#include <numeric>
#include <utility>
#include <vector>

#include "../call/evaluation.h"
#include "../error.h"
#include "cuda_kernel.h"
#include "fused.h"
#include "lazy.h"
#include "sequence_kernel.h"

namespace executorch_mlx::gpu {

namespace {

// A block computes up to kMaxHeads query heads that share keys and values, for one part of the positions: see
// parts_of().
constexpr int kMaxHeads = 2;
constexpr int kMaxUndivided = 256;  // positions that are one part: to combine several takes two microseconds
constexpr int kPositionsOfSmallPart = 64;
constexpr int kPositionsOfPart = 512;
constexpr int kMaxBlocksOfSmallParts = 128;  // about one for each multiprocessor
constexpr int kMaxParts = 64;
constexpr int kMaxGroups = kMaxBlocks / kMaxParts;  // of heads

// Numbers of inputs of both kernels.
constexpr int kKeys = 1, kValues = 2;  // of attention_kernel()
constexpr int kStepOffset = 5, kStepKeys = 7, kStepValues = 8;  // of attention_step_kernel()

// The kernels of attention. A block computes kPerBlock query heads of a row for one part of the positions. Each group
// of kLanes threads holds one vector of a position: 16 bytes in each thread. Queries and y are [rows, kHeads, 1, kDim].
// A span has `length` positions from `start` on, and is divided into `parts`. There is one span for each row, and keys
// and values are [1, kHeads / kShared, capacity, kDim]; or the only span is that of all rows, and keys and values are
// [rows, kHeads / kShared, capacity, kDim].
//
// If there is more than one part, the kernel writes to `workspace`. Its first kMaxGroups numbers count the finished
// parts of each group of kPerBlock heads, and are 0 between kernels. After them are floats [rows * kHeads, max_parts,
// kDim + 2]: for each part, the weighted sum of the values, the largest exponent and the sum of the weights.
//
// kBlock and the numbers of kSpanNumbers say what the block computes. kSetup starts to load the first keys and values,
// and each iteration starts to load those of the next one. Between kSetup and kAttention, a kernel defines query_row,
// the kPerBlock query heads. If kOwn is 1, the last position is not in the cache, but in own_key and own_value.
constexpr char kBlock[] = R"(
  const int first_head = blockIdx.x / max_parts * kPerBlock;  // counted over all rows
  const int part = blockIdx.x % max_parts;
  const int row = first_head / kHeads;
)";

const std::vector<const char*> kSpanNumbers{"start", "length", "parts"};  // of the span of a row

constexpr char kSetup[] = R"(
  if (part >= parts) {
    return;
  }
  constexpr int kWide = 16 / sizeof(T);
  constexpr int kLanes = kDim / kWide;
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kBatch = 4;  // positions of a group in an iteration
  constexpr float kLowest = -1e30f;
  uint32_t* const counters = const_cast<uint32_t*>(workspace);
  float* const work = reinterpret_cast<float*>(counters + kMaxGroups);
  const int size = (length + parts - 1) / parts;
  const int begin = part * size;
  const int end = min(begin + size, length);
  const int group = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int key_head = (kSpans > 1 ? first_head % kHeads : first_head) / kShared;
  const uint64_t cache = (uint64_t(key_head) * capacity + start) * kDim + lane * kWide;
  uint4 next_key[kBatch], next_value[kBatch];
  const auto load = [&](int first) {
    for (int i = 0; i < kBatch; ++i) {
      const int position = max(min(first + i * kGroups + group, length - 1 - kOwn), 0);
      next_key[i] = *reinterpret_cast<const uint4*>(keys + cache + uint64_t(position) * kDim);
      next_value[i] = *reinterpret_cast<const uint4*>(values + cache + uint64_t(position) * kDim);
    }
  };
  load(begin);
  wait_for_inputs();
)";

constexpr char kAttention[] = R"(
  float query[kPerBlock][kWide], sums[kPerBlock][kWide], largest[kPerBlock], total[kPerBlock];
  for (int h = 0; h < kPerBlock; ++h) {
    for (int j = 0; j < kWide; ++j) {
      query[h][j] = static_cast<float>(query_row[h * kDim + lane * kWide + j]) * __int_as_float(kScale);
      sums[h][j] = 0.0f;
    }
    largest[h] = kLowest;
    total[h] = 0.0f;
  }
  for (int first = begin; first < end; first += kGroups * kBatch) {
    uint4 key[kBatch], value[kBatch];
    for (int i = 0; i < kBatch; ++i) {
      key[i] = next_key[i];
      value[i] = next_value[i];
      if (kOwn && first + i * kGroups + group == length - 1) {
        key[i] = *reinterpret_cast<const uint4*>(own_key + lane * kWide);
        value[i] = *reinterpret_cast<const uint4*>(own_value + lane * kWide);
      }
    }
    if (first + kGroups * kBatch < end) {
      load(first + kGroups * kBatch);
    }
    for (int h = 0; h < kPerBlock; ++h) {
      float score[kBatch];
      float new_largest = largest[h];
      for (int i = 0; i < kBatch; ++i) {
        score[i] = 0.0f;
        for (int j = 0; j < kWide; ++j) {
          score[i] += query[h][j] * static_cast<float>(reinterpret_cast<const T*>(&key[i])[j]);
        }
        for (int other = kLanes / 2; other > 0; other /= 2) {
          score[i] += __shfl_xor_sync(0xFFFFFFFFu, score[i], other);
        }
        score[i] = first + i * kGroups + group < end ? score[i] : -INFINITY;
        new_largest = fmaxf(new_largest, score[i]);
      }
      const float factor = exp2f(largest[h] - new_largest);
      largest[h] = new_largest;
      total[h] *= factor;
      for (int j = 0; j < kWide; ++j) {
        sums[h][j] *= factor;
      }
      for (int i = 0; i < kBatch; ++i) {
        const float weight = exp2f(score[i] - largest[h]);
        total[h] += weight;
        for (int j = 0; j < kWide; ++j) {
          sums[h][j] += weight * static_cast<float>(reinterpret_cast<const T*>(&value[i])[j]);
        }
      }
    }
  }
  __shared__ float all_largest[kPerBlock * kGroups], all_totals[kPerBlock * kGroups];
  __shared__ __align__(16) float all_sums[kPerBlock * kGroups * kDim];
  for (int h = 0; h < kPerBlock; ++h) {
    if (lane == 0) {
      all_largest[h * kGroups + group] = largest[h];
      all_totals[h * kGroups + group] = total[h];
    }
    for (int j = 0; j < kWide; ++j) {
      all_sums[(h * kGroups + group) * kDim + lane * kWide + j] = sums[h][j];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < kPerBlock * kDim; at += kThreads) {
    const int h = at / kDim * kGroups;
    float peak = kLowest, sum = 0.0f, weights = 0.0f;
    for (int i = 0; i < kGroups; ++i) {
      peak = fmaxf(peak, all_largest[h + i]);
    }
    for (int i = 0; i < kGroups; ++i) {
      const float factor = exp2f(all_largest[h + i] - peak);
      weights += factor * all_totals[h + i];
      sum += factor * all_sums[(h + i) * kDim + at % kDim];
    }
    if (parts == 1) {
      y[first_head * kDim + at] = static_cast<T>(sum / weights);
    } else {
      float* const result = work + (uint64_t(first_head + at / kDim) * max_parts + part) * (kDim + 2);
      result[at % kDim] = sum;
      result[kDim] = peak;
      result[kDim + 1] = weights;
    }
  }
  if (parts == 1) {
    return;
  }
  __threadfence();
  __syncthreads();
  __shared__ bool is_last;
  uint32_t* const counter = counters + blockIdx.x / max_parts;
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1) == parts - 1;
  }
  __syncthreads();
  if (!is_last) {
    return;
  }
  __threadfence();
  if (threadIdx.x == 0) {
    *counter = 0;
  }
  constexpr int kResults = (kPerBlock * kDim + kThreads - 1) / kThreads;  // of a thread
  constexpr int kPartBatch = 8;  // parts of an iteration
  float peak[kResults], sum[kResults], weights[kResults];
  for (int r = 0; r < kResults; ++r) {
    peak[r] = -INFINITY;
    sum[r] = 0.0f;
    weights[r] = 0.0f;
  }
  for (int first = 0; first < parts; first += kPartBatch) {
    float part_sum[kResults][kPartBatch], part_peak[kResults][kPartBatch], part_weights[kResults][kPartBatch];
    for (int r = 0; r < kResults; ++r) {
      const int at = min(int(threadIdx.x) + r * kThreads, kPerBlock * kDim - 1);
      for (int i = 0; i < kPartBatch; ++i) {
        const float* const from =
            work + (uint64_t(first_head + at / kDim) * max_parts + min(first + i, parts - 1)) * (kDim + 2);
        part_sum[r][i] = __ldcg(from + at % kDim);
        part_peak[r][i] = __ldcg(from + kDim);
        part_weights[r][i] = __ldcg(from + kDim + 1);
      }
    }
    for (int r = 0; r < kResults; ++r) {
      float new_peak = peak[r];
      for (int i = 0; i < kPartBatch; ++i) {
        part_peak[r][i] = first + i < parts ? part_peak[r][i] : -INFINITY;
        new_peak = fmaxf(new_peak, part_peak[r][i]);
      }
      const float factor = exp2f(peak[r] - new_peak);
      peak[r] = new_peak;
      sum[r] *= factor;
      weights[r] *= factor;
      for (int i = 0; i < kPartBatch; ++i) {
        const float weight = exp2f(part_peak[r][i] - new_peak);
        sum[r] += weight * part_sum[r][i];
        weights[r] += weight * part_weights[r][i];
      }
    }
  }
  for (int r = 0; r < kResults; ++r) {
    const int at = threadIdx.x + r * kThreads;
    if (at < kPerBlock * kDim) {
      y[first_head * kDim + at] = static_cast<T>(sum[r] / weights[r]);
    }
  }
)";

// The kernels for a number of spans.
class KernelsOfSpans {
 public:
  KernelsOfSpans(
      const char* name, std::vector<std::string> inputs, std::vector<std::string> numbers, std::string before_attention)
      : name_(name),
        inputs_(std::move(inputs)),
        numbers_(std::move(numbers)),
        before_attention_(std::move(before_attention)) {}

  const SequenceKernel& operator()(int spans) {
    std::lock_guard lock(mutex_);
    const auto found = kernels_.find(spans);
    if (found != kernels_.end()) {
      return found->second;
    }
    auto numbers = numbers_;
    for (int i = 0; i < spans; ++i) {
      for (const char* number : kSpanNumbers) {
        numbers.push_back(str(number, i));
      }
    }
    const std::string body =
        kBlock + select_numbers(kSpanNumbers, spans, "row") + kSetup + before_attention_ + kAttention;
    const std::vector<std::string> weights, outputs{"y"};
    return kernels_.try_emplace(spans, name_, inputs_, weights, outputs, numbers, body).first->second;
  }

 private:
  const char* name_;
  std::vector<std::string> inputs_, numbers_;
  std::string before_attention_;
  std::mutex mutex_;
  std::map<int, SequenceKernel> kernels_;
};

const SequenceKernel& attention_kernel(int spans) {
  static KernelsOfSpans kernels(
      "attention_of_token", {"q", "keys", "values", "workspace"}, {"capacity", "max_parts"}, R"(
  const T* const query_row = q + first_head * kDim;
  const T* const own_key = nullptr;
  const T* const own_value = nullptr;
)");
  return kernels(spans);
}

// Also normalizes and rotates query and key, which are operands of FusibleRope, and writes key and value to the cache.
// Each block computes the new key itself: in the cache it may not be there yet. If kHasOffset is 1, the rotation is by
// `rotated_by` positions, else by `offset`.
const SequenceKernel& attention_step_kernel(int spans) {
  static KernelsOfSpans kernels(
      "attention_step",
      {"new_query", "query_weight", "new_key", "key_weight", "new_value", "offset", "freqs", "keys", "values",
       "workspace"},
      {"capacity", "max_parts", "rotated_by"}, str(kNormRope, R"(
  __shared__ __align__(16) T query_row[kPerBlock * kDim], own_key[kDim], own_value[kDim];
  const int source = first_head / kShared * kDim;  // of the new key and value
  const float angle =
      __int_as_float(kPositionScale) * static_cast<float>(kHasOffset ? rotated_by : offset[kPerRow ? row : 0]);
  const int warp = threadIdx.x / 32;
  if (warp < kPerBlock) {
    norm_rope(new_query + (first_head + warp) * kDim, query_weight, angle, query_row + warp * kDim);
  } else if (warp == kPerBlock) {
    norm_rope(new_key + source, key_weight, angle, own_key);
  } else if (warp == kPerBlock + 1) {
    for (int i = threadIdx.x % 32; i < kDim; i += 32) {
      own_value[i] = new_value[source + i];
    }
  }
  __syncthreads();
  if (first_head % kShared == 0 && part == 0 && group == 0) {
    const uint64_t last = cache + uint64_t(length - 1) * kDim;
    const auto copy = [&](const T* from, const T* to) {
      *reinterpret_cast<uint4*>(const_cast<T*>(to) + last) = *reinterpret_cast<const uint4*>(from + lane * kWide);
    };
    copy(own_key, keys);
    copy(own_value, values);
  }
)"));
  return kernels(spans);
}

// Whether the memory of x is aligned to 16 bytes, or will be.
bool is_aligned(const mx::array& x) {
  const bool is_update = is_lazy(x, "SliceUpdate") || is_lazy(x, CacheUpdate::kName);
  return x.status() == mx::array::Status::unscheduled ? is_update && is_aligned(x.inputs()[0]) : x.offset() % 16 == 0;
}

// Positions of a KV cache.
struct CachePart {
  const mx::array& cache;
  Span span;
};

// The positions of which x is a lazy slice, if it is one.
std::optional<CachePart> cache_part(const mx::array& x) {
  if (!is_lazy(x, "Slice") || x.ndim() != 4) {
    return std::nullopt;
  }
  const mx::array& cache = x.inputs()[0];
  const auto [start, stop, steps] = static_cast<const mx::Slice&>(x.primitive()).state();
  const Span span{start[2], start[2] + x.shape(2)};
  const bool has_all_others =
      cache.shape(0) == x.shape(0) && cache.shape(1) == x.shape(1) && cache.shape(3) == x.shape(3);
  return start == mx::Shape{0, 0, span.start, 0} && steps == mx::Shape(4, 1) && has_all_others
      ? std::optional(CachePart{cache, span})
      : std::nullopt;
}

// The operand if x is the lazy result of a transposition [N, H, 1, D] <-> [1, H, N, D], else null. With one head, the
// transposition is a reshape.
const mx::array* operand_of_row_transposition(const mx::array& x) {
  if (is_lazy(x, "Reshape") && x.ndim() == 4 && x.shape(1) == 1) {
    const mx::array& rows = x.inputs()[0];
    return rows.shape() == mx::Shape{x.shape(2), 1, x.shape(0), x.shape(3)} ? &rows : nullptr;
  }
  const bool is_transpose = is_lazy(x, "Transpose") && x.ndim() == 4;
  const auto axes = is_transpose ? static_cast<const mx::Transpose&>(x.primitive()).state() : std::vector<int>{};
  return axes == std::vector<int>{2, 1, 0, 3} ? &x.inputs()[0] : nullptr;
}

// The number of parts of `length` positions, if one request has `blocks` blocks for each part. Parts are small until
// the blocks fill the GPU, and then grow up to kPositionsOfPart positions. Other requests of the call do not count, so
// that the tokens of a request do not depend on them.
int parts_of(int length, int blocks) {
  if (length <= kMaxUndivided) {
    return 1;
  }
  const int small = std::min(blocks_of(length, kPositionsOfSmallPart), std::max(kMaxBlocksOfSmallParts / blocks, 1));
  return std::min(std::max(small, blocks_of(length, kPositionsOfPart)), kMaxParts);
}

// Attention of queries [rows, heads, 1, dim], and how a kernel divides the work. `spans` has one span, or one for each
// row: see kBlock.
struct Plan {
  Plan(const mx::array& q, int key_heads, const std::vector<Span>& spans)
      : spans(spans),
        heads(q.shape(1)),
        shared(heads / key_heads),
        heads_of_block(std::gcd(shared, kMaxHeads)),
        work(q.shape(0) * heads * kMaxParts * (q.shape(3) + 2)) {
    for (const auto& [start, stop] : spans) {
      parts.push_back(parts_of(stop - start, heads / heads_of_block));
    }
    max_parts = *std::max_element(parts.begin(), parts.end());
    blocks = q.shape(0) * heads / heads_of_block * max_parts;
  }

  // Appends the numbers of the spans to those of a kernel.
  void add_spans(std::vector<int>& numbers) const {
    for (size_t i = 0; i < spans.size(); ++i) {
      numbers.insert(numbers.end(), {spans[i].start, spans[i].stop - spans[i].start, parts[i]});
    }
  }

  std::vector<Span> spans;
  int heads, shared, heads_of_block;
  int work;  // floats in the workspace, enough for any length
  std::vector<int> parts;
  int max_parts, blocks;
};

// A workspace with at least `work` floats. The kernels of a stream share it, one kernel after the other.
mx::array workspace_of(mx::Stream stream, int work) {
  static std::mutex mutex;
  // Never destroyed: at the end of the process, MLX may be gone before.
  static auto& all = *new std::map<int, mx::array>;
  std::lock_guard lock(mutex);
  const auto found = all.find(stream.index);
  if (found != all.end() && found->second.size() >= static_cast<size_t>(kMaxGroups) + work) {
    return found->second;
  }
  mx::array workspace = mx::zeros({kMaxGroups + work}, mx::uint32, stream);
  evaluate({workspace}, stream);
  all.insert_or_assign(stream.index, workspace);
  return workspace;
}

// The constants of both kernels.
Constants constants_of(const Plan& plan, int dim, float scale) {
  return {
      {"kThreads", kThreads}, {"kDim", dim}, {"kHeads", plan.heads}, {"kShared", plan.shared},
      {"kPerBlock", plan.heads_of_block}, {"kMaxGroups", kMaxGroups}, {"kSpans", static_cast<int>(plan.spans.size())},
      // The kernel computes powers of 2.
      {"kScale", std::bit_cast<int>(scale * std::numbers::log2e_v<float>)}};
}

// Runs one of the kernels, whose call lacks only the spans and what it writes to the workspace.
mx::array run(
    const SequenceKernel& kernel, SequenceKernel::Call call, const mx::array& workspace, const Plan& plan,
    Constants constants, mx::Stream stream) {
  plan.add_spans(call.numbers);
  if (plan.max_parts > 1) {
    call.written.push_back(workspace);
  }
  return kernel(std::move(call), std::move(constants), stream)[0];
}

// Whether the update writes the last position of each span, and the kernel gets the memory of the cache and no copy.
bool writes_last(const CacheUpdate& update, const mx::array& cache, const std::vector<Span>& spans) {
  const auto is_last = [](int position, const Span& span) { return position == span.stop - 1; };
  return std::equal(update.positions.begin(), update.positions.end(), spans.begin(), spans.end(), is_last) &&
      cache.status() != mx::array::Status::unscheduled && cache.flags().row_contiguous;
}

// Whether both arrays are results of FusibleRope that one kernel can compute.
bool has_same_rope(const mx::array& q, const mx::array& k) {
  if (!is_lazy(q, FusibleRope::kName) || !is_lazy(k, FusibleRope::kName) || q.id() == k.id()) {
    return false;
  }
  const auto& a = static_cast<const FusibleRope&>(q.primitive()).options;
  const auto& b = static_cast<const FusibleRope&>(k.primitive()).options;
  const auto& inputs_a = q.inputs();
  const auto& inputs_b = k.inputs();
  return a.dim == b.dim && a.batches == b.batches && a.length == b.length && a.has_norm == b.has_norm &&
      a.eps == b.eps && a.scale == b.scale &&
      FusibleRope::offset_of(inputs_a).id() == FusibleRope::offset_of(inputs_b).id() &&
      FusibleRope::freqs_of(inputs_a).id() == FusibleRope::freqs_of(inputs_b).id();
}

// Attention of q [rows, H, 1, D] that attention_step_kernel() computes, with its operands: new keys and values with the
// elements in the order [rows, KV heads, D].
std::optional<mx::array> attention_step(
    const mx::array& q, const mx::array& keys, const mx::array& values, const Plan& plan, Constants constants,
    mx::Stream stream) {
  const CacheUpdate* of_keys = open_update(keys);
  const CacheUpdate* of_values = open_update(values);
  if (of_keys == nullptr || of_values == nullptr || keys.id() == values.id()) {
    return std::nullopt;
  }
  const mx::array& cached_keys = keys.inputs()[0];
  const mx::array& cached_values = values.inputs()[0];
  const mx::array* transposed_key = operand_of_row_transposition(keys.inputs()[1]);
  const mx::array& k = transposed_key != nullptr ? *transposed_key : keys.inputs()[1];
  const mx::array& v = values.inputs()[1];
  // If there is one row, a transposition does not change the order of the elements of the new value.
  const mx::array* new_value = operand_of_transposition(v);
  const bool has_order = new_value != nullptr || plan.spans.size() == 1;
  if (!has_same_rope(q, k) || !has_order || !writes_last(*of_keys, cached_keys, plan.spans) ||
      !writes_last(*of_values, cached_values, plan.spans)) {
    return std::nullopt;
  }
  const auto& rope = static_cast<const FusibleRope&>(q.primitive()).options;
  const auto operand = [](const mx::array& x, int i) { return x.inputs()[2 * x.sibling_position() + i]; };
  const mx::array offset = FusibleRope::offset_of(q.inputs());
  const mx::array workspace = workspace_of(stream, plan.work);
  SequenceKernel::Call call{
      {operand(q, 0), operand(q, 1), operand(k, 0), operand(k, 1), new_value != nullptr ? *new_value : v, offset,
       FusibleRope::freqs_of(q.inputs()), cached_keys, cached_values, workspace},
      {}, {q.shape()}, q.dtype(), {keys.shape(2), plan.max_parts, rope.offset.value_or(0)}, plan.blocks, kThreads,
      {kStepKeys, kStepValues}, {cached_keys, cached_values}, /*leaves_gpu_idle=*/true};
  if (rope.offset) {
    // A kernel that gets the offset by value does not wait for the memory of the host, where a single number lies.
    call.inputs[kStepOffset] = workspace;
  }
  constants.insert(
      constants.end(),
      {{"kOwn", 1}, {"kNorm", rope.has_norm}, {"kEps", std::bit_cast<int>(rope.eps)},
       {"kPositionScale", std::bit_cast<int>(rope.scale)}, {"kPerRow", offset.size() > 1},
       {"kHasOffset", rope.offset.has_value()}});
  const auto& kernel = attention_step_kernel(static_cast<int>(plan.spans.size()));
  const mx::array y = run(kernel, std::move(call), workspace, plan, std::move(constants), stream);
  CacheUpdate::take_over(keys, y);
  CacheUpdate::take_over(values, y);
  return y;
}

// Attention of q [rows, H, 1, D] to positions of KV caches: see kBlock.
std::optional<mx::array> attention(
    const mx::array& q, const mx::array& keys, const mx::array& values, float scale, const std::vector<Span>& spans,
    mx::Stream stream) {
  const int dim = q.shape(3), heads = q.shape(1), key_heads = keys.shape(1);
  const int lanes = dim * static_cast<int>(q.itemsize()) / 16;
  const bool fits = keys.shape() == values.shape() && keys.shape(3) == dim && key_heads > 0 &&
      heads % key_heads == 0 && lanes <= kWarp && std::has_single_bit(static_cast<unsigned>(lanes)) &&
      lanes * 16 == dim * static_cast<int>(q.itemsize()) && is_aligned(keys) && is_aligned(values);
  if (!fits || q.size() == 0 || q.shape(0) * heads > kMaxGroups || spans.size() > kMaxSpans) {
    return std::nullopt;
  }
  const Plan plan(q, key_heads, spans);
  auto constants = constants_of(plan, dim, scale);
  if (auto y = attention_step(q, keys, values, plan, constants, stream)) {
    return y;
  }
  constants.push_back({"kOwn", 0});
  const mx::array workspace = workspace_of(stream, plan.work);
  SequenceKernel::Call call{
      {q, keys, values, workspace}, {}, {q.shape()}, q.dtype(), {keys.shape(2), plan.max_parts}, plan.blocks, kThreads,
      {kKeys, kValues}, {}, /*leaves_gpu_idle=*/true};
  const auto& kernel = attention_kernel(static_cast<int>(plan.spans.size()));
  return run(kernel, std::move(call), workspace, plan, std::move(constants), stream);
}

} // namespace

std::optional<mx::array> attention_of_token(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, mx::Stream stream) {
  if (!is_cuda(stream) || q.ndim() != 4 || q.shape(2) != 1 || !has_float_dtype(q, k.dtype()) ||
      q.dtype() != v.dtype()) {
    return std::nullopt;
  }
  const auto keys = cache_part(k);
  const auto values = cache_part(v);
  if (!keys || !values || k.shape(0) != q.shape(0) || k.shape(2) == 0 || keys->span.start != values->span.start ||
      keys->span.stop != values->span.stop) {
    return std::nullopt;
  }
  return attention(q, keys->cache, values->cache, scale, {keys->span}, stream);
}

std::optional<mx::array> attention_of_rows(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, const std::vector<Span>& spans,
    mx::Stream stream) {
  const auto is_cache = [&](const mx::array& x) {
    return x.dtype() == q.dtype() && (x.status() == mx::array::Status::unscheduled || x.flags().row_contiguous);
  };
  if (!is_cuda(stream) || !has_float_dtype(q, k.dtype()) || !is_cache(k) || !is_cache(v) || k.shape(0) != 1) {
    return std::nullopt;
  }
  const mx::array* operand = operand_of_row_transposition(q);
  const mx::array rows = operand != nullptr ? *operand : mx::transpose(q, {2, 1, 0, 3}, stream);
  const auto y = attention(rows, k, v, scale, spans, stream);
  return y ? std::optional(mx::transpose(*y, {2, 1, 0, 3}, stream)) : std::nullopt;
}

} // namespace executorch_mlx::gpu
