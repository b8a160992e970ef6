// Threads do not survive a fork. A process that is forked after MLX was loaded would wait for those of MLX and of the
// engine forever.
#pragma once

#include <executorch_mlx/delegate.h>

#include "check.h"

namespace executorch_mlx::engine {

// Throws EngineError in a process that was forked after MLX was loaded.
inline void check_not_forked() {
  check(!executorch_mlx_is_forked(), EXECUTORCH_MLX_FAILED,
      "engine: this process was forked after MLX was loaded, so it lacks the threads of MLX and of the engine; load "
      "the model in the child process, and start that before the parent loads a model, or with multiprocessing's "
      "method spawn");
}

} // namespace executorch_mlx::engine
