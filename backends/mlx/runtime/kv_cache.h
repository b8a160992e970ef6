// The KV cache of one layer, which the runtime keeps for UpdateAndAttendNode.
//
// The node gives a layer and positions. How many positions to keep is a load option
// (Options::kv_windows). There are two kinds of cache, and both grow by doubling:
//
// - A linear cache keeps all positions. Position p is at index p.
// - A ring buffer keeps the last `window` positions. Position p is at index p % window. A query
//   attends to `window` positions, its own included.
//
// Appending at a position that the cache already holds first drops that position and all later ones.
// Appending at position 0 drops everything; the batch size, heads and dtype may then change. A ring
// buffer that has wrapped around can go back by one position only.
#pragma once

#include <mlx/mlx.h>

#include <optional>
#include <string>

namespace executorch_mlx {

namespace mx = mlx::core;

// What the appended tokens attend to, as arguments of MLX's attention.
struct History {
  mx::array keys;  // [batch, heads, positions, head_dim]
  mx::array values;
  std::string mask_mode;  // "causal" or ""
  std::optional<mx::array> mask;  // [tokens, positions], bool
};

class KvLayer {
 public:
  explicit KvLayer(int window = 0) : window_(window) {}

  // Writes k and v [batch, heads, tokens, head_dim] at the positions from `start` on. Throws Failure
  // if earlier positions that the tokens attend to are missing, or if the shape or dtype does not
  // match the cache.
  History append(const mx::array& k, const mx::array& v, int start, mx::Stream stream);

  // [batch, heads, capacity, head_dim], both with the same capacity
  std::optional<mx::array> keys;
  std::optional<mx::array> values;

 private:
  void check(const mx::array& k, const mx::array& v, int start) const;
  History append_linear(const mx::array& k, const mx::array& v, int start, mx::Stream stream);
  History append_to_ring(const mx::array& k, const mx::array& v, int start, mx::Stream stream);

  int window_;  // 0: linear
  int length_ = 0;  // positions appended
};

} // namespace executorch_mlx
