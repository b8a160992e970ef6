// One elementwise operation of a sequence that is computed at once: see elementwise.h.
#pragma once

#include <cstdint>

#include "elementwise_type.h"

namespace executorch_mlx {

constexpr bool is_binary(Elementwise operation) { return operation <= Elementwise::maximum; }

// Rows of numbers. The numbers of a row lie in memory without gaps.
struct Rows {
  const void* data;
  int64_t stride; // the distance between rows in elements; 0 if all rows are the same
};

struct ElementwiseStep {
  Elementwise operation;
  Rows a;
  Rows b; // only for binary operations
  void* y; // [rows, width], contiguous
  int64_t width;
};

} // namespace executorch_mlx
