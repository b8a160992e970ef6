// Integers in value slots: arithmetic, and reading sizes and elements of tensors. See op.h.
#include <cmath>

#include "ops/op.h"

namespace executorch_mlx {

namespace {

using IntegerOp = int64_t (*)(int64_t, int64_t);

// Division as in Python: floor_divide() rounds the quotient down, and the result of modulo() has the sign of b.
int64_t floor_divide(int64_t a, int64_t b) {
  check_argument(b != 0, "integer division by zero");
  check_argument(b != -1 || a != std::numeric_limits<int64_t>::min(), a, " / -1 overflows 64 bits");
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}

int64_t modulo(int64_t a, int64_t b) {
  check_argument(b != 0, "integer division by zero");
  const int64_t rest = b == -1 ? 0 : a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

int64_t add(int64_t a, int64_t b) {
  int64_t result;
  check_argument(!__builtin_add_overflow(a, b, &result), a, " + ", b, " overflows 64 bits");
  return result;
}

int64_t subtract(int64_t a, int64_t b) {
  int64_t result;
  check_argument(!__builtin_sub_overflow(a, b, &result), a, " - ", b, " overflows 64 bits");
  return result;
}

int64_t multiply(int64_t a, int64_t b) {
  int64_t result;
  check_argument(!__builtin_mul_overflow(a, b, &result), a, " * ", b, " overflows 64 bits");
  return result;
}

template <IntegerOp Op>
void binary_int(const fb::BinaryIntNode& n, Context& c) {
  c.set(n.out(), Op(c.integer(n.a()), c.integer(n.b())));
}

// Copies the only element of a tensor to a value slot, as an integer. If the tensor is not on the host, evaluates it.
// If its element is a floating-point number, converts the element to float32 and evaluates the conversion as well.
void item_int(const fb::ItemIntParams& n, Context& c) {
  mx::array x = c.in(n.x());
  check_argument(x.size() == 1, "x: got ", x.size(), " elements, expected 1");
  if (!is_on_host(x)) {
    c.evaluate_now(x);
  }
  if (x.dtype() == mx::int64) {
    return c.set(n.out(), *x.data<int64_t>());
  }
  if (!mx::issubdtype(x.dtype(), mx::inexact)) {
    int64_t value = 0;
    for_each_integer(x, [&](int64_t element) { value = element; });
    // for_each_integer() gives the largest int64 for every uint64 that does not fit.
    check_argument(x.dtype() != mx::uint64 || value != std::numeric_limits<int64_t>::max(),
        "x: expected a value that fits in int64");
    return c.set(n.out(), value);
  }
  const auto wide = mx::astype(x, mx::float32, c.stream);
  c.evaluate_now(wide);
  const double value = *wide.data<float>();
  check_argument(std::abs(value) < 0x1p63, "x: got ", value, ", expected a value that fits in int64");
  c.set(n.out(), static_cast<int64_t>(value));
}

void sym_size(const fb::SymSizeParams& n, Context& c) {
  const auto& a = c.in(n.a());
  c.set(n.out(), int64_t{a.shape(checked_axis(n.dim(), static_cast<int>(a.ndim()), "dim"))});
}

} // namespace

MLX_OP(AddIntNode, binary_int<add>)
MLX_OP(FloorDivideIntNode, binary_int<floor_divide>)
MLX_OP(ModIntNode, binary_int<modulo>)
MLX_OP(MultiplyIntNode, binary_int<multiply>)
MLX_OP(SubtractIntNode, binary_int<subtract>)

MLX_OP(ItemIntNode, item_int)
MLX_OP(SymSizeNode, sym_size)

} // namespace executorch_mlx
