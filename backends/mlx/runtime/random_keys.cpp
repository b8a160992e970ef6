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

mx::array next_random_key() {
  return mx::random::key(next_seed()++);
}

extern "C" {

// Sets the seed from which the next draws without a seed get their keys. Tests call it to repeat draws.
__attribute__((visibility("default"))) void executorch_mlx_set_random_seed(uint64_t seed) {
  next_seed() = seed;
}

} // extern "C"

} // namespace executorch_mlx
