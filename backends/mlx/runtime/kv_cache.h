// Keys and values that the runtime keeps for UpdateAndAttendNode, by layer.
//
// A cache is flat: cell p holds position p. It grows on demand, by doubling. There
// is nothing to call for going back: what is appended at a position that the cache
// holds already drops the cells from there on, and position 0 drops them all, after
// which the batch, heads and dtype may be others.
#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

struct KvLayer {
  // [batch, heads, capacity, head_dim], the two of one capacity
  std::optional<mx::array> keys;
  std::optional<mx::array> values;
  int length = 0;  // positions held

  // Puts k and v [batch, heads, tokens, head_dim] at `start` and what follows.
  // Throws Failure if there are fewer than `start` positions, or the cache is of
  // another batch, heads, head_dim or dtype.
  void append(const mx::array& k, const mx::array& v, int start, mx::Stream stream);

  // The first `length` cells of `cells`.
  mx::array held(const mx::array& cells, mx::Stream stream) const;
};

} // namespace executorch_mlx
