// Moves the arguments of a call between ExecuTorch's values and the slots of a program.
#pragma once

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/span.h>

#include <optional>
#include <string_view>
#include <vector>

#include "call/state.h"
#include "memory/mapped_files.h"
#include "program/program.h"

namespace executorch_mlx {

using executorch::runtime::EValue;

// All arguments of a call: first the inputs, then the outputs.
using Arguments = executorch::runtime::Span<EValue*>;

// Checks the number of arguments, and the dtype, shape and memory order of every input tensor. Then copies the
// inputs into their slots in `state`. Throws Failure if an input is invalid.
void read_inputs(const MlxProgram& program, Arguments args, State& state, mx::Stream stream);

// The slot of the int64 input of this name, or nullopt.
std::optional<uint32_t> input_slot(const MlxProgram& program, std::string_view name);

// Returns the arrays of the output tensors, in the order of the outputs, without evaluating them. Checks each
// array against the ExecuTorch tensor of its output, casts the array to the dtype of this tensor where cast_output()
// in call_io.cpp allows a cast, and resizes the ExecuTorch tensor to the shape of the array. Refuses a tensor in the
// memory of a file: a damaged program may name a constant as an output. `files` were mapped when the program was
// loaded.
std::vector<mx::array> collect_outputs(
    const MlxProgram& program, Arguments args, const State& state, const MappedFiles& files, mx::Stream stream);

// Copies `arrays` into the ExecuTorch tensors of the outputs. `arrays` are what collect_outputs() returned, and
// must have been evaluated.
void write_tensor_outputs(const MlxProgram& program, Arguments args, const std::vector<mx::array>& arrays);

// Copies value slots to the outputs that are integers, floats or bools instead of tensors. An output keeps its type.
void write_value_outputs(const MlxProgram& program, Arguments args, const State& state);

} // namespace executorch_mlx
