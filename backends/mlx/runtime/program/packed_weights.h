// Constant quantized weights, packed for CPU kernels that multiply integers when a program is loaded: for products with
// activations in 8 bits, and for all products where cpu::has_fast_integers().
//
// In a .pte, such weights have the layout of MLX. In each call, the kernels would have to bring them into the order of
// their vector instructions, which slows down decoding most. The packed copy takes as much memory as the
// weights themselves. If those are in a mapped file, their pages are released, because the products read the copy only.
// The active memory then counts the copy in place of the weights, unless another instruction reads the weights.
#pragma once

#include "call/state.h"
#include "program/program.h"
#include "program/shared.h"

namespace executorch_mlx {

// Packs the constant weights of the products of `program`, and adds them to `state` by node. Takes what another method
// of the program has packed from `shared`. Packs nothing if no kernel on `stream` can use it, or if the program has an
// init chain, which may change constants. Under a memory limit, copies leave a quarter of the free memory. Throws
// Failure if constants that an earlier method released do not fit again. The constants of `state` are loaded.
void pack_weights(const MlxProgram& program, SharedData& shared, State& state, mx::Stream stream);

} // namespace executorch_mlx
