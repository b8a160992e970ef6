// Communication between the processes of a group. See op_row.h.
#pragma once

#include <mlx/distributed/ops.h>

#include "ops/op_row.h"
#include "process_group.h"

namespace executorch_mlx {

// The arrays x of all processes, stacked along a new first axis.
inline mx::array gather_stacked(const mx::array& x, int size, Context& c) {
  mx::Shape shape = x.shape();
  shape.insert(shape.begin(), size);
  check_size(shape, x.dtype());
  const auto own = mx::contiguous(mx::expand_dims(x, 0, c.stream), /*allow_col_major=*/false, c.stream);
  return mx::distributed::all_gather(own, process_group(), communication_stream(c.stream));
}

// Sums x over all processes. load_program() has checked that the program is for this process of its group.
//
// A sum of floating-point numbers depends on the order of its terms. The order in which MLX's backends add depends on
// the place of an element in the array. In a group of three or more processes, each process therefore adds the terms
// itself, in the order of the ranks.
inline void all_sum(const fb::AllSumParams& n, Context& c) {
  const auto& x = c.in(n.x());
  if (n.size() == 1 || x.size() == 0) {
    return c.set(n.out(), x);
  }
  if (n.size() == 2) {
    const auto own = mx::contiguous(x, /*allow_col_major=*/false, c.stream);
    return c.set(n.out(), mx::distributed::all_sum(own, process_group(), communication_stream(c.stream)));
  }
  const bool is_half = x.dtype() == mx::float16 || x.dtype() == mx::bfloat16;
  const auto parts = mx::split(gather_stacked(x, n.size(), c), n.size(), 0, c.stream);
  const auto term = [&](const mx::array& part) { return is_half ? mx::astype(part, mx::float32, c.stream) : part; };
  auto sum = term(parts[0]);
  for (size_t i = 1; i < parts.size(); ++i) {
    sum = mx::add(sum, term(parts[i]), c.stream);
  }
  c.count_operations(x.size(), n.size());
  c.set(n.out(), mx::squeeze(mx::astype(sum, x.dtype(), c.stream), 0, c.stream));
}

inline void all_gather(const fb::AllGatherParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  if (n.size() == 1 || x.size() == 0) {
    return c.set(n.out(), x);
  }
  mx::Shape shape = x.shape();
  check_argument(
      shape[axis] <= std::numeric_limits<int>::max() / n.size(), "x: got size ", shape[axis], " on axis ", axis);
  shape[axis] *= n.size();
  check_size(shape, x.dtype());
  const auto stacked = mx::moveaxis(gather_stacked(x, n.size(), c), 0, axis, c.stream);
  c.set(n.out(), mx::reshape(stacked, shape, c.stream));
}

constexpr OpRow kDistributedRows[] = {
    MLX_ROW(AllGatherNode, all_gather),
    MLX_ROW(AllSumNode, all_sum),
};

} // namespace executorch_mlx
