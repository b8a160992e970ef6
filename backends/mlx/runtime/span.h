// Ranges of indices, for the kernels that read a KV cache.
#pragma once

namespace executorch_mlx {

// The indices [start, stop) of an axis.
struct Span {
  int start;
  int stop;

  bool operator==(const Span&) const = default;
};

// Where a token is: its position, by which RoPE rotates, and the part of the KV caches that it attends to. It has the
// last place of this part.
struct TokenPlace {
  int position;
  Span span;

  bool operator==(const TokenPlace&) const = default;
};

} // namespace executorch_mlx
