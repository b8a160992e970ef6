#pragma once

#include "ops/metal_kernel.h"
#include "ops/row.h"

namespace executorch_mlx {

inline void if_else(const fb::IfParams& n, Context& c) {
  c.run(c.integer(n.cond()) != 0 ? n.then_chain_idx() : n.else_chain_idx());
}

// The carry needs no code: it is slots that the body reads and writes.
inline void scan(const fb::ScanParams& n, Context& c) {
  const auto originals = c.list(*n.originals());
  check_program(
      !originals.empty() && originals.size() == n.sliced()->size(),
      originals.size(), " originals and ", n.sliced()->size(), " sliced came, equal numbers were expected");
  const int axis = checked_axis(n.scan_axis(), static_cast<int>(originals[0].ndim()), "scan_axis");
  const int steps = originals[0].shape(axis);
  for (const auto& x : originals) {
    check_argument(
        axis < static_cast<int>(x.ndim()) && x.shape(axis) == steps,
        "an original is ", describe(x), ", ", steps, " steps on axis ", axis, " were expected");
  }
  check_argument(steps > 0 || n.outputs()->size() == 0, "there are no steps to make outputs of");

  std::vector<std::vector<mx::array>> outputs(n.outputs()->size());
  for (int step = 0; step < steps; ++step) {
    for (uint32_t i = 0; i < originals.size(); ++i) {
      c.set(n.sliced()->Get(i), mx::take(originals[i], step, axis, c.stream));
    }
    c.run(static_cast<uint32_t>(n.body_chain_idx()));
    for (uint32_t i = 0; i < outputs.size(); ++i) {
      outputs[i].push_back(c.in(n.outputs()->Get(i)));
    }
  }
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    const int at = checked_axis(n.scan_axis(), static_cast<int>(outputs[i][0].ndim()) + 1, "scan_axis");
    c.set(n.outputs()->Get(i), mx::stack(outputs[i], at, c.stream));
  }
}

// The carry is computed at every step, not only as far as the condition asks for it:
// what waits would grow with the steps. A loop without an end is ended by the
// budget of instructions.
inline void while_loop(const fb::WhileParams& n, Context& c) {
  for (c.run(n.cond_chain_idx()); c.integer(n.cond()) != 0; c.run(n.cond_chain_idx())) {
    c.run(n.body_chain_idx());
    mx::async_eval(c.list(*n.carry()));
  }
}

constexpr Row kControlRows[] = {
    MLX_ROW(IfNode, if_else),
    MLX_ROW(MetalKernelNode, EXECUTORCH_MLX_METAL_KERNELS ? metal_kernel : no_metal_kernel),
    MLX_ROW(ScanNode, scan),
    MLX_ROW(WhileNode, while_loop),
};

} // namespace executorch_mlx
