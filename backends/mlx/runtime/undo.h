// Undoes in-place updates of arrays. Only the slices that are overwritten are saved, not the whole array.
#pragma once

#include <mlx/mlx.h>

#include <optional>
#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

// If `x` is a pending update of slices of another array, returns that array. If that is a pending update itself, goes
// on with the array that it updates, and so on. Otherwise returns `x`.
const mx::array& array_before_updates(const mx::array& x);

// The old contents of the slices of one array that are overwritten. Does not hold the array itself, so that MLX can
// update it in place.
class Undo {
 public:
  // If `now` consists of `before` and pending updates of some slices, stores the old contents of these slices and
  // returns true. Returns false otherwise. Also appends the stored arrays to `saved`: the caller must evaluate them
  // before `now`.
  bool record(const mx::array& before, const mx::array& now, mx::Stream stream, std::vector<mx::array>& saved);

  bool is_empty() const {
    return slices_.empty();
  }

  // Returns an array with the contents from before the first record(). `now` is the array after the last update.
  mx::array apply(const mx::array& now, mx::Stream stream) const;

 private:
  struct Slice {
    mx::array contents;
    mx::Shape start;
    mx::Shape stop;
    mx::Shape strides;
  };
  std::vector<Slice> slices_;  // applied from the last to the first, so that the oldest contents remain
};

} // namespace executorch_mlx
