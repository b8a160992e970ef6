#pragma once

#include "ops/row.h"

namespace executorch_mlx {

inline void random_bits(const fb::RandomBitsParams& n, Context& c) {
  check_program(
      n.width() == 1 || n.width() == 2 || n.width() == 4, "width: got ", n.width(), ", expected 1, 2 or 4");
  const auto shape = c.sizes("shape", *n.shape());
  check_size(shape, mx::uint32);
  if (n.seed() != nullptr) {
    const auto key = mx::random::key(static_cast<uint64_t>(c.integer(n.seed())));
    return c.set(n.out(), mx::random::bits(shape, n.width(), key, c.stream));
  }
  // MLX advances its key sequence on the thread's default stream. For a thread without one it would
  // create one, with an OS thread that is never freed.
  if (!mx::peek_default_stream(mx::default_device())) {
    mx::set_default_stream(shared_stream(mx::default_device()));
  }
  c.set(n.out(), mx::random::bits(shape, n.width(), std::nullopt, c.stream));
}

constexpr OpRow kRandomRows[] = {
    MLX_ROW(RandomBitsNode, random_bits),
};

} // namespace executorch_mlx
