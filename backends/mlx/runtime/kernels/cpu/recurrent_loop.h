// The loop over the time steps of a recurrent layer.
#pragma once

#include <cstdint>

#include "api.h"
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
  int blocks; // 0: one number
};

// One elementwise operation. Elementwise::copy takes the blocks [first_block, first_block + blocks) of a.
struct CellStep {
  Elementwise operation;
  int a;
  int b; // only for binary operations
  int first_block;
  int blocks; // of the result
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
  int next; // the value for the next time step
};

namespace kernel {

// The loop over the time steps of a recurrent layer. Each time step multiplies the state `hidden` of all `rows` by the
// weights [units, gates * units], adds the addend, and computes the values of the cell. Each result has the
// same bits as that of matmul and elementwise_steps.
struct RecurrentLoop {
  int time_steps;
  int rows;
  int units;
  int gates;
  int max_blocks; // of all values
  const float* packed; // the weights from pack_recurrent()
  CellInput addend; // data is null if there is none
  int hidden; // the carry that is multiplied
  const CellCarry* carries; // the next values are results of steps that are not copies
  int num_carries;
  const CellInput* inputs;
  int num_inputs;
  const CellStep* steps;
  int num_steps;
  const CellOutput* outputs;
  int num_outputs;
};
EXECUTORCH_MLX_KERNEL_API void recurrent_loop(const RecurrentLoop& loop);

// Packs the weights b [units, gates * units] for recurrent_loop(), in the order in which it reads them.
EXECUTORCH_MLX_KERNEL_API void pack_recurrent(const float* b, int64_t row_stride, int units, int gates, float* packed);

} // namespace kernel

} // namespace executorch_mlx
