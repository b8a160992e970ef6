// Selects the kernels for the instruction set of this processor.
#include <atomic>
#include <cstring>
#include <vector>

#include "blas.h"
#include "kernels.h"

namespace executorch_mlx {

namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
};

// The kernels that this processor supports, fastest first.
std::vector<Choice> choices() {
  std::vector<Choice> result;
#if EXECUTORCH_MLX_X86_KERNELS
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    result.push_back({"avx512_bf16", &avx512_bf16::kernels});
  }
  if (has_avx512) {
    result.push_back({"avx512", &avx512::kernels});
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    result.push_back({"avx2", &avx2::kernels});
  }
#endif
  result.push_back({"portable", &portable::kernels});
  return result;
}

std::atomic<const Kernels*>& selected() {
  static std::atomic<const Kernels*> kernels{choices().front().kernels};
  return kernels;
}

} // namespace

const Kernels& kernels() {
  return *selected().load(std::memory_order_relaxed);
}

} // namespace executorch_mlx

extern "C" bool executorch_mlx_use_kernels(const char* name) {
  using namespace executorch_mlx;
  for (const auto& choice : choices()) {
    if (std::strcmp(choice.name, name) == 0) {
      selected().store(choice.kernels, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}
