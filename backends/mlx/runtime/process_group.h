// The group of processes that run the parts of one model, over mlx::core::distributed.
#pragma once

#include <mlx/distributed/distributed.h>
#include <mlx/mlx.h>

namespace executorch_mlx {

namespace mx = mlx::core;

// Returns the group of this process. The first call joins it, and waits until all processes do. A process that no
// launcher started is alone in its group. Throws what MLX throws.
const mx::distributed::Group& process_group();

// Throws Failure unless this process is the process `rank` of a group of `size` processes.
void check_group(int rank, int size);

// Returns the stream on which the processes communicate for a program on `stream`: NCCL works on a GPU, and all other
// backends of MLX work on a CPU.
mx::Stream communication_stream(mx::Stream stream);

// Overwrites `size` bytes by those of the process with rank 0. Returns only after all processes of the group have
// called it with the same size.
void share(void* data, size_t size);

} // namespace executorch_mlx
