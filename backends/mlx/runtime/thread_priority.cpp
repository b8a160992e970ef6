#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/delegate.h>
#pragma GCC visibility pop

#include "thread_priority.h"

#ifdef __APPLE__
#include <pthread.h>
#include <pthread/qos.h>
#else
#include <sys/resource.h>
#endif

namespace executorch_mlx {

void lower_thread_priority() {
#ifdef __APPLE__
  pthread_set_qos_class_self_np(QOS_CLASS_UTILITY, 0);
#else
  constexpr int kNicer = 10;
  // On Linux, 0 stands for the calling thread. The system may refuse, and the thread then keeps its priority.
  (void)setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNicer);
#endif
}

} // namespace executorch_mlx

void executorch_mlx_lower_thread_priority(void) { executorch_mlx::lower_thread_priority(); }
