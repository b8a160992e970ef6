// The only source file of the inner loops: compiled once per instruction set, into the namespace
// EXECUTORCH_MLX_ISA. It must not include headers with inline functions of their own, such as the standard
// library's: the linker would keep one copy, which may use instructions that the processor lacks.
#include "kernels.h"

#include "dot.h"
#include "elementwise.h"
#include "quantized.h"
#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

extern const Kernels kernels = {
    .dot_rows = dot_rows,
    .arrange = arrange,
    .arranged_size = arranged_size,
    .quantized_rows = quantized_rows,
    .dequantize_rows = dequantize_rows,
    .widen = widen,
    .silu = silu,
    .exp_sum = exp_sum,
    .rms_norm = rms_norm,
    .rotate = rotate};

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
