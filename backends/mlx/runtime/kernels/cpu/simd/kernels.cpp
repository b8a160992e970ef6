// The only source file of the inner loops. It is compiled once per instruction set, into the namespace
// EXECUTORCH_MLX_ISA. It must not include headers that define inline functions outside this namespace, such as
// those of the standard library. Such a function would be compiled once per instruction set, under one name. The
// linker keeps one of the copies, which may use instructions that the processor lacks.
#include "kernels.h"

#include "columns.h"
#include "convolution.h"
#include "dot.h"
#include "entries.h"
#include "float_panels.h"
#include "integer_panels.h"
#include "panels.h"
#include "quantized.h"
#include "sampling.h"
#include "streamed_panels.h"
#include "token_recurrence.h"
#include "transposed.h"
#include "vector.h"
#include "vector_functions.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

extern const Kernels kernels = {
    .multiplies_bfloat16_pairs = kMultipliesPairs,
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
    .has_fast_integers = true,
#else
    .has_fast_integers = false,
#endif
    .panel_rows = kLanes,
    .panels_from_rows = kPanelsFromRows,
    .float_panel_rows = kFloatPanelRows,
#define KERNEL(result, name, ...) .name = name,
#include "kernels.inc"
#undef KERNEL
};

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
