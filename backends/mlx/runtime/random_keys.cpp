#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/delegate.h>
#pragma GCC visibility pop

#include "random_keys.h"

#include <atomic>
#include <cstdint>
#include <random>

namespace executorch_mlx {

namespace {

std::atomic<uint64_t>& next_seed() {
  static std::atomic<uint64_t> seed = [] {
    std::random_device bits;
    return uint64_t{bits()} << 32 | bits();
  }();
  return seed;
}

} // namespace

mx::array next_random_key() { return mx::random::key(next_seed()++); }

} // namespace executorch_mlx

void executorch_mlx_set_random_seed(uint64_t seed) { executorch_mlx::next_seed() = seed; }
