// Prints why the functions of CUDA and of MLX's backend for CUDA cannot be called: "" if they can. argv[1] is the
// version of MLX.
#include <cstdio>

#include "mlx_internals/cuda.cpp"

bool executorch_mlx::internals::are_usable() { return true; }

int main(int, char** argv) {
  const auto mismatch = executorch_mlx::internals::version_mismatch(argv[1]);
  std::puts((mismatch.empty() ? executorch_mlx::gpu::why_unusable() : mismatch).c_str());
}
