#pragma once

#include "ops/op_row.h"

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
  // MLX advances its key sequence on the default stream of the calling thread. If the thread has no default stream, MLX
  // would create a stream for it, whose worker thread is never freed. So the thread gets the shared stream as its
  // default stream.
  if (!mx::peek_default_stream(mx::default_device())) {
    mx::set_default_stream(shared_stream(mx::default_device()));
  }
  c.set(n.out(), mx::random::bits(shape, n.width(), std::nullopt, c.stream));
}

constexpr OpRow kRandomRows[] = {
    MLX_ROW(RandomBitsNode, random_bits),
};

} // namespace executorch_mlx
