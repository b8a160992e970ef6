#include <mlx/mlx.h>

#include "device.h"
#include "kernels/blas.h"
#include "memory_limit.h"

namespace executorch_mlx::cpu {

namespace {

// Whether libmlx calls our cblas_sgemm. Its symbols may have been bound before we were loaded, so this
// multiplies two matrices and checks whether the call arrived.
bool is_blas_replaced() {
  const auto calls = executorch_mlx_blas_calls();
  const auto stream = shared_stream(mx::Device::cpu);
  const auto x = mx::ones({2, 2}, mx::float32, stream);
  std::lock_guard lock(memory_mutex());  // serializes evaluations
  mx::eval(mx::matmul(x, x, stream));
  return executorch_mlx_blas_calls() != calls;
}

} // namespace

} // namespace executorch_mlx::cpu

// The BLAS that multiplies libmlx's matrices on a CPU: the name that OpenBLAS reports; "mlx" for the one
// in the mlx wheel; "mlx, loaded first" if libmlx was loaded too early for OpenBLAS to replace it.
extern "C" __attribute__((visibility("default"))) const char* executorch_mlx_blas() {
  static const char* const name =
      executorch_mlx::cpu::is_blas_replaced() ? executorch_mlx_blas_name() : "mlx, loaded first";
  return name;
}
