// Branches and loops, and Metal source in programs. See op.h.
#include "ops/control.h"

#include "memory/views.h"
#include "ops/metal_kernel.h"
#include "ops/op.h"
#include "ops/shape.h"

namespace executorch_mlx {

ScanOperands scan_operands(const fb::ScanParams& n, Context& c) {
  c.make_available(*n.originals());
  c.make_available(*n.carry());
  auto originals = c.list(*n.originals());
  check_program(!originals.empty() && originals.size() == n.sliced()->size(), "sliced: got ", n.sliced()->size(),
      ", expected one for each of ", originals.size(), " originals");
  const int axis = checked_axis(n.scan_axis(), static_cast<int>(originals[0].ndim()), "scan_axis");
  const int iterations = originals[0].shape(axis);
  for (const auto& x : originals) {
    check_argument(axis < static_cast<int>(x.ndim()) && x.shape(axis) == iterations, "originals: got ", describe(x),
        ", expected size ", iterations, " on axis ", axis);
  }
  check_argument(iterations > 0 || n.outputs()->size() == 0, "originals: axis ", axis, " is empty");
  return {std::move(originals), axis, iterations};
}

namespace {

void if_else(const fb::IfParams& n, Context& c) {
  c.run(c.integer(n.cond()) != 0 ? n.then_chain_idx() : n.else_chain_idx());
}

// Runs the body chain once for each index of an axis. `n.originals()` are the arrays that the loop goes over. Before
// each iteration, this function puts their slices at the current index into the slots `n.sliced()`. The carry needs
// no code here, because the body chain itself overwrites the slots of the carry.
void scan(const fb::ScanParams& n, Context& c) {
  const auto operands = scan_operands(n, c);
  const auto& [originals, axis, iterations] = operands;

  // outputs[i][j] is output i of iteration j. The body chain writes the outputs of its iteration to the slots
  // `n.outputs()`. At the end, each of these slots gets the stacked outputs of all iterations.
  std::vector<std::vector<mx::array>> outputs(n.outputs()->size());
  const auto output_axis = [&](const mx::array& x) {
    return checked_axis(n.scan_axis(), static_cast<int>(x.ndim()) + 1, "scan_axis");
  };
  for (int iteration = 0; iteration < iterations; ++iteration) {
    for (uint32_t i = 0; i < originals.size(); ++i) {
      c.set(n.sliced()->Get(i), views::take(originals[i], iteration, axis, c.stream));
    }
    c.run(static_cast<uint32_t>(n.body_chain_idx()));
    for (uint32_t i = 0; i < outputs.size(); ++i) {
      const auto& output = c.in(n.outputs()->Get(i));
      if (iteration == 0) { // before the memory of all iterations is allocated
        check_size(shape_stacked(output, iterations, output_axis(output)), output.dtype());
      }
      outputs[i].push_back(output);
    }
  }
  for (uint32_t i = 0; i < outputs.size(); ++i) {
    c.set(n.outputs()->Get(i), stacked(outputs[i], output_axis(outputs[i][0]), c));
  }
}

// Starts the evaluation of the carry in each iteration, so that the unevaluated graph does not grow with
// the number of iterations. An infinite loop ends with an error, when the call reaches its limit on
// executed instructions.
void while_loop(const fb::WhileParams& n, Context& c) {
  for (c.run(n.cond_chain_idx()); c.integer(n.cond()) != 0; c.run(n.cond_chain_idx())) {
    c.run(n.body_chain_idx());
    c.start(c.list(*n.carry()));
  }
}

} // namespace

MLX_OP(IfNode, if_else)
MLX_OP(MetalKernelNode, EXECUTORCH_MLX_METAL_KERNELS ? metal_kernel : no_metal_kernel)
MLX_OP(ScanNode, scan)
MLX_OP(WhileNode, while_loop)

} // namespace executorch_mlx
