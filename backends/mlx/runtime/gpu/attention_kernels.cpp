#include "attention_kernels.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../error.h"

namespace executorch_mlx::gpu {

namespace {

// The parts of the source of both kernels. kBlock and the numbers of kSpanNumbers say what the block computes. kSetup
// starts to load the first keys and values, and each iteration starts to load those of the next one. Between kSetup and
// kAttention, a kernel waits for its inputs and defines query_row, the kPerBlock query heads. If kOwn is 1, the last
// position is not in the cache, but in own_key and own_value.
constexpr char kBlock[] = R"(
  const int first_head = blockIdx.x / max_parts * kPerBlock;  // counted over all rows
  const int part = blockIdx.x % max_parts;
  const int row = first_head / kHeads;
)";

// Of the span of a row. In attention_step_kernel(), `own_row` is the last row whose span ends with the same position:
// this row writes it. The query is rotated by `rotated_by`, and the key of that row by `own_rotated_by`.
const std::vector<const char*> kSpanNumbers{"start", "length", "parts"};
const std::vector<const char*> kStepNumbers{"start", "length", "parts", "rotated_by", "own_rotated_by", "own_row"};

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
  KernelsOfSpans(const char* name, std::vector<std::string> inputs, const std::vector<const char*>& span_numbers,
      std::string before_attention)
      : name_(name),
        inputs_(std::move(inputs)),
        span_numbers_(span_numbers),
        before_attention_(std::move(before_attention)) {}

  const SequenceKernel& operator()(int spans) {
    std::lock_guard lock(mutex_);
    const auto found = kernels_.find(spans);
    if (found != kernels_.end()) {
      return found->second;
    }
    std::vector<std::string> numbers{"capacity", "max_parts"};
    for (int i = 0; i < spans; ++i) {
      for (const char* number : span_numbers_) {
        numbers.push_back(str(number, i));
      }
    }
    const std::string body =
        kBlock + select_numbers(span_numbers_, spans, "row") + kSetup + before_attention_ + kAttention;
    const std::vector<std::string> weights, outputs{"y"};
    return kernels_.try_emplace(spans, name_, inputs_, weights, outputs, numbers, body).first->second;
  }

 private:
  const char* name_;
  std::vector<std::string> inputs_;
  const std::vector<const char*>& span_numbers_;
  std::string before_attention_;
  std::mutex mutex_;
  std::map<int, SequenceKernel> kernels_;
};

} // namespace

const SequenceKernel& attention_kernel(int spans) {
  static KernelsOfSpans kernels("attention_of_token", {"q", "keys", "values", "workspace"}, kSpanNumbers, R"(
  wait_for_inputs();
  const T* const query_row = q + first_head * kDim;
  const T* const own_key = nullptr;
  const T* const own_value = nullptr;
)");
  return kernels(spans);
}

const SequenceKernel& attention_step_kernel(int spans) {
  static KernelsOfSpans kernels("attention_step",
      {"new_query", "query_weight", "new_key", "key_weight", "new_value", "offset", "freqs", "keys", "values",
          "workspace"},
      kStepNumbers, str(kNormRope, R"(
  __shared__ __align__(16) T query_row[kPerBlock * kDim], own_key[kDim], own_value[kDim];
  const bool has_own_row = kSpans == 1 || own_row == row;
  const int source = (first_head + (has_own_row ? 0 : (own_row - row) * kHeads)) / kShared * kDim;  // of key and value
  const int warp = threadIdx.x / 32;
  if (kHasOffset && warp <= kPerBlock) {
    const int by = warp == kPerBlock ? own_rotated_by : rotated_by;
    set_rotation(__int_as_float(kPositionScale) * static_cast<float>(by));
  }
  wait_for_inputs();
  if (!kHasOffset && warp <= kPerBlock) {
    const int of = warp == kPerBlock && !has_own_row ? own_row : row;
    set_rotation(__int_as_float(kPositionScale) * static_cast<float>(offset[kPerRow ? of : 0]));
  }
  if (warp < kPerBlock) {
    norm_rope(new_query + (first_head + warp) * kDim, query_weight, query_row + warp * kDim);
  } else if (warp == kPerBlock) {
    norm_rope(new_key + source, key_weight, own_key);
  } else if (warp == kPerBlock + 1) {
    for (int i = threadIdx.x % 32; i < kDim; i += 32) {
      own_value[i] = new_value[source + i];
    }
  }
  __syncthreads();
  if (first_head % kShared == 0 && part == 0 && group == 0 && has_own_row) {
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

} // namespace executorch_mlx::gpu
