// A range of indices, for the kernels of several rows of a KV cache.
#pragma once

namespace executorch_mlx {

// The indices [start, stop) of an axis.
struct Span {
  int start;
  int stop;
};

} // namespace executorch_mlx
