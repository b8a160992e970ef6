// Which BLAS multiplies matrices on a CPU.
#include <mlx/mlx.h>

#include "device.h"

#if EXECUTORCH_MLX_BLAS
#include "blas.h"
#endif

namespace executorch_mlx {

namespace {

// Whether libmlx calls the names that we define: asked by a product, because what its symbols were
// bound to depends on who loaded it first.
bool is_ours() {
#if EXECUTORCH_MLX_BLAS
  const auto before = executorch_mlx_blas_calls();
  const auto stream = shared_stream(mx::Device::cpu);
  const auto x = mx::ones({2, 2}, mx::float32, stream);
  evaluate({mx::matmul(x, x, stream)}, stream);
  return executorch_mlx_blas_calls() != before;
#else
  return false;
#endif
}

const char* find() {
#if EXECUTORCH_MLX_BLAS
  return is_ours() ? executorch_mlx_blas_name() : "mlx, loaded first";
#else
  return "mlx";
#endif
}

} // namespace

extern "C" {

// The BLAS that libmlx's products come to: OpenBLAS's name for itself; "mlx" for the one that MLX
// brings; "mlx, loaded first" where libmlx was in the process before us.
__attribute__((visibility("default"))) const char* executorch_mlx_blas() {
  static const char* const name = find();
  return name;
}

} // extern "C"

} // namespace executorch_mlx
