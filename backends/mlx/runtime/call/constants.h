// Loads constants, and the initial contents of mutable buffers, from the named data of a .pte.
#pragma once

#include <executorch/runtime/core/named_data_map.h>

#include "call/state.h"
#include "options.h"
#include "program/program.h"

namespace executorch_mlx {

using executorch::runtime::NamedDataMap;

// Returns the size in bytes of the constants and buffers that load_constants() and load_buffers() would create.
size_t bytes_to_load(const MlxProgram& program, const SharedData& shared, const Session& session);

// Lets load_constants() report what it loads on this thread: executorch_mlx_on_load of delegate.h.
using OnLoad = bool (*)(void* user_data, size_t loaded, size_t total);
void set_on_load(OnLoad callback, void* user_data);

// Fills the constant slots of `state`. Takes a constant from `shared` if another method of the program has loaded it.
// Otherwise reads it from `data` and adds it to `shared`. Throws Failure if a constant is missing or its size is wrong.
// If `stream` is on an NVIDIA GPU, uses it to copy large constants to the memory of the GPU.
void load_constants(
    const MlxProgram& program, const NamedDataMap* data, SharedData& shared, State& state, mx::Stream stream);

// Connects `state` to the mutable buffers and KV caches of the session. Creates each buffer or cache that no other
// method of the session has created yet. Fills the slot of a new buffer with its initial contents. If the program has
// an init chain, also fills the slots of older buffers, because the init chain may use them; State::finish_loading()
// later discards these contents. Throws Failure if the slots that this function fills have more elements together than
// `options.limits.operations`. If `stream` is on an NVIDIA GPU, uses it to copy large contents to the memory of the
// GPU.
void load_buffers(const MlxProgram& program, const NamedDataMap* data, Session& session, const Options& options,
    State& state, mx::Stream stream);

// Fills the buffer slots of `state` with the initial contents, as load_buffers() does. Throws Failure if they would
// exceed the memory limit.
void fill_buffers(const MlxProgram& program, const NamedDataMap* data, State& state, mx::Stream stream);

} // namespace executorch_mlx
