// Undoes in-place updates of arrays. Only the slices that are overwritten are saved, not the whole array. Undo is for
// updates that MLX makes when it evaluates a graph. InPlaceUpdates is for updates that the runtime makes at once.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

// Returns the array that `x` updates, if `x` is a pending update of slices of another array. If that array is a pending
// update as well, returns the array that it updates, and so on. Returns `x` if it is no pending update.
const mx::array& array_before_updates(const mx::array& x);

// Whether *holder refers to the same array as x.
bool holds(const std::optional<mx::array>& holder, const mx::array& x);

// Whether x, an evaluated array, can be updated in place: only x, and `*first` and `*second` if they hold x, refer to
// the array and its memory, and no elements share memory, as those of a broadcast array do. The pointers may be null.
bool can_update_in_place(
    const mx::array& x, std::optional<mx::array>* first, std::optional<mx::array>* second = nullptr);

// The old contents of the slices of one array that are overwritten. Does not hold the array itself, so that MLX can
// update it in place.
class Undo {
 public:
  // If `now` consists of `before` and pending updates of some slices, stores the old contents of these slices and
  // returns true. Returns false otherwise, or if the stored slices would take more memory than `before`. Also appends
  // the stored arrays to `saved`: the caller must evaluate them before `now`.
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
  size_t bytes_ = 0;  // of slices_
};

// The updates of one array that have been made in place in a call, and the old contents if they are to be restored.
class InPlaceUpdates {
 public:
  // Writes `update` to the slice x[start:stop:steps], and returns true. `backup` is null or another reference to the
  // array x. The function resets it, because this object now has the array. Returns false, and changes nothing, if x or
  // `update` is not available, if `update` differs from the slice in dtype or shape, if it is large, if elements of the
  // array share memory, if the array has references other than x, `backup` and this object, or if undo() has to restore
  // another array, from which MLX has computed x. `saves`: whether undo() has to restore the old contents.
  bool write(
      mx::array& x, std::optional<mx::array>* backup, const mx::array& update, const mx::Shape& start,
      const mx::Shape& stop, const mx::Shape& steps, bool saves);

  // Like write() for several positions of axis 2, in parallel: writes update[:, :, i] to x[:, :, positions[i]] for each
  // i, in this order. x and `update` have 4 axes. Also returns false if one of them has gaps between the elements of
  // axis 3.
  bool write_positions(
      mx::array& x, std::optional<mx::array>* backup, const mx::array& update, const mx::Shape& positions, bool saves);

  // Writes the saved contents back and returns the array. Returns nullopt if nothing was written.
  std::optional<mx::array> undo();

  // The array after the last write. Empty if nothing was written.
  const std::optional<mx::array>& array() const {
    return array_;
  }

 private:
  struct Slice {
    int64_t offset;  // in bytes
    mx::Shape shape;
    mx::Strides strides;
    std::unique_ptr<char[]> contents;  // row-major; null if all elements were 0, as in an unused part of a cache
  };
  // If x can be updated in place, becomes the owner of the array and returns true. Otherwise changes nothing and
  // returns false.
  bool take(const mx::array& x, std::optional<mx::array>* backup);
  // Whether a write of `bytes` bytes to array_ has to save what it overwrites. If the saved slices would take more
  // memory than the array, as in a loop that writes the same slice, saves the whole array in their place. Later writes
  // then need to save nothing.
  bool needs_saving(size_t bytes);
  void save_whole_array();
  void write_slices_back();

  std::optional<mx::array> array_;
  std::vector<Slice> slices_;  // from the oldest to the newest, or the whole array from before the first write
  size_t saved_bytes_ = 0;     // of slices
  bool has_whole_array_ = false;
};

} // namespace executorch_mlx
