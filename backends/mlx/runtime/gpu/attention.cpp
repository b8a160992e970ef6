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
#include "attention_kernels.h"
#include "fused.h"
#include "lazy.h"
#include "sequence_kernel.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

// A block computes up to kMaxHeads query heads that share keys and values, for one part of the positions: see
// parts_of().
constexpr int kMaxHeads = 2;
constexpr int kMaxUndivided = 256; // positions that are one part: to combine several takes two microseconds
constexpr int kPositionsOfSmallPart = 64;
constexpr int kPositionsOfPart = 512;
constexpr int kMaxBlocksOfSmallParts = 128; // about one for each multiprocessor

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
// row: see attention_kernels.h.
struct Plan {
  Plan(const mx::Shape& q, int key_heads, const std::vector<Span>& spans)
      : spans(spans),
        heads(q[1]),
        shared(heads / key_heads),
        heads_of_block(std::gcd(shared, kMaxHeads)),
        work(q[0] * heads * kMaxParts * (q[3] + 2)) {
    for (const auto& [start, stop] : spans) {
      parts.push_back(parts_of(stop - start, heads / heads_of_block));
    }
    max_parts = *std::max_element(parts.begin(), parts.end());
    blocks = q[0] * heads / heads_of_block * max_parts;
  }

  // The numbers of a kernel: those of each span come last. With `rotated_by`, they are those of
  // attention_step_kernel().
  std::vector<int> numbers(int capacity, const std::vector<int>* rotated_by = nullptr) const {
    std::vector<int> result{capacity, max_parts};
    for (size_t i = 0; i < spans.size(); ++i) {
      result.insert(result.end(), {spans[i].start, spans[i].stop - spans[i].start, parts[i]});
      if (rotated_by != nullptr) {
        const auto has_same_end = [&](const Span& other) { return other.stop == spans[i].stop; };
        const auto last = std::find_if(spans.rbegin(), spans.rend(), has_same_end).base() - spans.begin() - 1;
        result.insert(result.end(), {(*rotated_by)[i], (*rotated_by)[last], static_cast<int>(last)});
      }
    }
    return result;
  }

  std::vector<Span> spans;
  int heads, shared, heads_of_block;
  int work; // floats in the workspace, enough for any length
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
  return {{"kThreads", kThreads}, {"kDim", dim}, {"kHeads", plan.heads}, {"kShared", plan.shared},
      {"kPerBlock", plan.heads_of_block}, {"kMaxGroups", kMaxGroups}, {"kSpans", static_cast<int>(plan.spans.size())},
      // The kernel computes powers of 2.
      {"kScale", std::bit_cast<int>(scale * std::numbers::log2e_v<float>)}};
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
std::optional<mx::array> attention_step(const mx::array& q, const mx::array& keys, const mx::array& values,
    const Plan& plan, Constants constants, mx::Stream stream) {
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
  const int capacity = keys.shape(2);
  const size_t rows = plan.spans.size();
  const bool is_one = rope.offsets.size() == 1, has_offsets = is_one || rope.offsets.size() == rows;
  const auto rotated_by = has_offsets && !is_one ? rope.offsets : std::vector<int>(rows, is_one ? rope.offsets[0] : 0);
  SequenceKernel::Call call{
      {operand(q, 0), operand(q, 1), operand(k, 0), operand(k, 1), new_value != nullptr ? *new_value : v, offset,
          FusibleRope::freqs_of(q.inputs()), cached_keys, cached_values, workspace},
      {}, {q.shape()}, q.dtype(), plan.numbers(capacity, &rotated_by), plan.blocks, kThreads,
      {kStepFreqs, kStepKeys, kStepValues}, {cached_keys, cached_values}, /*leaves_gpu_idle=*/true};
  if (plan.max_parts > 1) {
    call.written.push_back(workspace);
  }
  call.workspace = workspace;
  if (has_offsets) {
    // A kernel that gets the offsets by value does not wait for the memory of the host, where they lie.
    call.inputs[kStepOffset] = workspace;
    for (size_t i = 0; i < rows; ++i) {
      call.places.push_back({rotated_by[i], plan.spans[i]});
    }
    call.at = [shape = q.shape(), key_heads = keys.shape(1), capacity](const std::vector<TokenPlace>& places) {
      std::vector<Span> spans;
      std::vector<int> rotated_by;
      for (const auto& place : places) {
        spans.push_back(place.span);
        rotated_by.push_back(place.position);
      }
      const Plan plan(shape, key_heads, spans);
      return SequenceKernel::Work{plan.numbers(capacity, &rotated_by), plan.blocks};
    };
  }
  constants.insert(constants.end(),
      {{"kOwn", 1}, {"kNorm", rope.has_norm}, {"kEps", std::bit_cast<int>(rope.eps)},
          {"kPositionScale", std::bit_cast<int>(rope.scale)}, {"kPerRow", offset.size() > 1},
          {"kHasOffset", has_offsets}});
  const auto& kernel = attention_step_kernel(static_cast<int>(rows));
  const mx::array y = kernel(std::move(call), std::move(constants), stream)[0];
  CacheUpdate::take_over(keys, y);
  CacheUpdate::take_over(values, y);
  return y;
}

// Attention of q [rows, H, 1, D] to positions of KV caches: see attention_kernels.h.
std::optional<mx::array> attention(const mx::array& q, const mx::array& keys, const mx::array& values, float scale,
    const std::vector<Span>& spans, mx::Stream stream) {
  const int dim = q.shape(3), heads = q.shape(1), key_heads = keys.shape(1);
  const int lanes = dim * static_cast<int>(q.itemsize()) / 16;
  const bool fits = keys.shape() == values.shape() && keys.shape(3) == dim && key_heads > 0 && heads % key_heads == 0 &&
      lanes <= kWarp && std::has_single_bit(static_cast<unsigned>(lanes)) &&
      lanes * 16 == dim * static_cast<int>(q.itemsize()) && is_aligned(keys) && is_aligned(values);
  if (!fits || q.size() == 0 || q.shape(0) * heads > kMaxGroups || spans.size() > kMaxSpans) {
    return std::nullopt;
  }
  const Plan plan(q.shape(), key_heads, spans);
  auto constants = constants_of(plan, dim, scale);
  if (auto y = attention_step(q, keys, values, plan, constants, stream)) {
    return y;
  }
  constants.push_back({"kOwn", 0});
  const mx::array workspace = workspace_of(stream, plan.work);
  SequenceKernel::Call call{{q, keys, values, workspace}, {}, {q.shape()}, q.dtype(), plan.numbers(keys.shape(2)),
      plan.blocks, kThreads, {kKeys, kValues}, {}, /*leaves_gpu_idle=*/true};
  if (plan.max_parts > 1) {
    call.written.push_back(workspace);
  }
  const auto& kernel = attention_kernel(static_cast<int>(plan.spans.size()));
  return kernel(std::move(call), std::move(constants), stream)[0];
}

} // namespace

std::optional<mx::array> attention_of_token(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, mx::Stream stream) {
  if (!is_used(Kernel::attention, stream) || q.ndim() != 4 || q.shape(2) != 1 || !has_float_dtype(q, k.dtype()) ||
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

std::optional<mx::array> attention_of_rows(const mx::array& q, const mx::array& k, const mx::array& v, float scale,
    const std::vector<Span>& spans, mx::Stream stream) {
  const auto is_cache = [&](const mx::array& x) {
    return x.dtype() == q.dtype() && (x.status() == mx::array::Status::unscheduled || x.flags().row_contiguous);
  };
  if (!is_used(Kernel::attention, stream) || !has_float_dtype(q, k.dtype()) || !is_cache(k) || !is_cache(v) ||
      k.shape(0) != 1) {
    return std::nullopt;
  }
  const mx::array* operand = operand_of_row_transposition(q);
  const mx::array rows = operand != nullptr ? *operand : mx::transpose(q, {2, 1, 0, 3}, stream);
  const auto y = attention(rows, k, v, scale, spans, stream);
  return y ? std::optional(mx::transpose(*y, {2, 1, 0, 3}, stream)) : std::nullopt;
}

} // namespace executorch_mlx::gpu
