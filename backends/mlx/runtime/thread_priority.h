// The priority of threads.
#pragma once

namespace executorch_mlx {

// Lets the calling thread yield to others, for work that nobody waits for: the quality of service "utility" on Apple's
// systems, and a nice value that is higher by 10 on Linux. The threads that it starts inherit this. It cannot be
// undone.
void lower_thread_priority();

} // namespace executorch_mlx
