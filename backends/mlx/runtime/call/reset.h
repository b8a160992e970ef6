// What executorch_mlx_reset() asks of the next call on this thread, and what executorch_mlx_is_undefined() tells of the
// last one.
#pragma once

namespace executorch_mlx {

// Returns whether this call begins with a reset of the mutable buffers. The next one then does not.
bool take_reset();

// Records whether the last call has failed and has left the mutable buffers undefined.
void set_undefined(bool is_undefined);

} // namespace executorch_mlx
