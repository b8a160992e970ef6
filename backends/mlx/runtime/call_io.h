// Moves the arguments of a call between ExecuTorch's values and the slots of a program.
#pragma once

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/span.h>

#include <vector>

#include "program.h"
#include "state.h"

namespace executorch_mlx {

using executorch::runtime::EValue;

// The inputs of a call, then its outputs.
using Arguments = executorch::runtime::Span<EValue*>;

// Checks all inputs against the program's metadata, then copies them into their slots.
void bind_inputs(const Program& program, Arguments args, State& state, mx::Stream stream);

// Checks the output arrays, casts them where the ExecuTorch tensor has another float dtype, and
// resizes these tensors. Evaluates nothing.
std::vector<mx::array> collect_outputs(
    const Program& program,
    Arguments args,
    const State& state,
    mx::Stream stream);

// Copies the evaluated arrays from collect_outputs() into the ExecuTorch tensors.
void write_outputs(const Program& program, Arguments args, const std::vector<mx::array>& arrays);

// Writes the outputs that are integers, floats or bools.
void write_values(const Program& program, Arguments args, const State& state);

} // namespace executorch_mlx
