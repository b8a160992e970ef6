// Loads constants, and the initial contents of mutable buffers, from the named data of a .pte.
#pragma once

#include <executorch/runtime/core/named_data_map.h>

#include "options.h"
#include "program.h"
#include "state.h"

namespace executorch_mlx {

using executorch::runtime::NamedDataMap;

// Returns the size in bytes of the constants and buffers that load_constants() and load_buffers() would create.
size_t bytes_to_load(const Program& program, const SharedData& shared, const Session& session);

// Fills the constant slots of `state`. A constant that another method of the program has loaded is taken from
// `shared`; the others are read from `data` and added to `shared`. Throws Failure if a constant is missing or its
// size is wrong. On an NVIDIA GPU, `stream` copies large constants and buffers to the memory of the GPU.
void load_constants(
    const Program& program, const NamedDataMap* data, SharedData& shared, State& state, mx::Stream stream);

// Connects `state` to the mutable buffers and KV caches of the session, and creates those that no other method of
// the session has created yet. Fills the slots of new buffers with their initial contents. If the program has an
// init chain, fills the slots of all its buffers, because the init chain may use them; State::finish_loading() later
// discards the contents of those that another method has filled. Throws Failure if the buffers that it fills have more
// elements together than `options.limits.operations`.
void load_buffers(
    const Program& program,
    const NamedDataMap* data,
    Session& session,
    const Options& options,
    State& state,
    mx::Stream stream);

} // namespace executorch_mlx
