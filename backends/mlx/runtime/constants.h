// Loads constants, and the initial contents of mutable buffers, from the named data of a .pte.
#pragma once

#include <executorch/runtime/core/named_data_map.h>

#include "options.h"
#include "program.h"
#include "state.h"

namespace executorch_mlx {

using executorch::runtime::NamedDataMap;

// Reuses constants that another method of the program has loaded.
void load_constants(const Program& program, const NamedDataMap* data, SharedData& shared, State& state);

// Creates the buffers and caches that no other method of the session has created. A program with an
// init chain, which may write buffers, gets their initial contents in any case. Together the buffers have
// at most `options.limits.operations` elements.
void load_buffers(
    const Program& program,
    const NamedDataMap* data,
    Session& session,
    const Options& options,
    State& state);

} // namespace executorch_mlx
