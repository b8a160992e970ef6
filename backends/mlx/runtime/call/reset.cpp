#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/buffers.h>
#pragma GCC visibility pop

#include "call/reset.h"

#include <utility>

namespace executorch_mlx {

namespace {

// Of this thread.
thread_local bool next_call_resets = false;
thread_local bool last_call_is_undefined = false;

} // namespace

bool take_reset() { return std::exchange(next_call_resets, false); }

void set_undefined(bool is_undefined) { last_call_is_undefined = is_undefined; }

} // namespace executorch_mlx

void executorch_mlx_reset() { executorch_mlx::next_call_resets = true; }

int executorch_mlx_is_undefined() { return executorch_mlx::last_call_is_undefined; }
