#pragma once

namespace executorch_mlx {

// The indices [start, stop) of an axis.
struct Span {
  int start;
  int stop;
};

} // namespace executorch_mlx
