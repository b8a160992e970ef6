// Elementwise operations. See op_row.h.
#pragma once

#include <cmath>
#include <functional>
#include <numbers>

#include "ops/cpu/cpu_kernels.h"
#include "ops/op_row.h"

namespace executorch_mlx {

using UnaryOp = mx::array (*)(const mx::array&, mx::StreamOrDevice);
using BinaryOp = mx::array (*)(const mx::array&, const mx::array&, mx::StreamOrDevice);

// The largest number of elements that an op inspects on the host while it builds the graph.
constexpr size_t kMaxInspectedElements = 4096;

// Functions of ops/cpu/cpu_kernels.h.
using UnaryKernel = std::optional<mx::array> (*)(const mx::array&, mx::Stream);
using BinaryKernel = std::optional<mx::array> (*)(const mx::array&, const mx::array&, mx::Stream);

// `Kernel` computes the result if it applies, else `Op`.
template <UnaryOp Op, UnaryKernel Kernel = nullptr>
void unary(const fb::UnaryNode& n, Context& c) {
  const auto& x = c.in(n.x());
  if constexpr (Kernel != nullptr) {
    if (const auto y = Kernel(x, c.stream)) {
      return c.set(n.out(), *y);
    }
  }
  c.set(n.out(), Op(x, c.stream));
}

template <BinaryOp Op, BinaryKernel Kernel = nullptr>
void binary(const fb::BinaryNode& n, Context& c) {
  const auto& a = c.in(n.a());
  const auto& b = c.in(n.b());
  if constexpr (Kernel != nullptr) {
    if (const auto y = Kernel(a, b, c.stream)) {
      return c.set(n.out(), *y);
    }
  }
  c.set(n.out(), Op(a, b, c.stream));
}

// A comparison or a logical op. If both operands are scalars on the host, `Host` computes the result there, so that a
// branch that depends on the result does not have to wait for an evaluation. kBoolsOnly limits this to bool operands:
// for a bitwise op, `Host` is a logical op, which gives the same result only for bools.
template <BinaryOp Op, typename Host, bool kBoolsOnly = false>
void predicate(const fb::BinaryNode& n, Context& c) {
  const auto& a = c.in(n.a());
  const auto& b = c.in(n.b());
  if (a.ndim() == 0 && b.ndim() == 0 && a.dtype() == b.dtype() && is_on_host(a) && is_on_host(b)) {
    if (a.dtype() == mx::bool_) {
      return c.set(n.out(), mx::array(bool(Host{}(*a.data<bool>(), *b.data<bool>()))));
    }
    if (!kBoolsOnly && a.dtype() == mx::float32) {
      return c.set(n.out(), mx::array(bool(Host{}(*a.data<float>(), *b.data<float>()))));
    }
    if (!kBoolsOnly && a.dtype() == mx::int64) {
      return c.set(n.out(), mx::array(bool(Host{}(*a.data<int64_t>(), *b.data<int64_t>()))));
    }
  }
  c.set(n.out(), Op(a, b, c.stream));
}

inline mx::array silu(const mx::array& x, mx::StreamOrDevice s) { return mx::multiply(x, mx::sigmoid(x, s), s); }

inline mx::array truncate(const mx::array& x, mx::StreamOrDevice s) {
  if (!is_float(x.dtype())) {
    return x;
  }
  return mx::where(mx::less(x, scalar_like(0, x), s), mx::ceil(x, s), mx::floor(x, s), s);
}

// Whether the elements of b are known to be safe divisors. The processor faults when it divides an integer by 0, or
// the lowest integer by -1. If b is small and on the host, this function looks at its elements: throws if one is 0, and
// returns false if one is -1. For any other b, it returns false without looking.
inline bool is_safe_divisor(const mx::array& b) {
  if (!is_on_host(b) || b.size() > kMaxInspectedElements) {
    return false;
  }
  bool has_minus_one = false;
  for_each_integer(b, [&](int64_t x) {
    check_argument(x != 0, "b: integer division by zero");
    has_minus_one |= x == -1;
  });
  return !has_minus_one;
}

// Op is mx::floor_divide or mx::remainder. For integers, the graph replaces divisors of 0 and -1 by 1, unless b is
// known to contain none. It then sets the result to 0 where the divisor is 0. Where the divisor is -1, the quotient is
// set to -a, and the remainder is 0.
template <BinaryOp Op>
mx::array divide_integers(const mx::array& a, const mx::array& b, mx::StreamOrDevice s) {
  constexpr bool kQuotient = Op == static_cast<BinaryOp>(mx::floor_divide);
  const auto dtype = mx::promote_types(a.dtype(), b.dtype());
  if (!is_integral(dtype) || is_safe_divisor(b)) {
    return Op(a, b, s);
  }
  const auto one = mx::array(1, b.dtype());
  const auto zero = mx::array(0, b.dtype());
  const auto is_zero = mx::equal(b, zero, s);
  if (!is_signed_integer(dtype)) {
    return mx::where(is_zero, mx::array(0, dtype), Op(a, mx::where(is_zero, one, b, s), s), s);
  }
  // Compared after promotion: as uint8, -1 would be 255.
  const auto is_minus_one = mx::equal(mx::astype(b, dtype, s), mx::array(-1, dtype), s);
  const auto safe = mx::where(mx::logical_or(is_zero, is_minus_one, s), one, b, s);
  const auto result = mx::where(is_zero, mx::array(0, dtype), Op(a, safe, s), s);
  return kQuotient ? mx::where(is_minus_one, mx::negative(mx::astype(a, dtype, s), s), result, s) : result;
}

// mx::power() never returns if an exponent is a negative integer. For such an exponent, this function gives the same
// results as torch: 0, unless the base is 1 or -1.
inline mx::array power(const mx::array& a, const mx::array& b, mx::StreamOrDevice s) {
  const auto dtype = mx::promote_types(a.dtype(), b.dtype());
  if (!is_signed_integer(dtype) || !is_signed_integer(b.dtype())) {
    return mx::power(a, b, s);
  }
  const auto zero = mx::array(0, dtype);
  const auto one = mx::array(1, dtype);
  const auto base = mx::astype(a, dtype, s);
  const auto exponent = mx::astype(b, dtype, s);
  if (is_on_host(b) && b.size() <= kMaxInspectedElements) {
    bool has_negative = false;
    for_each_integer(b, [&](int64_t x) { has_negative |= x < 0; });
    if (!has_negative) {
      return mx::power(base, exponent, s);
    }
  }
  const auto magnitude = mx::maximum(mx::abs(exponent, s), zero, s);
  const auto is_zero = mx::logical_and(mx::less(exponent, zero, s), mx::not_equal(mx::abs(base, s), one, s), s);
  return mx::where(is_zero, zero, mx::power(base, magnitude, s), s);
}

// If x has half precision, computes in float32, because for negative x the sum 1 + erf(...) loses digits to
// cancellation.
inline void gelu(const fb::GeluParams& n, Context& c) {
  const auto& s = c.stream;
  const auto& input = c.in(n.x());
  const auto x = is_half(input.dtype()) ? mx::astype(input, mx::float32, s) : input;
  check_program(is_float(x.dtype()), "x: got ", name(x.dtype()), ", expected a float dtype");
  const bool tanh = n.approximate()->string_view() == "tanh";
  check_program(tanh || n.approximate()->string_view() == "none", "approximate: got \"", n.approximate()->c_str(),
      "\", expected \"none\" or \"tanh\"");
  mx::array inner = x;
  if (tanh) {
    const auto cube = mx::multiply(x, mx::square(x, s), s);
    inner = mx::tanh(mx::multiply(scalar_like(std::sqrt(2 / std::numbers::pi), x),
                         mx::add(x, mx::multiply(scalar_like(0.044715, x), cube, s), s), s),
        s);
  } else {
    inner = mx::erf(mx::multiply(x, scalar_like(std::sqrt(0.5), x), s), s);
  }
  const auto y = mx::multiply(mx::multiply(x, scalar_like(0.5, x), s), mx::add(inner, scalar_like(1, x), s), s);
  c.set(n.out(), mx::astype(y, input.dtype(), s));
}

// Throws if 10 ** decimals would not be a finite float32.
inline void round_to(const fb::RoundParams& n, Context& c) {
  check_program(std::abs(int64_t{n.decimals()}) <= 38, "decimals ", n.decimals(), " is out of range [-38, 38]");
  c.set(n.out(), mx::round(c.in(n.x()), n.decimals(), c.stream));
}

inline void clip(const fb::ClipParams& n, Context& c) {
  check_program(n.a_min() != nullptr || n.a_max() != nullptr, "expected a_min or a_max");
  c.set(n.out(), mx::clip(c.in(n.x()), c.optional(n.a_min()), c.optional(n.a_max()), c.stream));
}

inline void where(const fb::WhereParams& n, Context& c) {
  c.set(n.out(), mx::where(c.in(n.condition()), c.in(n.x()), c.in(n.y()), c.stream));
}

inline void as_type(const fb::AsTypeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto dtype = dtype_of(n.scalar_type());
  const bool is_integer = is_integral(dtype) && is_integral(x.dtype()) && x.dtype() != mx::uint64;
  if (x.size() == 1 && is_integer && is_on_host(x)) {
    // Then the host also knows the result, for example a position, and a GPU needs no kernel.
    int64_t value = 0;
    for_each_integer(x, [&](int64_t element) { value = element; });
    return c.set(n.out(), views::reshape(mx::array(value, dtype), x.shape(), c.stream));
  }
  const auto y = cpu::convert(x, dtype, c.stream);
  c.set(n.out(), y ? *y : mx::astype(x, dtype, c.stream));
}

// Like mx::exp(). MLX's CPU kernel returns infinity from 88 on, although the largest float32 is exp(88.72).
inline mx::array exp(const mx::array& x, mx::StreamOrDevice s) {
  if (mx::to_stream(s).device != mx::Device::cpu || x.dtype() != mx::float32) {
    return mx::exp(x, s);
  }
  const auto limit = mx::array(88.0F);
  const auto above = mx::maximum(mx::subtract(x, limit, s), mx::array(0.0F), s);
  return mx::multiply(mx::exp(mx::minimum(x, limit, s), s), mx::exp(above, s), s);
}

// Like mx::erf(), but accurate near zero, where MLX's CPU kernel returns 0, or a zero with the wrong sign. A division
// by that zero gives the wrong infinity. Near zero, erf(x) is 2 / sqrt(pi) * (x - x^3 / 3).
inline mx::array erf(const mx::array& x, mx::StreamOrDevice s) {
  constexpr double kSlope = 2 * std::numbers::inv_sqrtpi;
  const auto factor =
      mx::subtract(scalar_like(kSlope, x), mx::multiply(scalar_like(kSlope / 3, x), mx::square(x, s), s), s);
  const auto is_near_zero = mx::less(mx::abs(x, s), scalar_like(0.05, x), s);
  return mx::where(is_near_zero, mx::multiply(x, factor, s), mx::erf(x, s), s);
}

constexpr OpRow kElementwiseRows[] = {
    MLX_ROW(AbsNode, unary<mx::abs>),
    MLX_ROW(ArccosNode, unary<mx::arccos>),
    MLX_ROW(ArccoshNode, unary<mx::arccosh>),
    MLX_ROW(ArcsinNode, unary<mx::arcsin>),
    MLX_ROW(ArcsinhNode, unary<mx::arcsinh>),
    MLX_ROW(ArctanNode, unary<mx::arctan>),
    MLX_ROW(ArctanhNode, unary<mx::arctanh>),
    MLX_ROW(BitwiseInvertNode, unary<mx::bitwise_invert>),
    MLX_ROW(CeilNode, unary<mx::ceil>),
    MLX_ROW(CosNode, unary<mx::cos>),
    MLX_ROW(CoshNode, unary<mx::cosh>),
    MLX_ROW(ErfNode, unary<erf>),
    MLX_ROW(ErfInvNode, unary<mx::erfinv>),
    MLX_ROW(ExpNode, unary<exp, cpu::exp>),
    MLX_ROW(Expm1Node, unary<mx::expm1>),
    MLX_ROW(FloorNode, unary<mx::floor>),
    MLX_ROW(LogNode, unary<mx::log>),
    MLX_ROW(Log10Node, unary<mx::log10>),
    MLX_ROW(Log1pNode, unary<mx::log1p>),
    MLX_ROW(Log2Node, unary<mx::log2>),
    MLX_ROW(LogicalNotNode, unary<mx::logical_not>),
    MLX_ROW(NegNode, unary<mx::negative>),
    MLX_ROW(ReciprocalNode, unary<mx::reciprocal>),
    MLX_ROW(RsqrtNode, unary<mx::rsqrt>),
    MLX_ROW(SigmoidNode, unary<mx::sigmoid, cpu::sigmoid>),
    MLX_ROW(SignNode, unary<mx::sign>),
    MLX_ROW(SiluNode, unary<silu, cpu::silu>),
    MLX_ROW(SinNode, unary<mx::sin>),
    MLX_ROW(SinhNode, unary<mx::sinh>),
    MLX_ROW(SqrtNode, unary<mx::sqrt>),
    MLX_ROW(SquareNode, unary<mx::square>),
    MLX_ROW(TanNode, unary<mx::tan>),
    MLX_ROW(TanhNode, unary<mx::tanh, cpu::tanh>),
    MLX_ROW(TruncNode, unary<truncate>),

    MLX_ROW(AddNode, binary<mx::add, cpu::add>),
    MLX_ROW(Atan2Node, binary<mx::arctan2>),
    MLX_ROW(BitwiseAndNode, predicate<mx::bitwise_and, std::logical_and<>, true>),
    MLX_ROW(BitwiseOrNode, predicate<mx::bitwise_or, std::logical_or<>, true>),
    MLX_ROW(BitwiseXorNode, binary<mx::bitwise_xor>),
    MLX_ROW(DivideNode, binary<mx::divide>),
    MLX_ROW(EqualNode, predicate<mx::equal, std::equal_to<>>),
    MLX_ROW(FloorDivideNode, binary<divide_integers<mx::floor_divide>>),
    MLX_ROW(GreaterEqualNode, predicate<mx::greater_equal, std::greater_equal<>>),
    MLX_ROW(GreaterNode, predicate<mx::greater, std::greater<>>),
    MLX_ROW(LessEqualNode, predicate<mx::less_equal, std::less_equal<>>),
    MLX_ROW(LessNode, predicate<mx::less, std::less<>>),
    MLX_ROW(LogAddExpNode, binary<mx::logaddexp>),
    MLX_ROW(LogicalAndNode, predicate<mx::logical_and, std::logical_and<>>),
    MLX_ROW(LogicalOrNode, predicate<mx::logical_or, std::logical_or<>>),
    MLX_ROW(MaximumNode, binary<mx::maximum>),
    MLX_ROW(MinimumNode, binary<mx::minimum>),
    MLX_ROW(MultiplyNode, binary<mx::multiply, cpu::multiply>),
    MLX_ROW(NotEqualNode, predicate<mx::not_equal, std::not_equal_to<>>),
    MLX_ROW(PowerNode, binary<power>),
    MLX_ROW(RemainderNode, binary<divide_integers<mx::remainder>>),
    MLX_ROW(SubtractNode, binary<mx::subtract, cpu::subtract>),

    MLX_ROW(AsTypeNode, as_type),
    MLX_ROW(ClipNode, clip),
    MLX_ROW(GeluNode, gelu),
    MLX_ROW(RoundNode, round_to),
    MLX_ROW(WhereNode, where),
};

} // namespace executorch_mlx
