// What the runtime and the kernels agree on: element types, and a bound of the quantization of activations.
#pragma once

namespace executorch_mlx {

// Element types that the kernels read. A bfloat16_pair is two consecutive bfloat16 values of a row. Only some CPUs
// multiply pairs: see Kernels::multiplies_bfloat16_pairs.
enum class FloatType : int { float32, float16, bfloat16, bfloat16_pair };

// The quantization of activations to 8 bits sets a group to zeros if its largest magnitude is below this number.
constexpr float kSmallestGroupMaximum = 0x1p-100f;

} // namespace executorch_mlx
