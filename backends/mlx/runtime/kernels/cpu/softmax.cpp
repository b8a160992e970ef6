// Softmax and log-sum-exp.
#include "softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "conversion.h"

namespace executorch_mlx {

namespace {

// The largest of the values, or NaN if one of them is NaN.
float largest(const float* x, int64_t count) {
  float result = x[0];
  bool has_nan = false;
  for (int64_t i = 0; i < count; ++i) {
    result = x[i] > result ? x[i] : result;
    has_nan |= x[i] != x[i];
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : result;
}

} // namespace

void kernel::softmax(const float* x, float* y, int64_t rows, int64_t width) {
  parallel_ranges(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      float* to = y + row * width;
      const float* from = x + row * width;
      if (!std::isfinite(largest(from, width))) {
        std::fill_n(to, width, std::numeric_limits<float>::quiet_NaN());
        continue;
      }
      std::copy_n(from, width, to);
      const float sum = kernels().softmax_numerators(to, width, /*scale=*/1);
      kernels().scale(to, 1 / sum, FloatType::float32, to, width);
    }
  });
}

void kernel::logsumexp(const float* x, float* y, int64_t rows, int64_t width) {
  parallel_ranges(rows, width, [&](int64_t first, int64_t last) {
    std::vector<float> numerators(width);
    for (int64_t row = first; row < last; ++row) {
      const float* from = x + row * width;
      const float highest = largest(from, width);
      y[row] = highest;
      if (std::isfinite(highest)) {
        std::copy_n(from, width, numerators.begin());
        y[row] += std::log(kernels().softmax_numerators(numerators.data(), width, /*scale=*/1));
      }
    }
  });
}

} // namespace executorch_mlx
