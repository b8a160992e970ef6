#pragma once

#include "ops/row.h"

namespace executorch_mlx {

inline void random_bits(const fb::RandomBitsParams& n, Context& c) {
  check_program(
      n.width() == 1 || n.width() == 2 || n.width() == 4, "width ", n.width(), " is none of 1, 2 and 4");
  const auto shape = c.sizes("shape", *n.shape());
  Context::check_size(shape, mx::uint32);
  if (n.seed() != nullptr) {
    const auto key = mx::random::key(static_cast<uint64_t>(c.integer(n.seed())));
    return c.set(n.out(), mx::random::bits(shape, n.width(), key, c.stream));
  }
  // MLX steps its key sequence on the thread's default stream. A thread that has
  // none would be given one, with an OS thread that is never freed.
  if (!mx::peek_default_stream(mx::default_device())) {
    mx::set_default_stream(shared_stream(mx::default_device()));
  }
  c.set(n.out(), mx::random::bits(shape, n.width(), std::nullopt, c.stream));
}

constexpr Row kRandomRows[] = {
    MLX_ROW(RandomBitsNode, random_bits),
};

} // namespace executorch_mlx
