// Keys and values that the runtime keeps for UpdateAndAttendNode, by layer.
//
// The node says which layer and at which positions, nothing of how much to keep: that
// is chosen where the program is loaded (Options::kv_windows).
//
// A flat cache keeps all positions: cell p holds position p. A ring keeps the last
// `window` of them, and a query sees as many, its own among them: cell p % window
// holds position p. Both grow on demand, by doubling. There is nothing to call for
// going back: what is appended at a position that the cache holds already drops the
// positions from there on, and position 0 drops them all, after which the batch, heads
// and dtype may be others. A ring that has gone round can go back by one position.
#pragma once

#include <mlx/mlx.h>

#include <optional>
#include <string>

namespace executorch_mlx {

namespace mx = mlx::core;

// What the tokens that were appended last attend to, as MLX's attention takes it.
struct History {
  mx::array keys;  // [batch, heads, cells, head_dim]
  mx::array values;
  std::string mask_mode;  // "causal" or ""
  std::optional<mx::array> mask;  // [tokens, cells], bool
};

class KvLayer {
 public:
  explicit KvLayer(int window = 0) : window_(window) {}

  // Puts k and v [batch, heads, tokens, head_dim] at `start` and what follows. Throws
  // Failure if the cache lacks positions that they attend to, or is of another batch,
  // heads, head_dim or dtype.
  History append(const mx::array& k, const mx::array& v, int start, mx::Stream stream);

  // [batch, heads, capacity, head_dim], the two of one capacity
  std::optional<mx::array> keys;
  std::optional<mx::array> values;

 private:
  void check(const mx::array& k, const mx::array& v, int start) const;
  History append_in_order(const mx::array& k, const mx::array& v, int start, mx::Stream stream);
  History append_around(const mx::array& k, const mx::array& v, int start, mx::Stream stream);

  int window_;  // 0: flat
  int length_ = 0;  // positions seen
};

} // namespace executorch_mlx
