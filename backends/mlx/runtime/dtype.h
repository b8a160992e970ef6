// Conversions between ScalarType, the dtypes of programs and ExecuTorch tensors, and MLX's Dtype.
#pragma once

#include <executorch/runtime/core/portable_type/scalar_type.h>
#include <mlx/mlx.h>

#include <optional>
#include <string>

#include "error.h"

namespace executorch_mlx {

namespace mx = mlx::core;
using ScalarType = executorch::runtime::etensor::ScalarType;

// Returns nullopt if MLX has no such dtype.
inline std::optional<mx::Dtype> find_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return mx::bool_;
    case ScalarType::Byte:
      return mx::uint8;
    case ScalarType::Char:
      return mx::int8;
    case ScalarType::Short:
      return mx::int16;
    case ScalarType::Int:
      return mx::int32;
    case ScalarType::Long:
      return mx::int64;
    case ScalarType::UInt16:
      return mx::uint16;
    case ScalarType::UInt32:
      return mx::uint32;
    case ScalarType::UInt64:
      return mx::uint64;
    case ScalarType::Half:
      return mx::float16;
    case ScalarType::BFloat16:
      return mx::bfloat16;
    case ScalarType::Float:
      return mx::float32;
    case ScalarType::Double:
      return mx::float64;
    case ScalarType::ComplexFloat:
      return mx::complex64;
    default:
      return std::nullopt;
  }
}

// Returns the dtype for the number of a ScalarType, as programs store it. Throws if MLX has no such dtype.
inline mx::Dtype dtype_of(int8_t scalar_type) {
  const auto dtype = find_dtype(static_cast<ScalarType>(scalar_type));
  check_program(dtype.has_value(), "scalar_type ", int{scalar_type}, " is not supported by MLX");
  return *dtype;
}

inline const char* name(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::bool_:
      return "bool";
    case mx::Dtype::Val::uint8:
      return "uint8";
    case mx::Dtype::Val::uint16:
      return "uint16";
    case mx::Dtype::Val::uint32:
      return "uint32";
    case mx::Dtype::Val::uint64:
      return "uint64";
    case mx::Dtype::Val::int8:
      return "int8";
    case mx::Dtype::Val::int16:
      return "int16";
    case mx::Dtype::Val::int32:
      return "int32";
    case mx::Dtype::Val::int64:
      return "int64";
    case mx::Dtype::Val::float16:
      return "float16";
    case mx::Dtype::Val::float32:
      return "float32";
    case mx::Dtype::Val::float64:
      return "float64";
    case mx::Dtype::Val::bfloat16:
      return "bfloat16";
    case mx::Dtype::Val::complex64:
      return "complex64";
  }
  return "?";
}

inline std::string name(ScalarType type) {
  const auto dtype = find_dtype(type);
  return dtype ? name(*dtype) : str("ScalarType ", static_cast<int>(type));
}

inline bool is_float(mx::Dtype dtype) { return mx::issubdtype(dtype, mx::floating); }

inline bool is_half(mx::Dtype dtype) { return dtype == mx::float16 || dtype == mx::bfloat16; }

// True for signed integer dtypes, and false for float dtypes.
inline bool is_signed_integer(mx::Dtype dtype) { return mx::issubdtype(dtype, mx::signedinteger); }

// True for integer dtypes. Bool is not an integer dtype.
inline bool is_integral(mx::Dtype dtype) { return mx::issubdtype(dtype, mx::integer); }

// Returns x as a scalar array. C++ does not define the conversion of a double to an integer type that cannot hold the
// value. For integer dtypes, x is therefore first converted to a 64-bit integer, which is unsigned if x is not
// negative. MLX converts this integer to narrower dtypes, and wraps around if it does not fit. `argument` names x in
// messages.
inline mx::array scalar(const char* argument, double x, mx::Dtype dtype) {
  if (dtype == mx::bool_) {
    return mx::array(x != 0);
  }
  if (is_integral(dtype)) {
    check_argument(x >= -0x1p63 && x < 0x1p64, argument, ": ", x, " does not fit in 64 bits");
    return x < 0 ? mx::array(static_cast<int64_t>(x), dtype) : mx::array(static_cast<uint64_t>(x), dtype);
  }
  return mx::array(x, dtype);
}

// A scalar array with the dtype of `like`. In MLX's C++ API, unlike in its Python API, a plain number becomes an array
// of float32 or int32. An operation on this array and `like` would promote a float16 `like` to float32, for example.
inline mx::array scalar_like(double x, const mx::array& like) { return scalar("factor", x, like.dtype()); }

// For messages such as `float32[2,3]`. dims() and describe() return objects that refer to their arguments and are
// formatted only when they are printed.
template <typename Sizes>
struct Dims {
  const Sizes& sizes;

  friend std::ostream& operator<<(std::ostream& out, const Dims& dims) {
    out << '[';
    for (size_t i = 0; i < dims.sizes.size(); ++i) {
      out << (i == 0 ? "" : ",") << dims.sizes[i];
    }
    return out << ']';
  }
};

template <typename Sizes>
Dims<Sizes> dims(const Sizes& sizes) {
  return {sizes};
}

struct Described {
  const mx::array& x;

  friend std::ostream& operator<<(std::ostream& out, const Described& described) {
    return out << name(described.x.dtype()) << dims(described.x.shape());
  }
};

inline Described describe(const mx::array& x) { return {x}; }

} // namespace executorch_mlx
