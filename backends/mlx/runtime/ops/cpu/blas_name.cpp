// Tells which BLAS multiplies float64 and complex matrices, for `executorch-mlx doctor`.
#include <mlx/mlx.h>

#include "call/evaluation.h"
#include "ops/cpu/cpu_kernels.h"
#include "device.h"
#include "kernels/cpu/cblas.h"

namespace executorch_mlx::cpu {

namespace {

// Whether libmlx calls cblas_sgemm of libmlx_cpu_kernels. It does not if the dynamic linker bound the symbols of libmlx
// before libmlx_cpu_kernels was loaded. To find out, this function lets MLX multiply two matrices and checks whether
// libmlx_cpu_kernels has counted a call.
bool is_blas_replaced() {
  const auto calls = kernel::blas_calls();
  const ProgramStream used(mx::Device::cpu);
  const auto x = mx::ones({2, 2}, mx::float32, used.stream);
  evaluate({mx::matmul(x, x, used.stream)}, used.stream);
  return kernel::blas_calls() != calls;
}

} // namespace

std::optional<const char*> blas_name() {
  static const char* const name = is_blas_replaced() ? kernel::blas_name() : "mlx, loaded first";
  return name;
}

} // namespace executorch_mlx::cpu
