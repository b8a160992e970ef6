// The CUDA kernels of attention. attention.cpp decides when they run.
#pragma once

#include "lazy.h"
#include "sequence_kernel.h"

namespace executorch_mlx::gpu {

constexpr int kMaxParts = 64;
constexpr int kMaxGroups = kMaxBlocks / kMaxParts; // of heads

// Numbers of inputs.
constexpr int kKeys = 1, kValues = 2; // of attention_kernel()
constexpr int kStepOffset = 5, kStepFreqs = 6, kStepKeys = 7, kStepValues = 8; // of attention_step_kernel()

// A block of either kernel computes kPerBlock query heads of a row for one part of the positions. Each group of kLanes
// threads holds one vector of a position: 16 bytes in each thread. Queries and y are [rows, kHeads, 1, kDim]. A span
// has `length` positions from `start` on, and is divided into `parts`. There is one span for each row, and keys and
// values are [1, kHeads / kShared, capacity, kDim]; or the only span is that of all rows, and keys and values are
// [rows, kHeads / kShared, capacity, kDim].
//
// If there is more than one part, the kernel writes to `workspace`. Its first kMaxGroups numbers count the finished
// parts of each group of kPerBlock heads, and are 0 between kernels. After them are floats [rows * kHeads, max_parts,
// kDim + 2]: for each part, the weighted sum of the values, the largest exponent and the sum of the weights.

// The kernel of attention for a number of spans.
const SequenceKernel& attention_kernel(int spans);

// This kernel also normalizes and rotates query and key, which are operands of FusibleRope, and writes key and value to
// the cache. Each block computes the new key itself: in the cache it may not be there yet. If kHasOffset is 1, the
// rotations are numbers of the spans, else they are by `offset`.
const SequenceKernel& attention_step_kernel(int spans);

} // namespace executorch_mlx::gpu
