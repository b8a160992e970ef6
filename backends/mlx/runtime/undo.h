// Restores arrays that an evaluation updates in place, without a copy of the whole array.
#pragma once

#include <mlx/mlx.h>

#include <optional>
#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

// The array that `x` updates, possibly in several pending steps: the last one that has its values. `x` itself if it is
// not a pending update of slices.
const mx::array& updated_array(const mx::array& x);

// The former contents of the slices that one array loses. The array itself is not held, so that MLX may overwrite it.
class Undo {
 public:
  // Whether `now` is `before` with some slices replaced. If so, appends the contents of these slices to `saved`: they
  // must be evaluated before `now` is.
  bool record(const mx::array& before, const mx::array& now, mx::Stream stream, std::vector<mx::array>& saved);

  bool is_empty() const {
    return slices_.empty();
  }

  // An array with the contents before the first record().
  mx::array apply(const mx::array& now, mx::Stream stream) const;

 private:
  struct Slice {
    mx::array contents;
    mx::Shape start;
    mx::Shape stop;
    mx::Shape strides;
  };
  std::vector<Slice> slices_;  // later ones have precedence: they are applied first
};

} // namespace executorch_mlx
