#pragma once

namespace executorch_mlx {

// Element types that the kernels read. A bfloat16_pair is two consecutive bfloat16 values of a row. Products of pairs
// need an instruction of their own: see Kernels::multiplies_pairs.
enum class FloatType : int { float32, float16, bfloat16, bfloat16_pair };

// Groups of activations whose largest magnitude is below this number become zeros in 8 bits.
constexpr float kSmallestActivation = 0x1p-100f;

} // namespace executorch_mlx
