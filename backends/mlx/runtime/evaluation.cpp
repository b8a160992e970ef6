#include "evaluation.h"

#include "memory_limit.h"
#include "memory_plan.h"

namespace executorch_mlx {

Evaluation::Evaluation(
    std::vector<mx::array> arrays, mx::Stream stream, const std::vector<std::uintptr_t>& overwritable)
    : lock_(memory_mutex()), stream_(stream) {
  const size_t limit = memory_limit();
  if (limit == kNoMemoryLimit) [[likely]] {
    stages_.push_back(std::move(arrays));
  } else {
    stages_ = plan_stages(std::move(arrays), overwritable, active_memory(), limit);
  }
}

void Evaluation::run() {
  try {
    for (auto& stage : stages_) {
      mx::eval(std::exchange(stage, {}));
    }
  } catch (...) {
    mx::synchronize(stream_);
    throw;
  }
}

void evaluate(std::vector<mx::array> arrays, mx::Stream stream) {
  Evaluation(std::move(arrays), stream).run();
}

} // namespace executorch_mlx
