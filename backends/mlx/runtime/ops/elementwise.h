#pragma once

#include <cmath>
#include <functional>
#include <numbers>

#include "one_pass.h"
#include "ops/row.h"

namespace executorch_mlx {

using UnaryOp = mx::array (*)(const mx::array&, mx::StreamOrDevice);
using BinaryOp = mx::array (*)(const mx::array&, const mx::array&, mx::StreamOrDevice);

template <UnaryOp Op>
void unary(const fb::UnaryNode& n, Context& c) {
  c.set(n.out(), Op(c.in(n.x()), c.stream));
}

template <BinaryOp Op>
void binary(const fb::BinaryNode& n, Context& c) {
  c.set(n.out(), Op(c.in(n.a()), c.in(n.b()), c.stream));
}

// A comparison of two numbers that are on the host is answered there: a branch on
// it then waits for nothing.
template <BinaryOp Op, typename Host, bool kBoolsOnly = false>
void decision(const fb::BinaryNode& n, Context& c) {
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

inline mx::array silu(const mx::array& x, mx::StreamOrDevice s) {
  if (const auto y = silu_in_one_pass(x, mx::to_stream(s))) {
    return *y;
  }
  return mx::multiply(x, mx::sigmoid(x, s), s);
}

inline mx::array truncate(const mx::array& x, mx::StreamOrDevice s) {
  if (!is_float(x.dtype())) {
    return x;
  }
  return mx::where(mx::less(x, number(0, x), s), mx::ceil(x, s), mx::floor(x, s), s);
}

// Integer division faults in the processor, on 0 and on the lowest number by -1.
// A divisor that is there already is looked at; any other is guarded, and what
// is divided by 0 is 0.
enum class Divisors { harmless, guarded };

inline Divisors divisors(const mx::array& b) {
  if (!is_on_host(b) || b.size() > 4096) {
    return Divisors::guarded;
  }
  auto result = Divisors::harmless;
  for_each_integer(b, [&](int64_t x) {
    check_argument(x != 0, "b: integer division by zero");
    if (x == -1) {
      result = Divisors::guarded;
    }
  });
  return result;
}

template <BinaryOp Op>
mx::array divide_integers(const mx::array& a, const mx::array& b, mx::StreamOrDevice s) {
  constexpr bool kQuotient = Op == static_cast<BinaryOp>(mx::floor_divide);
  const auto dtype = mx::promote_types(a.dtype(), b.dtype());
  if (!is_integral(dtype) || divisors(b) == Divisors::harmless) {
    return Op(a, b, s);
  }
  const auto one = mx::array(1, b.dtype());
  const auto zero = mx::array(0, b.dtype());
  auto faulty = mx::equal(b, zero, s);
  if (!is_signed(dtype)) {
    return mx::where(faulty, mx::array(0, dtype), Op(a, mx::where(faulty, one, b, s), s), s);
  }
  const auto minus_one = mx::equal(b, mx::array(-1, b.dtype()), s);
  const auto safe = mx::where(mx::logical_or(faulty, minus_one, s), one, b, s);
  const auto result = mx::where(faulty, mx::array(0, dtype), Op(a, safe, s), s);
  return kQuotient ? mx::where(minus_one, mx::negative(mx::astype(a, dtype, s), s), result, s) : result;
}

// MLX loops for ever on a negative integer exponent. As in torch, the result is
// then 0 unless the base is 1 or -1.
inline mx::array power(const mx::array& a, const mx::array& b, mx::StreamOrDevice s) {
  const auto dtype = mx::promote_types(a.dtype(), b.dtype());
  if (!is_signed(dtype) || !is_signed(b.dtype())) {
    return mx::power(a, b, s);
  }
  const auto zero = mx::array(0, dtype);
  const auto one = mx::array(1, dtype);
  const auto base = mx::astype(a, dtype, s);
  const auto exponent = mx::astype(b, dtype, s);
  if (is_on_host(b) && b.size() <= 4096) {
    bool negative = false;
    for_each_integer(b, [&](int64_t x) { negative |= x < 0; });
    if (!negative) {
      return mx::power(base, exponent, s);
    }
  }
  const auto magnitude = mx::maximum(mx::abs(exponent, s), zero, s);
  const auto vanishes = mx::logical_and(
      mx::less(exponent, zero, s), mx::not_equal(mx::abs(base, s), one, s), s);
  return mx::where(vanishes, zero, mx::power(base, magnitude, s), s);
}

// In float32 whatever the dtype: 1 + erf cancels in half precision.
inline void gelu(const fb::GeluParams& n, Context& c) {
  const auto& s = c.stream;
  const auto& input = c.in(n.x());
  const auto x = is_half(input.dtype()) ? mx::astype(input, mx::float32, s) : input;
  check_program(is_float(x.dtype()), "x is ", name(x.dtype()), ", a float dtype was expected");
  const bool tanh = n.approximate()->string_view() == "tanh";
  check_program(
      tanh || n.approximate()->string_view() == "none",
      "approximate is \"", n.approximate()->c_str(), "\", \"none\" or \"tanh\" was expected");
  mx::array inner = x;
  if (tanh) {
    const auto cube = mx::multiply(x, mx::square(x, s), s);
    inner = mx::tanh(
        mx::multiply(
            number(std::sqrt(2 / std::numbers::pi), x),
            mx::add(x, mx::multiply(number(0.044715, x), cube, s), s),
            s),
        s);
  } else {
    inner = mx::erf(mx::multiply(x, number(std::sqrt(0.5), x), s), s);
  }
  const auto y = mx::multiply(
      mx::multiply(x, number(0.5, x), s), mx::add(inner, number(1, x), s), s);
  c.set(n.out(), mx::astype(y, input.dtype(), s));
}

inline void round_to(const fb::RoundParams& n, Context& c) {
  check_program(std::abs(int64_t{n.decimals()}) <= 38, "decimals ", n.decimals(), " is outside [-38, 38]");
  c.set(n.out(), mx::round(c.in(n.x()), n.decimals(), c.stream));
}

inline void clip(const fb::ClipParams& n, Context& c) {
  check_program(n.a_min() != nullptr || n.a_max() != nullptr, "neither a_min nor a_max is there");
  c.set(n.out(), mx::clip(c.in(n.x()), c.optional(n.a_min()), c.optional(n.a_max()), c.stream));
}

inline void where(const fb::WhereParams& n, Context& c) {
  c.set(n.out(), mx::where(c.in(n.condition()), c.in(n.x()), c.in(n.y()), c.stream));
}

inline void as_type(const fb::AsTypeParams& n, Context& c) {
  c.set(n.out(), mx::astype(c.in(n.x()), dtype_of(n.scalar_type()), c.stream));
}

constexpr Row kElementwiseRows[] = {
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
    MLX_ROW(ErfNode, unary<mx::erf>),
    MLX_ROW(ErfInvNode, unary<mx::erfinv>),
    MLX_ROW(ExpNode, unary<mx::exp>),
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
    MLX_ROW(SigmoidNode, unary<mx::sigmoid>),
    MLX_ROW(SignNode, unary<mx::sign>),
    MLX_ROW(SiluNode, unary<silu>),
    MLX_ROW(SinNode, unary<mx::sin>),
    MLX_ROW(SinhNode, unary<mx::sinh>),
    MLX_ROW(SqrtNode, unary<mx::sqrt>),
    MLX_ROW(SquareNode, unary<mx::square>),
    MLX_ROW(TanNode, unary<mx::tan>),
    MLX_ROW(TanhNode, unary<mx::tanh>),
    MLX_ROW(TruncNode, unary<truncate>),

    MLX_ROW(AddNode, binary<mx::add>),
    MLX_ROW(Atan2Node, binary<mx::arctan2>),
    MLX_ROW(BitwiseAndNode, decision<mx::bitwise_and, std::logical_and<>, true>),
    MLX_ROW(BitwiseOrNode, decision<mx::bitwise_or, std::logical_or<>, true>),
    MLX_ROW(BitwiseXorNode, binary<mx::bitwise_xor>),
    MLX_ROW(DivideNode, binary<mx::divide>),
    MLX_ROW(EqualNode, decision<mx::equal, std::equal_to<>>),
    MLX_ROW(FloorDivideNode, binary<divide_integers<mx::floor_divide>>),
    MLX_ROW(GreaterEqualNode, decision<mx::greater_equal, std::greater_equal<>>),
    MLX_ROW(GreaterNode, decision<mx::greater, std::greater<>>),
    MLX_ROW(LessEqualNode, decision<mx::less_equal, std::less_equal<>>),
    MLX_ROW(LessNode, decision<mx::less, std::less<>>),
    MLX_ROW(LogAddExpNode, binary<mx::logaddexp>),
    MLX_ROW(LogicalAndNode, decision<mx::logical_and, std::logical_and<>>),
    MLX_ROW(LogicalOrNode, decision<mx::logical_or, std::logical_or<>>),
    MLX_ROW(MaximumNode, binary<mx::maximum>),
    MLX_ROW(MinimumNode, binary<mx::minimum>),
    MLX_ROW(MultiplyNode, binary<mx::multiply>),
    MLX_ROW(NotEqualNode, decision<mx::not_equal, std::not_equal_to<>>),
    MLX_ROW(PowerNode, binary<power>),
    MLX_ROW(RemainderNode, binary<divide_integers<mx::remainder>>),
    MLX_ROW(SubtractNode, binary<mx::subtract>),

    MLX_ROW(AsTypeNode, as_type),
    MLX_ROW(ClipNode, clip),
    MLX_ROW(GeluNode, gelu),
    MLX_ROW(RoundNode, round_to),
    MLX_ROW(WhereNode, where),
};

} // namespace executorch_mlx
