// Checks of sizes and axes, and access to the elements of small arrays on the host. MLX does not check its arguments,
// so that a damaged program could crash the process. Many ops use these functions.
#pragma once

#include <mlx/mlx.h>

#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "dtype.h"
#include "error.h"
#include "program/reflect.h"

namespace executorch_mlx {

namespace mx = mlx::core;

constexpr size_t kMaxRank = 16;

// Checks the size of a result, because a damaged program can ask for any size. Allows at most kMaxRank axes, fewer than
// 2^31 elements, and at most 16 GiB or half of the machine's memory, whichever is less.
void check_size(const mx::Shape& shape, mx::Dtype dtype);

// Checks that `axis` is in [-rank, rank). Returns the axis counted from the front, in [0, rank).
inline int checked_axis(int axis, int rank, const char* argument = "axis") {
  check_program(axis >= -rank && axis < rank, argument, " ", axis, " is out of range [", -rank, ", ", rank, ")");
  return axis < 0 ? axis + rank : axis;
}

// Returns `axes` counted from the front. If the list is absent or empty, returns all axes. Throws if an axis is out
// of range or listed twice.
std::vector<int> checked_axes(const flatbuffers::Vector<int32_t>* axes, int rank);

// Whether the CPU can read the elements of x in row-major order without evaluating anything. True for most inputs,
// constants and buffers.
inline bool is_on_host(const mx::array& x) {
  return !x.has_primitive() && x.flags().row_contiguous && x.is_available();
}

// The largest number of elements that an op reads or writes on the host while it builds the graph.
constexpr size_t kMaxInspectedElements = 4096;

// Whether x is a float32 zero that the host can read.
inline bool is_float_zero(const mx::array& x) {
  return x.size() == 1 && x.is_available() && x.dtype() == mx::float32 && *x.data<float>() == 0;
}

// Whether x is the result of the operation `name` that is not evaluated yet.
bool is_lazy(const mx::array& x, std::string_view name);

// The 64-bit integer type that can hold all values of T.
template <typename T>
using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;

// Calls `visit` with every element, as int64, of an integer or bool array, for which is_on_host() must be true. For a
// uint64 element that does not fit, calls `visit` with the largest int64.
template <typename Visit>
void for_each_integer(const mx::array& x, Visit&& visit) {
  const auto loop = [&]<typename T>(const T* data) {
    for (size_t i = 0; i < x.size(); ++i) {
      visit(std::in_range<int64_t>(static_cast<Wide<T>>(data[i])) ? static_cast<int64_t>(data[i])
                                                                  : std::numeric_limits<int64_t>::max());
    }
  };
  switch (x.dtype().val()) {
    case mx::Dtype::Val::bool_:
      return loop(x.data<bool>());
    case mx::Dtype::Val::uint8:
      return loop(x.data<uint8_t>());
    case mx::Dtype::Val::uint16:
      return loop(x.data<uint16_t>());
    case mx::Dtype::Val::uint32:
      return loop(x.data<uint32_t>());
    case mx::Dtype::Val::uint64:
      return loop(x.data<uint64_t>());
    case mx::Dtype::Val::int8:
      return loop(x.data<int8_t>());
    case mx::Dtype::Val::int16:
      return loop(x.data<int16_t>());
    case mx::Dtype::Val::int32:
      return loop(x.data<int32_t>());
    case mx::Dtype::Val::int64:
      return loop(x.data<int64_t>());
    default:
      fail(Error::InvalidProgram, "got dtype ", name(x.dtype()), ", expected an integer dtype");
  }
}

} // namespace executorch_mlx
