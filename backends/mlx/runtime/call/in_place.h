// Updates of arrays in place, at once. The functions change nothing and return false if that is not possible.
//
// An evaluated array can be updated in place if nothing else refers to it or its memory, and if no elements share
// memory, as those of a broadcast array do. `other` may be another reference to the array: it does not count, and the
// functions that write drop it.
#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// Whether x can be updated in place.
bool can_update_in_place(const mx::array& x, std::optional<mx::array>& other);

// Writes `update` to the slice x[start:stop:steps]. Returns false also if x or `update` is not available, or if
// `update` differs from the slice in dtype or shape.
bool write_in_place(mx::array& x, std::optional<mx::array>& other, const mx::array& update, const mx::Shape& start,
    const mx::Shape& stop, const mx::Shape& steps);

// Writes update[:, :, i] to x[:, :, positions[i]] for each i, in this order and in parallel. x and `update` have 4
// axes. Returns false also if one of them has gaps between the elements of axis 3.
bool write_positions_in_place(
    mx::array& x, std::optional<mx::array>& other, const mx::array& update, const mx::Shape& positions);

} // namespace executorch_mlx
