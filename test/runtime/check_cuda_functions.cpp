// Prints why the functions of CUDA and of MLX's backend for CUDA cannot be called: "" if they can. argv[1] is the
// version of MLX.
#include <cstdio>

#include "gpu/cuda_api.cpp"

int main(int, char** argv) { std::puts(executorch_mlx::gpu::why_unusable(argv[1]).c_str()); }
