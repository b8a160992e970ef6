// The KV cache of one layer, which the runtime keeps for UpdateAndAttendNode. Programs without this node keep their KV
// caches in mutable buffers.
//
// The node names a layer and the positions of the new tokens. The load option Options::kv_windows says how many
// positions the cache of each layer keeps. There are two kinds of cache, and both grow by doubling:
//
// - A linear cache keeps all positions. Position p is at index p.
// - A ring buffer keeps the last `window` positions. Position p is at index p % window. A query
//   attends to at most `window` positions: its own and those before it.
//
// If the cache already holds the position at which tokens are appended, append() first drops that position and all
// later ones. Appending at position 0 drops everything; the batch size, the number of heads and the dtype may then
// change. Once a ring buffer has wrapped around, tokens can be appended only after the last position, at the last
// position, or at position 0.
#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// What the queries of the appended tokens attend to, as arguments of MLX's attention.
struct AttentionInputs {
  mx::array keys; // [batch, heads, positions, head_dim]
  mx::array values;
  bool is_causal; // the last query attends to all positions, the one before it to all but the last, and so on
  std::optional<mx::array> mask; // [tokens, positions], bool; nullopt: only is_causal applies
};

class KvLayer {
 public:
  // A ring buffer of `window` positions, or a linear cache if `window` is 0.
  explicit KvLayer(int window = 0) : window_(window) {}

  // Writes k and v [batch, heads, tokens, head_dim] at the positions from `start` on, and returns what
  // the queries of these tokens attend to. Throws Failure if earlier positions that they attend to are
  // missing, or if the shape or dtype does not match the cache.
  AttentionInputs append(const mx::array& k, const mx::array& v, int start, mx::Stream stream);

  // Whether nothing has been appended yet.
  bool is_empty() const { return length_ == 0; }

  // [batch, heads, capacity, head_dim], both with the same capacity. Empty before the first append().
  std::optional<mx::array> keys;
  std::optional<mx::array> values;

 private:
  void check(const mx::array& k, const mx::array& v, int start) const;
  AttentionInputs append_linear(const mx::array& k, const mx::array& v, int start, mx::Stream stream);
  AttentionInputs append_to_ring(const mx::array& k, const mx::array& v, int start, mx::Stream stream);

  int window_; // 0: linear
  int length_ = 0; // the next position to append at; a ring buffer holds at most the `window_` positions before it
};

} // namespace executorch_mlx
