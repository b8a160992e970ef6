// Prints the bytes of mlx::core::random::bits, which mlx's Python package does not export.
// Reads lines `seed width count` from stdin and writes the bytes of all requests to stdout.
#include <cstdint>
#include <cstdio>
#include <iostream>

#include "mlx/mlx.h"

int main() {
  namespace mx = mlx::core;
  mx::set_default_device(mx::Device(mx::Device::cpu));
  std::int64_t seed;
  int width, count;
  while (std::cin >> seed >> width >> count) {
    auto key = mx::random::key(static_cast<std::uint64_t>(seed));
    auto bits = mx::random::bits({count}, width, key);
    bits.eval();
    std::fwrite(bits.data<char>(), 1, bits.nbytes(), stdout);
  }
}
