#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "blas.h"

namespace {

int from_environment() {
  for (const char* name : {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}) {
    const char* text = std::getenv(name);
    if (text != nullptr && std::atoi(text) > 0) {
      return std::atoi(text);
    }
  }
  return 0;
}

int processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
    return CPU_COUNT(&allowed);
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Processors that cgroup v2 grants, rounded up; 0 where nothing is said.
int quota() {
  int result = 0;
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    long granted = 0;
    long period = 0;
    if (std::fscanf(file, "%ld %ld", &granted, &period) == 2 && granted > 0 && period > 0) {
      result = static_cast<int>((granted + period - 1) / period);
    }
    std::fclose(file);
  }
  return result;
}

} // namespace

extern "C" int executorch_mlx_threads() {
  static const int threads = [] {
    const int asked = from_environment();
    if (asked > 0) {
      return asked;
    }
    const int granted = quota();
    const int here = std::max(1, processors());
    return granted > 0 ? std::min(granted, here) : here;
  }();
  return threads;
}
