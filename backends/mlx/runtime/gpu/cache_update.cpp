// Updates of a KV cache that a kernel of attention can take over.
#include <memory>
#include <vector>

#include "../memory/host_memory.h"
#include "cuda_kernel.h"
#include "fused.h"
#include "lazy.h"
#include "sequence_kernel.h"

namespace executorch_mlx::gpu {

void CacheUpdate::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if (is_taken_over_) {
    return outputs[0].copy_shared_buffer(inputs[0]);
  }
  // MLX updates a cache in place only if nothing else refers to it, so compute() gets other arrays.
  const auto placeholder = [](const mx::array& x) { return without_memory(x.shape(), x.dtype()); };
  const mx::array y = compute({placeholder(inputs[0]), placeholder(inputs[1])});
  y.primitive().eval_gpu(inputs, outputs);
}

mx::array CacheUpdate::compute(const std::vector<mx::array>& inputs) {
  mx::Shape stop = inputs[0].shape();
  stop[2] = position + 1;
  return mx::slice_update(inputs[0], inputs[1], {0, 0, position, 0}, stop, stream());
}

void CacheUpdate::take_over(mx::array update, const mx::array& writer) {
  static_cast<CacheUpdate&>(update.primitive()).is_taken_over_ = true;
  update.inputs() = {update.inputs()[0], writer};
}

const CacheUpdate* open_update(const mx::array& x) {
  const auto* update = is_lazy(x, CacheUpdate::kName) ? static_cast<const CacheUpdate*>(&x.primitive()) : nullptr;
  return update != nullptr && !update->is_taken_over() ? update : nullptr;
}

void join_sequences(const std::vector<mx::array>& arrays) {
  std::vector<mx::array*> writers;
  for (mx::array x : arrays) {
    if (is_lazy(x, CacheUpdate::kName) && static_cast<const CacheUpdate&>(x.primitive()).is_taken_over()) {
      writers.push_back(&x.inputs()[1]);
    }
  }
  SequenceKernel::replace_by_ends(writers);
}

std::optional<int> updated_position(const mx::array& x) {
  return is_lazy(x, CacheUpdate::kName) ? std::optional(static_cast<const CacheUpdate&>(x.primitive()).position)
                                        : std::nullopt;
}

std::optional<mx::array> update_position(
    const mx::array& cache, const mx::array& update, const mx::Shape& start, const mx::Shape& stop, mx::Stream stream) {
  if (!is_cuda(stream) || cache.ndim() != 4 || update.dtype() != cache.dtype()) {
    return std::nullopt;
  }
  const int position = start[2];
  mx::Shape end = cache.shape();
  end[2] = position + 1;
  mx::Shape slice = cache.shape();
  slice[2] = 1;
  if (start != mx::Shape{0, 0, position, 0} || stop != end || update.shape() != slice) {
    return std::nullopt;
  }
  return mx::array(
      cache.shape(), cache.dtype(), std::make_shared<CacheUpdate>(stream, position), std::vector{cache, update});
}

} // namespace executorch_mlx::gpu
