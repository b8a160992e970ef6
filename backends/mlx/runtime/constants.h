// Loads constants, and the initial contents of mutable buffers, from the named data of a .pte.
#pragma once

#include <executorch/runtime/core/named_data_map.h>

#include <vector>

#include "program.h"
#include "state.h"

namespace executorch_mlx {

using executorch::runtime::NamedDataMap;

// Bytes of the constants and buffers that load_constants() and load_buffers() would create.
size_t bytes_to_load(const Program& program, const SharedData& shared, const Session& session);

// Reuses constants that another method of the program has loaded.
void load_constants(const Program& program, const NamedDataMap* data, SharedData& shared, State& state);

// Creates the buffers and caches that no other method of the session has created. A program with an
// init chain, which may write buffers, gets their initial contents in any case.
void load_buffers(
    const Program& program,
    const NamedDataMap* data,
    Session& session,
    const std::vector<int>& kv_windows,
    State& state);

} // namespace executorch_mlx
