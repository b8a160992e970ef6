#pragma once

namespace executorch_mlx {

// Element types that the kernels read.
enum class FloatType : int { float32, float16, bfloat16 };

} // namespace executorch_mlx
