// Products with quantized matrices.
#pragma once

#include "ops/cpu/cpu_kernels.h"
#include "ops/linalg.h"
#include "call/context.h"

namespace executorch_mlx {

// The quantized weights of a node.
struct Quantized {
  mx::array w;
  mx::array scales;
  std::optional<mx::array> biases;
};

// The number of values in a row of packed weights.
inline int64_t unpacked_columns(const mx::array& w, int bits) { return int64_t{w.shape(-1)} * 32 / bits; }

// Returns the quantized weights `q` of a node. Throws Failure if they are invalid.
template <typename Node>
Quantized checked_weights(const Node& n, Quantized q) {
  check_program(n.group_size() > 0 && n.bits() > 0 && n.bits() <= 8, "got group_size ", n.group_size(), " and bits ",
      n.bits(), ", expected group_size > 0 and bits in [1, 8]");
  check_argument(q.w.dtype() == mx::uint32 && q.w.ndim() >= 2 && q.scales.ndim() == q.w.ndim(), "got w ", describe(q.w),
      " and scales ", describe(q.scales), ", expected packed uint32 and the same number of axes");
  // MLX does not check that the length of a row of w is a multiple of the group size.
  const int64_t columns = unpacked_columns(q.w, n.bits());
  auto expected = q.w.shape();
  expected.back() = static_cast<int>(columns / n.group_size());
  check_argument(columns > 0 && columns % n.group_size() == 0 && columns / n.group_size() == expected.back() &&
          q.scales.shape() == expected && (!q.biases || q.biases->shape() == expected),
      "scales: got ", describe(q.scales), ", expected shape ", dims(expected), ", also for biases");
  return q;
}

// Reads and checks the quantized weights of a node.
template <typename Node>
Quantized read_weights(const Node& n, Context& c) {
  return checked_weights(n, {c.in(n.w()), c.in(n.scales()), c.optional(n.biases())});
}

// Casts the scales and biases to float32. The packed values stay as they are.
inline Quantized to_float32(Quantized q, const Context& c) {
  q.scales = to_float32(q.scales, c);
  if (q.biases) {
    q.biases = to_float32(*q.biases, c);
  }
  return q;
}

} // namespace executorch_mlx
