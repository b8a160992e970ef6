// Tensors made from numbers: ranges, constants and triangles. See op.h.
#include <cstring>

#include "memory/kernel_result.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace {

void arange(const fb::ARangeParams& n, Context& c) {
  const int64_t start = c.integer(n.start());
  const int64_t stop = c.integer(n.stop());
  const int64_t step = c.integer(n.step());
  const auto dtype = n.scalar_type() ? dtype_of(*n.scalar_type()) : mx::int32;
  check_argument(step != 0, "step: expected a nonzero integer");
  check_program(dtype != mx::bool_, "scalar_type: got bool, expected a number type");
  const __int128 span = (__int128{stop} - start) * (step < 0 ? -1 : 1);
  const __int128 stride = step < 0 ? -__int128{step} : __int128{step};
  const __int128 count = span <= 0 ? 0 : (span + stride - 1) / stride;
  check_argument(count <= std::numeric_limits<int>::max(), "range [", start, ", ", stop, ") with step ", step,
      " has too many elements");
  const mx::Shape shape{static_cast<int>(count)};
  check_size(shape, dtype);
  if (count == 0) {
    return c.set(n.out(), mx::zeros(shape, dtype, c.stream));
  }
  c.set(n.out(), mx::arange(double(start), double(stop), double(step), dtype, c.stream));
}

// mx::full() of a scalar. On a CPU, a small array is filled at once.
mx::array filled(const mx::Shape& shape, const mx::array& value, mx::Stream stream) {
  size_t size = 1;
  for (const int length : shape) {
    size *= length;
  }
  if (size > kMaxInspectedElements || !cpu::computes_at_once(stream)) {
    return mx::full(shape, value, value.dtype(), stream);
  }
  auto y = cpu::allocate_result(shape, value.dtype());
  for (size_t i = 0; i < size; ++i) {
    std::memcpy(y.data<char>() + i * y.itemsize(), value.data<char>(), y.itemsize());
  }
  return y;
}

void full(const fb::FullParams& n, Context& c) {
  const auto shape = c.sizes("shape", *n.shape());
  const auto dtype = dtype_of(n.scalar_type());
  check_size(shape, dtype);
  c.set(n.out(), filled(shape, scalar("v", c.real(n.v()), dtype), c.stream));
}

void full_like(const fb::FullLikeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto dtype = n.scalar_type() ? dtype_of(*n.scalar_type()) : x.dtype();
  c.set(n.out(), filled(x.shape(), scalar("v", c.real(n.v()), dtype), c.stream));
}

void tri(const fb::TriParams& n, Context& c) {
  const mx::Shape shape{c.checked_int("n", n.n()), c.checked_int("m", n.m())};
  check_argument(shape[0] >= 0 && shape[1] >= 0, "got n and m ", dims(shape), ", expected 0 or more");
  const auto dtype = dtype_of(n.scalar_type());
  check_size(shape, dtype);
  const int k = std::clamp(n.k(), -shape[0], shape[1]);
  c.set(n.out(), mx::tri(shape[0], shape[1], k, dtype, c.stream));
}

using TriangleOp = mx::array (*)(mx::array, int, mx::StreamOrDevice);

template <TriangleOp Op>
void triangle(const fb::TriangleNode& n, Context& c) {
  const auto& x = c.in(n.x());
  check_argument(x.ndim() >= 2, "x: got ", x.ndim(), " axes, expected at least 2");
  c.set(n.out(), Op(x, std::clamp(n.k(), -x.shape(-2), x.shape(-1)), c.stream));
}

} // namespace

MLX_OP(ARangeNode, arange)
MLX_OP(FullLikeNode, full_like)
MLX_OP(FullNode, full)
MLX_OP(TriNode, tri)
MLX_OP(TrilNode, triangle<mx::tril>)
MLX_OP(TriuNode, triangle<mx::triu>)

} // namespace executorch_mlx
