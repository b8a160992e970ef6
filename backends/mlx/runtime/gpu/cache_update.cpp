// Updates of a KV cache that a kernel of attention can take over.
#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../error.h"
#include "mlx_internals/cuda.h"
#include "cuda_kernel.h"
#include "fused.h"
#include "kernel_source.h"
#include "lazy.h"
#include "mlx_internals/arrays.h"
#include "mlx_internals/graph.h"
#include "sequence_kernel.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

constexpr char kName[] = "update_positions";

// A thread writes an element. The strides are those of `update`. A position below 0 is not written.
constexpr char kElement[] = R"(
  const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= size) {
    return;
  }
  const uint32_t column = at % width;
  const uint32_t i = at / width % kPositions;
  const uint32_t head = at / width / kPositions % heads;
  const uint32_t batch = at / width / kPositions / heads;
)";

constexpr char kWrite[] = R"(
  if (position < 0) {
    return;
  }
  cache[(uint64_t(batch * heads + head) * capacity + position) * width + column] =
      update[batch * stride0 + head * stride1 + i * stride2 + column * stride3];
)";

// The kernel for so many positions.
CUfunc_st* kernel(mx::Dtype dtype, size_t positions, mx::Stream stream) {
  static std::mutex mutex;
  static std::map<std::vector<int>, CUfunc_st*> functions;
  const int count = static_cast<int>(positions);
  std::lock_guard lock(mutex);
  CUfunc_st*& function = functions[{stream.device.index, static_cast<int>(dtype.val()), count}];
  if (function == nullptr) {
    std::vector<std::string> parameters{input_parameter(dtype, "update"), output_parameter(dtype, "cache")};
    for (const char* stride : {"stride0", "stride1", "stride2", "stride3"}) {
      parameters.push_back(str("long long ", stride));
    }
    for (const char* number : {"size", "width", "heads", "capacity"}) {
      parameters.push_back(number_parameter(number));
    }
    for (int i = 0; i < count; ++i) {
      parameters.push_back(number_parameter(str("position", i)));
    }
    const std::string body = kElement + select_numbers({"position"}, count, "i") + kWrite;
    const std::string source = kernel_source(kName, dtype, {{"kPositions", count}}, parameters, body);
    function = load(kName, compile(kName, source, stream), stream);
  }
  return function;
}

} // namespace

void CacheUpdate::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  internals::place(outputs[0], inputs[0]);
  if (is_taken_over_) {
    return;
  }
  const mx::array& update = inputs[1];
  const auto address = [](const mx::array& x) { return reinterpret_cast<uintptr_t>(address_on_gpu(x)); };
  KernelRun run{kernel(update.dtype(), positions.size(), stream()), blocks_of(update.size(), kThreads), kThreads,
      {address(update), address(outputs[0])}, /*starts_early=*/false};
  run.arguments.insert(run.arguments.end(), update.strides().begin(), update.strides().end());
  for (const int number : {static_cast<int>(update.size()), update.shape(3), update.shape(1), outputs[0].shape(2)}) {
    run.arguments.push_back(number);
  }
  for (auto position = positions.begin(); position != positions.end(); ++position) {
    const bool is_last = std::find(position + 1, positions.end(), *position) == positions.end();
    run.arguments.push_back(static_cast<uint32_t>(is_last ? *position : -1));
  }
  const auto graph = KernelGraph::make(stream());
  graph->reads(update);
  graph->writes(outputs[0]);
  graph->add(run);
  graph->submit();
}

void CacheUpdate::take_over(mx::array update, const mx::array& writer) {
  static_cast<CacheUpdate&>(update.primitive()).is_taken_over_ = true;
  internals::set_inputs(update, {internals::inputs(update)[0], writer});
}

const CacheUpdate* open_update(const mx::array& x) {
  const auto* update = is_lazy(x, CacheUpdate::kName) ? static_cast<const CacheUpdate*>(&x.primitive()) : nullptr;
  return update != nullptr && !update->is_taken_over() ? update : nullptr;
}

namespace {

bool is_taken_over(const mx::array& x) {
  return is_lazy(x, CacheUpdate::kName) && static_cast<const CacheUpdate&>(x.primitive()).is_taken_over();
}

} // namespace

void join_sequences(const std::vector<mx::array>& arrays) {
  std::vector<mx::array*> writers;
  for (mx::array x : arrays) {
    if (is_taken_over(x)) {
      writers.push_back(&x.inputs()[1]);
    }
  }
  SequenceKernel::replace_by_ends(writers);
}

std::shared_ptr<SequenceKernel::Recording> record(const std::vector<mx::array>& arrays) {
  std::vector<mx::array> results;
  for (const auto& x : arrays) {
    results.push_back(is_taken_over(x) ? x.inputs()[1] : x);
  }
  return SequenceKernel::record(results);
}

std::optional<mx::array> update_positions(
    const mx::array& cache, const mx::array& update, const std::vector<int>& positions, mx::Stream stream) {
  if (!is_used(Kernel::attention, stream) || cache.ndim() != 4 || update.dtype() != cache.dtype() ||
      positions.empty() || positions.size() > kMaxSpans || update.size() == 0 || !cache.flags().row_contiguous ||
      update.size() > static_cast<size_t>(std::numeric_limits<int>::max())) {
    return std::nullopt;
  }
  const auto [lowest, highest] = std::minmax_element(positions.begin(), positions.end());
  const bool are_valid = *lowest >= 0 && *highest < cache.shape(2);
  mx::Shape expected = cache.shape();
  expected[2] = static_cast<int>(positions.size());
  if (!are_valid || update.shape() != expected) {
    return std::nullopt;
  }
  return mx::array(
      cache.shape(), cache.dtype(), std::make_shared<CacheUpdate>(stream, positions), std::vector{cache, update});
}

} // namespace executorch_mlx::gpu
