// Between ExecuTorch's values and the slots of a program.
#pragma once

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/named_data_map.h>
#include <executorch/runtime/core/span.h>

#include "program.h"
#include "state.h"

namespace executorch_mlx {

using executorch::runtime::EValue;
using executorch::runtime::NamedDataMap;
using Arguments = executorch::runtime::Span<EValue*>;

// Constants and mutable buffers: those that other methods of the program have are
// theirs, the others are copied. Buffers that the init chain is to write come with
// their first contents in any case.
void load_constants(const Program& program, const NamedDataMap* data, SharedData& shared, State& state);
void load_buffers(
    const Program& program,
    const NamedDataMap* data,
    Session& session,
    const std::vector<int>& kv_windows,
    State& state);

// Checks the inputs against what the program was exported for, all of them
// before the first is read, and copies them into their slots.
void bind_inputs(const Program& program, Arguments args, State& state, mx::Stream stream);

// The arrays that go to the outputs, checked and with the ExecuTorch tensors
// resized to them. Nothing is evaluated yet.
std::vector<mx::array> collect_outputs(
    const Program& program,
    Arguments args,
    const State& state,
    mx::Stream stream);

// Copies evaluated outputs, from collect_outputs, into the ExecuTorch tensors.
void write_outputs(const Program& program, Arguments args, const std::vector<mx::array>& arrays);

// Writes the integers, floats and bools among the outputs.
void write_values(const Program& program, Arguments args, const State& state);

} // namespace executorch_mlx
