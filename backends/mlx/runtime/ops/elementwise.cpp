// Elementwise operations. See op.h.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>

#include "kernels/cpu/elementwise.h"
#include "memory/views.h"
#include "memory/kernel_result.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace cpu { // kernels for Linux CPUs: see memory/kernel_result.h

namespace {

// Whether b, repeated in whole, has the shape of a: b has one element, or its axes are the last axes of a.
bool repeats_in(const mx::array& b, const mx::array& a) {
  return b.size() == 1 ? b.ndim() <= a.ndim()
                       : b.ndim() <= a.ndim() && std::equal(b.shape().rbegin(), b.shape().rend(), a.shape().rbegin());
}

// Returns the result of the kernel, or nullopt if the kernel does not support the operands or one of them is lazy. MLX
// can fuse operations on lazy operands.
std::optional<mx::array> binary(
    const char* name, Elementwise operation, const mx::array& a, const mx::array& b, mx::Stream stream) {
  if (!is_supported_operand(a, stream) || b.dtype() != a.dtype() || !repeats_in(b, a) || !are_available({a, b})) {
    return std::nullopt;
  }
  const auto make_task = [operation](const auto& inputs, auto& out) -> Task {
    const auto period = static_cast<int64_t>(inputs[1].size());
    const auto count = static_cast<int64_t>(out.size());
    return
        [=, a = inputs[0].template data<void>(), b = inputs[1].template data<void>(), type = *float_type(out.dtype()),
            y = out.template data<void>()] { kernel::binary(operation, a, b, type, y, count, period); };
  };
  return kernel_result(name, a.shape(), a.dtype(), {contiguous(a, stream), contiguous(b, stream)}, stream, make_task);
}

std::optional<mx::array> unary(const char* name, Elementwise operation, const mx::array& x, mx::Stream stream) {
  if (!is_supported_operand(x, stream)) {
    return std::nullopt;
  }
  const auto make_task = [operation](const auto& inputs, auto& out) -> Task {
    const auto count = static_cast<int64_t>(out.size());
    return [=, x = inputs[0].template data<void>(), type = *float_type(out.dtype()), y = out.template data<void>()] {
      kernel::unary(operation, x, type, y, count);
    };
  };
  return kernel_result(name, x.shape(), x.dtype(), {contiguous(x, stream)}, stream, make_task);
}

// a + b, a - b and a * b for available operands of the same dtype: float32, float16 or bfloat16. b has one element, or
// the last axes of a; for sums and products, a and b may also change places.
std::optional<mx::array> add(const mx::array& a, const mx::array& b, mx::Stream stream) {
  const auto y = binary("Add", Elementwise::add, a, b, stream);
  return y ? y : binary("Add", Elementwise::add, b, a, stream);
}

std::optional<mx::array> subtract(const mx::array& a, const mx::array& b, mx::Stream stream) {
  return binary("Subtract", Elementwise::subtract, a, b, stream);
}

std::optional<mx::array> multiply(const mx::array& a, const mx::array& b, mx::Stream stream) {
  const auto y = binary("Multiply", Elementwise::multiply, a, b, stream);
  return y ? y : binary("Multiply", Elementwise::multiply, b, a, stream);
}

// x as `dtype`. One of the two dtypes is float32, the other float16 or bfloat16. nullopt also if x is lazy.
std::optional<mx::array> convert(const mx::array& x, mx::Dtype dtype, mx::Stream stream) {
  const auto to = float_type(dtype);
  const bool has_kernel = to && x.dtype() != dtype && (x.dtype() == mx::float32 || dtype == mx::float32);
  if (!has_kernel || !is_supported_operand(x, stream) || !x.is_available()) {
    return std::nullopt;
  }
  const auto make_task = [](const auto& inputs, auto& out) -> Task {
    return [x = inputs[0].template data<void>(), from = *float_type(inputs[0].dtype()), y = out.template data<void>(),
               to = *float_type(out.dtype()),
               count = static_cast<int64_t>(out.size())] { kernel::convert(x, from, y, to, count); };
  };
  return kernel_result("Convert", x.shape(), dtype, {contiguous(x, stream)}, stream, make_task);
}

// exp(x), x * sigmoid(x), sigmoid(x), tanh(x), erf(x) and GELU for float32, float16 or bfloat16 x, computed in float32.
std::optional<mx::array> exp(const mx::array& x, mx::Stream stream) {
  return unary("Exp", Elementwise::exp, x, stream);
}

std::optional<mx::array> silu(const mx::array& x, mx::Stream stream) {
  return unary("Silu", Elementwise::silu, x, stream);
}

std::optional<mx::array> sigmoid(const mx::array& x, mx::Stream stream) {
  return unary("Sigmoid", Elementwise::sigmoid, x, stream);
}

std::optional<mx::array> tanh(const mx::array& x, mx::Stream stream) {
  return unary("Tanh", Elementwise::tanh, x, stream);
}

std::optional<mx::array> erf(const mx::array& x, mx::Stream stream) {
  return unary("Erf", Elementwise::erf, x, stream);
}

std::optional<mx::array> gelu(const mx::array& x, bool by_tanh, mx::Stream stream) {
  return unary("Gelu", by_tanh ? Elementwise::gelu_tanh : Elementwise::gelu, x, stream);
}

} // namespace

} // namespace cpu

namespace {

using UnaryOp = mx::array (*)(const mx::array&, mx::StreamOrDevice);
using BinaryOp = mx::array (*)(const mx::array&, const mx::array&, mx::StreamOrDevice);

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

// Host{}(a, b), bool, for each element of operands with the dtype of T. Operands of different shapes: one is a scalar.
template <typename Host, typename T>
mx::array compare(const mx::array& a, const mx::array& b) {
  auto y = cpu::allocate_result(a.ndim() == 0 ? b.shape() : a.shape(), mx::bool_);
  const size_t a_step = a.size() > 1;
  const size_t b_step = b.size() > 1;
  auto* const to = y.data<bool>();
  for (size_t i = 0; i < y.size(); ++i) {
    to[i] = Host{}(a.data<T>()[i * a_step], b.data<T>()[i * b_step]);
  }
  return y;
}

// A comparison or a logical op. If both operands are small and on the host, `Host` computes the result there, so that a
// branch that depends on the result does not have to wait for an evaluation. kBoolsOnly limits this to bool operands:
// for a bitwise op, `Host` is a logical op, which gives the same result only for bools.
template <BinaryOp Op, typename Host, bool kBoolsOnly = false>
void predicate(const fb::BinaryNode& n, Context& c) {
  const auto& a = c.in(n.a());
  const auto& b = c.in(n.b());
  const bool fits = a.shape() == b.shape() || a.ndim() == 0 || b.ndim() == 0;
  const size_t size = std::max(a.size(), b.size());
  if (fits && size <= kMaxInspectedElements && a.dtype() == b.dtype() && is_on_host(a) && is_on_host(b)) {
    if (a.dtype() == mx::bool_) {
      return c.set(n.out(), compare<Host, bool>(a, b));
    }
    if (!kBoolsOnly && a.dtype() == mx::int64) {
      return c.set(n.out(), compare<Host, int64_t>(a, b));
    }
    // Only single numbers: kernels of a GPU may still write the other floats of buffers.
    if (!kBoolsOnly && a.dtype() == mx::float32 && size == 1) {
      return c.set(n.out(), compare<Host, float>(a, b));
    }
  }
  c.set(n.out(), Op(a, b, c.stream));
}

mx::array silu(const mx::array& x, mx::StreamOrDevice s) { return mx::multiply(x, mx::sigmoid(x, s), s); }

mx::array truncate(const mx::array& x, mx::StreamOrDevice s) {
  if (!is_float(x.dtype())) {
    return x;
  }
  return mx::where(mx::less(x, scalar_like(0, x), s), mx::ceil(x, s), mx::floor(x, s), s);
}

// Whether the elements of b are known to be safe divisors. The processor faults when it divides an integer by 0, or
// the lowest integer by -1. If b is small and on the host, this function looks at its elements: throws if one is 0, and
// returns false if one is -1. For any other b, it returns false without looking.
bool is_safe_divisor(const mx::array& b) {
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
  if (!is_integral(dtype) || a.size() == 0 || is_safe_divisor(b)) {
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
mx::array power(const mx::array& a, const mx::array& b, mx::StreamOrDevice s) {
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
void gelu(const fb::GeluParams& n, Context& c) {
  const auto& s = c.stream;
  const auto& input = c.in(n.x());
  check_program(is_float(input.dtype()), "x: got ", name(input.dtype()), ", expected a float dtype");
  const bool tanh = n.approximate()->string_view() == "tanh";
  check_program(tanh || n.approximate()->string_view() == "none", "approximate: got \"", n.approximate()->c_str(),
      "\", expected \"none\" or \"tanh\"");
  if (auto y = cpu::gelu(input, tanh, s)) {
    c.set(n.out(), std::move(*y));
    return;
  }
  const auto x = is_half(input.dtype()) ? mx::astype(input, mx::float32, s) : input;
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
void round_to(const fb::RoundParams& n, Context& c) {
  check_program(std::abs(int64_t{n.decimals()}) <= 38, "decimals ", n.decimals(), " is out of range [-38, 38]");
  c.set(n.out(), mx::round(c.in(n.x()), n.decimals(), c.stream));
}

void clip(const fb::ClipParams& n, Context& c) {
  check_program(n.a_min() != nullptr || n.a_max() != nullptr, "expected a_min or a_max");
  c.set(n.out(), mx::clip(c.in(n.x()), c.optional(n.a_min()), c.optional(n.a_max()), c.stream));
}

void where(const fb::WhereParams& n, Context& c) {
  c.set(n.out(), mx::where(c.in(n.condition()), c.in(n.x()), c.in(n.y()), c.stream));
}

void as_type(const fb::AsTypeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto dtype = dtype_of(n.scalar_type());
  const bool is_integer = is_integral(dtype) && is_integral(x.dtype()) && x.dtype() != mx::uint64;
  constexpr size_t kMaxNumbers = 64; // of positions, one of each row
  if (x.size() > 0 && x.size() <= kMaxNumbers && is_integer && is_on_host(x)) {
    // Then the host also knows the result, and a GPU needs no kernel.
    std::vector<int64_t> values;
    for_each_integer(x, [&](int64_t element) { values.push_back(element); });
    return c.set(n.out(), mx::array(values.begin(), x.shape(), dtype));
  }
  const auto y = cpu::convert(x, dtype, c.stream);
  c.set(n.out(), y ? *y : mx::astype(x, dtype, c.stream));
}

// Like mx::exp(). MLX's CPU kernel returns infinity from 88 on, although the largest float32 is exp(88.72).
mx::array exp(const mx::array& x, mx::StreamOrDevice s) {
  if (mx::to_stream(s).device != mx::Device::cpu || x.dtype() != mx::float32) {
    return mx::exp(x, s);
  }
  const auto limit = mx::array(88.0F);
  const auto above = mx::maximum(mx::subtract(x, limit, s), mx::array(0.0F), s);
  return mx::multiply(mx::exp(mx::minimum(x, limit, s), s), mx::exp(above, s), s);
}

// Like mx::erf(), but accurate near zero, where MLX's CPU kernel returns 0, or a zero with the wrong sign. A division
// by that zero gives the wrong infinity. Near zero, erf(x) is 2 / sqrt(pi) * (x - x^3 / 3).
mx::array erf(const mx::array& x, mx::StreamOrDevice s) {
  constexpr double kSlope = 2 * std::numbers::inv_sqrtpi;
  const auto factor =
      mx::subtract(scalar_like(kSlope, x), mx::multiply(scalar_like(kSlope / 3, x), mx::square(x, s), s), s);
  const auto is_near_zero = mx::less(mx::abs(x, s), scalar_like(0.05, x), s);
  return mx::where(is_near_zero, mx::multiply(x, factor, s), mx::erf(x, s), s);
}

} // namespace

MLX_OP(AbsNode, unary<mx::abs>)
MLX_OP(ArccosNode, unary<mx::arccos>)
MLX_OP(ArccoshNode, unary<mx::arccosh>)
MLX_OP(ArcsinNode, unary<mx::arcsin>)
MLX_OP(ArcsinhNode, unary<mx::arcsinh>)
MLX_OP(ArctanNode, unary<mx::arctan>)
MLX_OP(ArctanhNode, unary<mx::arctanh>)
MLX_OP(BitwiseInvertNode, unary<mx::bitwise_invert>)
MLX_OP(CeilNode, unary<mx::ceil>)
MLX_OP(CosNode, unary<mx::cos>)
MLX_OP(CoshNode, unary<mx::cosh>)
MLX_OP(ErfNode, unary<erf, cpu::erf>)
MLX_OP(ErfInvNode, unary<mx::erfinv>)
MLX_OP(ExpNode, unary<exp, cpu::exp>)
MLX_OP(Expm1Node, unary<mx::expm1>)
MLX_OP(FloorNode, unary<mx::floor>)
MLX_OP(LogNode, unary<mx::log>)
MLX_OP(Log10Node, unary<mx::log10>)
MLX_OP(Log1pNode, unary<mx::log1p>)
MLX_OP(Log2Node, unary<mx::log2>)
MLX_OP(LogicalNotNode, unary<mx::logical_not>)
MLX_OP(NegNode, unary<mx::negative>)
MLX_OP(ReciprocalNode, unary<mx::reciprocal>)
MLX_OP(RsqrtNode, unary<mx::rsqrt>)
MLX_OP(SigmoidNode, unary<mx::sigmoid, cpu::sigmoid>)
MLX_OP(SignNode, unary<mx::sign>)
MLX_OP(SiluNode, unary<silu, cpu::silu>)
MLX_OP(SinNode, unary<mx::sin>)
MLX_OP(SinhNode, unary<mx::sinh>)
MLX_OP(SqrtNode, unary<mx::sqrt>)
MLX_OP(SquareNode, unary<mx::square>)
MLX_OP(TanNode, unary<mx::tan>)
MLX_OP(TanhNode, unary<mx::tanh, cpu::tanh>)
MLX_OP(TruncNode, unary<truncate>)

MLX_OP(AddNode, binary<mx::add, cpu::add>)
MLX_OP(Atan2Node, binary<mx::arctan2>)
MLX_OP(BitwiseAndNode, predicate<mx::bitwise_and, std::logical_and<>, true>)
MLX_OP(BitwiseOrNode, predicate<mx::bitwise_or, std::logical_or<>, true>)
MLX_OP(BitwiseXorNode, binary<mx::bitwise_xor>)
MLX_OP(DivideNode, binary<mx::divide>)
MLX_OP(EqualNode, predicate<mx::equal, std::equal_to<>>)
MLX_OP(FloorDivideNode, binary<divide_integers<mx::floor_divide>>)
MLX_OP(GreaterEqualNode, predicate<mx::greater_equal, std::greater_equal<>>)
MLX_OP(GreaterNode, predicate<mx::greater, std::greater<>>)
MLX_OP(LessEqualNode, predicate<mx::less_equal, std::less_equal<>>)
MLX_OP(LessNode, predicate<mx::less, std::less<>>)
MLX_OP(LogAddExpNode, binary<mx::logaddexp>)
MLX_OP(LogicalAndNode, predicate<mx::logical_and, std::logical_and<>>)
MLX_OP(LogicalOrNode, predicate<mx::logical_or, std::logical_or<>>)
MLX_OP(MaximumNode, binary<mx::maximum>)
MLX_OP(MinimumNode, binary<mx::minimum>)
MLX_OP(MultiplyNode, binary<mx::multiply, cpu::multiply>)
MLX_OP(NotEqualNode, predicate<mx::not_equal, std::not_equal_to<>>)
MLX_OP(PowerNode, binary<power>)
MLX_OP(RemainderNode, binary<divide_integers<mx::remainder>>)
MLX_OP(SubtractNode, binary<mx::subtract, cpu::subtract>)

MLX_OP(AsTypeNode, as_type)
MLX_OP(ClipNode, clip)
MLX_OP(GeluNode, gelu)
MLX_OP(RoundNode, round_to)
MLX_OP(WhereNode, where)

} // namespace executorch_mlx
