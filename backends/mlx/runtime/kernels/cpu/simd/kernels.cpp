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

extern const Kernels kernels = {.multiplies_bfloat16_pairs = kMultipliesPairs,
    .dot_rows = dot_rows,
    .panel_rows = kLanes,
    .panels_from_rows = kPanelsFromRows,
    .panel_size = panel_size,
    .pack_panel = pack_panel,
    .multiply_panels = multiply_panels,
    .multiply_streamed_panels = multiply_streamed_panels,
    .float_panel_rows = kFloatPanelRows,
    .pack_float_panel = pack_float_panel,
    .multiply_float_panel = multiply_float_panel,
    .finish_float_results = finish_float_results,
    // select_kernels.cpp adds these two.
    .multiply_tiles = nullptr,
    .multiply_value_tiles = nullptr,
    .multiply_columns = multiply_columns,
    .column_panel_width = column_panel_width,
    .multiply_recurrent_panel = multiply_recurrent_panel,
    .transpose = transpose_rows,
    .multiply_transposed = multiply_transposed,
    .arrange_for_quantized = arrange_for_quantized,
    .quantized_rows = quantized_rows,
    .dequantize_rows = dequantize_rows,
    .pack_quantized_panel = pack_quantized_panel,
    .dequantize_entries = dequantize_entries,
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
    .has_fast_integers = true,
#else
    .has_fast_integers = false,
#endif
    .bytes_of_integer = bytes_of_integer,
    .round_row = round_row,
    .multiply_integers = multiply_integers,
    .widen = widen,
    .narrow = narrow,
    .add = add,
    .subtract = subtract,
    .multiply = multiply,
    .maximum = maximum,
    .exponential = exponential,
    .silu = silu,
    .sigmoid = sigmoid,
    .tanh = tanh,
    .gelu = gelu,
    .gelu_tanh = gelu_tanh,
    .erf = erf,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .rotate = rotate,
    .scale = scale,
    .softmax_numerators = softmax_numerators,
    .has_nan = has_nan,
    .hide_scores = hide_scores,
    .recurrence_columns = recurrence_columns,
    .gated_recurrence = gated_recurrence,
    .scan_channels = scan_channels,
    .selective_scan = selective_scan,
    .widen_logits = widen_logits,
    .sum_probability_weights = sum_probability_weights,
    .random_words = random_words,
    .convolve_small_groups = convolve_small_groups};

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
