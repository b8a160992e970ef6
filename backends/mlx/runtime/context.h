// What an op sees: slots to read and write, the stream to put work on, and the
// checks that MLX leaves to its caller.
#pragma once

#include <mlx/mlx.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "device.h"
#include "dtype.h"
#include "error.h"
#include "program.h"
#include "state.h"

namespace executorch::runtime {
class EventTracer;
}

namespace executorch_mlx {

class Context {
 public:
  // With a tracer every instruction is timed, and evaluated: see profile.cpp.
  Context(
      const Program& program,
      State& state,
      mx::Stream stream,
      executorch::runtime::EventTracer* tracer = nullptr)
      : program(program), stream(stream), state_(state), tracer_(tracer) {}

  const Program& program;
  const mx::Stream stream;

  // -- tensors ---------------------------------------------------------------

  const mx::array& in(const fb::Tid* tid) const {
    const auto& slot = state_.tensors[tid->idx()];
    if (!slot) [[unlikely]] {
      fail(Error::InvalidProgram, "reads ", slot_name(tid->idx()), ", which nothing has written");
    }
    return *slot;
  }

  std::optional<mx::array> optional(const fb::Tid* tid) const {
    return tid == nullptr ? std::nullopt : std::optional(in(tid));
  }

  std::vector<mx::array> list(const flatbuffers::Vector<const fb::Tid*>& tids) const {
    std::vector<mx::array> result;
    result.reserve(tids.size());
    for (const auto* tid : tids) {
      result.push_back(in(tid));
    }
    return result;
  }

  // The array of `tid` to be updated into `out`. If that is the same slot it is
  // emptied, so that the update can be made in place.
  mx::array take(const fb::Tid* tid, const fb::Tid* out) {
    if (tid->idx() != out->idx()) {
      return in(tid);
    }
    mx::array result = in(tid);
    state_.tensors[tid->idx()].reset();
    return result;
  }

  void set(const fb::Tid* tid, mx::array x) {
    check_size(x.shape(), x.dtype());
    state_.tensors[tid->idx()] = std::move(x);
  }

  KvLayer& cache(int layer) {
    return state_.cache(layer);
  }

  // -- values ----------------------------------------------------------------

  int64_t integer(const fb::Vid* vid) const;
  double real(const fb::FloatOrVid* x) const;
  int64_t integer(const fb::IntOrVid* x) const {
    return x->is_vid() ? integer(x->vid()) : x->literal();
  }
  bool is_integer(const fb::Vid* vid) const {
    return !std::holds_alternative<double>(state_.values[vid->idx()]);
  }

  void set(const fb::Vid* vid, int64_t x) {
    state_.values[vid->idx()] = x;
  }

  // MLX's sizes are 32 bits wide.
  int size(const char* what, int64_t x) const {
    check_argument(
        x >= std::numeric_limits<int>::min() && x <= std::numeric_limits<int>::max(),
        what, " ", x, " does not fit in 32 bits");
    return static_cast<int>(x);
  }
  int size(const char* what, const fb::IntOrVid* x) const {
    return size(what, integer(x));
  }

  // A list of sizes, each at least `lowest`.
  mx::Shape sizes(
      const char* what,
      const flatbuffers::Vector<flatbuffers::Offset<fb::IntOrVid>>& list,
      int lowest = 0) const {
    mx::Shape result;
    for (const auto* x : list) {
      result.push_back(size(what, x));
      check_argument(result.back() >= lowest, what, " ", result.back(), " is below ", lowest);
    }
    return result;
  }

  // -- running ---------------------------------------------------------------

  void run(uint32_t chain);

  // The only synchronization in the middle of a program.
  void evaluate_now(const mx::array& x) {
    state_.evaluate({x}, stream);
  }

  static void check_size(const mx::Shape& shape, mx::Dtype dtype);
  std::string slot_name(uint32_t tensor) const;
  std::string describe(const fb::Instruction& instruction) const;

 private:
  void run_traced(uint32_t chain, size_t instruction);

  State& state_;
  executorch::runtime::EventTracer* tracer_;
  std::unordered_map<const void*, uint32_t> rounds_;  // of what a traced call repeats
  uint64_t executed_ = 0;
};

// -- checks that many ops share ------------------------------------------------

inline int checked_axis(int axis, int rank, const char* what = "axis") {
  check_program(
      axis >= -rank && axis < rank, what, " ", axis, " is outside [", -rank, ", ", rank, ")");
  return axis < 0 ? axis + rank : axis;
}

// Distinct axes; none listed means all.
inline std::vector<int> checked_axes(const flatbuffers::Vector<int32_t>* axes, int rank) {
  std::vector<int> result;
  if (axes == nullptr || axes->size() == 0) {
    for (int i = 0; i < rank; ++i) {
      result.push_back(i);
    }
    return result;
  }
  for (const int32_t axis : *axes) {
    result.push_back(checked_axis(axis, rank));
    check_program(
        std::count(result.begin(), result.end(), result.back()) == 1, "axis ", axis, " comes twice");
  }
  return result;
}

inline bool is_float(mx::Dtype dtype) {
  return mx::issubdtype(dtype, mx::floating);
}

inline bool is_half(mx::Dtype dtype) {
  return dtype == mx::float16 || dtype == mx::bfloat16;
}

inline bool is_signed(mx::Dtype dtype) {
  return mx::issubdtype(dtype, mx::signedinteger);
}

// Bools are no integers here.
inline bool is_integral(mx::Dtype dtype) {
  return mx::issubdtype(dtype, mx::integer);
}

// A number of the dtype of `like`: MLX's C++ promotes where its Python does not.
inline mx::array number(double x, const mx::array& like) {
  return mx::array(x, like.dtype());
}

// The data of an array that is there already (an input, a constant, a buffer),
// which can be read without an evaluation.
inline bool is_on_host(const mx::array& x) {
  return !x.has_primitive() && x.flags().row_contiguous && x.is_available();
}

template <typename T>
using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;

// Reads elements of an integer or bool array that is on the host, as int64; what
// of uint64 does not fit comes as the highest int64.
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
      fail(Error::InvalidProgram, name(x.dtype()), " came, an integer dtype was expected");
  }
}

} // namespace executorch_mlx
