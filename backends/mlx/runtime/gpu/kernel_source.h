// The source of a CUDA kernel. It includes no header, so NVRTC compiles it in some hundredths of a second: with the
// headers of MLX and CUDA, a kernel would take more than a second, at the start of each process.
#pragma once

#include <mlx/mlx.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// The names and values of the compile-time constants of a kernel. A float is passed as an int with the same bits.
using Constants = std::vector<std::pair<const char*, int>>;

// Declarations of parameters: a pointer to elements that the kernel reads or writes, and an int32 number. Throw
// std::invalid_argument for dtypes that kernels do not support.
std::string input_parameter(mx::Dtype dtype, const std::string& name);
std::string output_parameter(mx::Dtype dtype, const std::string& name);
std::string number_parameter(const std::string& name);

// Declares a variable for each name. Its value is that of the number NAMEi, where i is the value of `index`, which is
// less than `count`.
std::string select_numbers(const std::vector<const char*>& names, int count, const std::string& index);

// Returns the source of a kernel: a function `name` with these parameters. T is `type` in the body and in `header`,
// which precedes the function. In both, the names of C++ for integers of a size can be used, and the types bfloat16 and
// float16, which are converted from and to float explicitly. `attributes` are those of the function in CUDA.
std::string kernel_source(const std::string& name, mx::Dtype type, const Constants& constants,
    const std::vector<std::string>& parameters, std::string_view body, std::string_view header = "",
    std::string_view attributes = "");

} // namespace executorch_mlx::gpu
