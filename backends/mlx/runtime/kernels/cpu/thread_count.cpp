// The number of threads of the kernels, from the environment or the processors of the process.
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "pool.h"

namespace executorch_mlx {

namespace {

// The number of threads that an environment variable sets, or 0 if none does.
int count_in_environment() {
  for (const char* name : {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && std::atoi(value) > 0) {
      return std::atoi(value);
    }
  }
  return 0;
}

// The number of processors in the affinity mask of the process.
int allowed_processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
    return CPU_COUNT(&allowed);
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Returns the CPU quota (cgroup version 2) in processors, rounded up, or 0 if there is none. In a container, the
// mounted hierarchy begins with the container's cgroup, and this file has its quota. Outside of containers, the
// hierarchy begins with the root cgroup, which has no such file.
int cgroup_quota() {
  int result = 0;
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    long quota = 0;
    long period = 0;
    if (std::fscanf(file, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0) {
      result = static_cast<int>((quota + period - 1) / period);
    }
    std::fclose(file);
  }
  return result;
}

} // namespace

int kernel::threads() {
  static const int threads = [] {
    if (const int count = count_in_environment(); count > 0) {
      return count;
    }
    const int processors = std::max(1, allowed_processors());
    const int quota = cgroup_quota();
    return quota > 0 ? std::min(quota, processors) : processors;
  }();
  return threads;
}

} // namespace executorch_mlx
