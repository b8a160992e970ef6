// The loop over the time steps of a recurrent layer: see executorch_mlx_recurrent_loop() in blas.h.
#pragma once

#include <cstdint>

#include "elementwise_step.h"

namespace executorch_mlx {

// A recurrent cell computes values in each time step. A value is a matrix [rows, blocks * units]. The product and its
// addend have a block for each gate, and a carry has one block. Values are numbered: first the product, then the
// carries, the inputs and the results of the steps.

// An operand in memory, with the distances between time steps and between rows in elements. A distance of 0 says that
// all time steps, or all rows, are the same.
struct CellInput {
  const float* data;
  int64_t step_stride;
  int64_t row_stride;
  int blocks;  // 0: one number
};

// One elementwise operation. Elementwise::copy takes the blocks [first_block, first_block + blocks) of a.
struct CellStep {
  Elementwise operation;
  int a;
  int b;  // only for binary operations
  int first_block;
  int blocks;  // of the result
};

// A value that is written to memory: in each time step, or only in the last one if `step_stride` is 0.
struct CellOutput {
  int value;
  float* data;
  int64_t step_stride;
  int64_t row_stride;
};

// A value of one block that a time step hands to the next one.
struct CellCarry {
  CellInput initial;
  int next;  // the value for the next time step
};

} // namespace executorch_mlx
