// Reductions, sorting and cumulative sums. See op.h.
#include "dtype.h"
#include "kernels/cpu/softmax.h"
#include "memory/kernel_result.h"
#include "memory/views.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace cpu { // kernels for Linux CPUs: see memory/kernel_result.h

namespace {

// Like mx::logsumexp over the last axis of x, which is float32.
std::optional<mx::array> logsumexp(const mx::array& x, bool keepdims, mx::Stream stream) {
  if (!is_supported_operand(x, stream) || x.dtype() != mx::float32) {
    return std::nullopt;
  }
  auto shape = x.shape();
  if (keepdims) {
    shape.back() = 1;
  } else {
    shape.pop_back();
  }
  const auto make_task = [](const auto& inputs, auto& out) -> Task {
    const int64_t width = inputs[0].shape(-1);
    const int64_t rows = static_cast<int64_t>(out.size());
    return [=, from = inputs[0].template data<float>(), to = out.template data<float>()] {
      kernel::logsumexp(from, to, rows, width);
    };
  };
  return kernel_result("LogSumExp", std::move(shape), x.dtype(), {contiguous(x, stream)}, stream, make_task);
}

} // namespace

} // namespace cpu

namespace {

using ReduceOp = mx::array (*)(const mx::array&, const std::vector<int>&, bool, mx::StreamOrDevice);
using VarianceOp = mx::array (*)(const mx::array&, const std::vector<int>&, bool, int, mx::StreamOrDevice);
using ArgReduceOp = mx::array (*)(const mx::array&, int, bool, mx::StreamOrDevice);
using SortOp = mx::array (*)(const mx::array&, int, mx::StreamOrDevice);
using PartitionOp = mx::array (*)(const mx::array&, int, int, mx::StreamOrDevice);

// Returns compute(x) in the dtype of x. If x has half precision, casts x to float32 before the call. In half precision,
// sums would lose digits, and a square or a sum could overflow although the result does not.
template <typename Compute>
mx::array with_float32_sums(const mx::array& x, mx::StreamOrDevice s, Compute&& compute) {
  return is_half(x.dtype()) ? mx::astype(compute(mx::astype(x, mx::float32, s)), x.dtype(), s) : compute(x);
}

template <ReduceOp Op>
mx::array with_float32_sums(const mx::array& x, const std::vector<int>& axes, bool keepdims, mx::StreamOrDevice s) {
  return with_float32_sums(x, s, [&](const mx::array& x) { return Op(x, axes, keepdims, s); });
}

template <ReduceOp Op>
void reduce(const fb::ReduceNode& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto axes = checked_axes(n.axes(), static_cast<int>(x.ndim()));
  c.set(n.out(), Op(x, axes, n.keepdims(), c.stream));
}

// mx::any or mx::all. A reduction of all elements is computed on the host, if it can read them, for a branch that
// depends on the result: see predicate() in elementwise.cpp.
template <ReduceOp Op, bool kIsAny>
void any_or_all(const fb::ReduceNode& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto axes = checked_axes(n.axes(), static_cast<int>(x.ndim()));
  const bool is_whole = axes.size() == x.ndim() && (x.dtype() == mx::bool_ || is_integral(x.dtype()));
  if (!is_whole || x.size() > kMaxInspectedElements || !is_on_host(x)) {
    return reduce<Op>(n, c);
  }
  bool result = !kIsAny;
  for_each_integer(x, [&](int64_t element) { result = (element != 0) == kIsAny ? kIsAny : result; });
  const mx::Shape shape(n.keepdims() ? x.ndim() : 0, 1);
  c.set(n.out(), views::reshape(mx::array(result), shape, c.stream));
}

// mx::logsumexp, which refuses empty arrays. If x contains an infinity and a NaN, MLX's kernel for CUDA returns
// infinity. The right result is NaN.
mx::array logsumexp(const mx::array& x, const std::vector<int>& axes, bool keepdims, mx::StreamOrDevice s) {
  if (x.size() == 0) {
    return mx::log(mx::sum(x, axes, keepdims, s), s); // the exponentials of no elements are no elements
  }
  const bool is_last = axes.size() == 1 && axes[0] + 1 == static_cast<int>(x.ndim());
  if (const auto y = is_last ? cpu::logsumexp(x, keepdims, mx::to_stream(s)) : std::nullopt) {
    return *y;
  }
  const auto y = mx::logsumexp(x, axes, keepdims, s);
  if (mx::to_stream(s).device == mx::Device::cpu || !mx::cu::is_available()) {
    return y;
  }
  const auto largest = mx::max(x, axes, keepdims, s);
  return mx::where(mx::isnan(largest, s), largest, y, s);
}

// For the median, maximum and minimum, which are not defined without elements.
template <ReduceOp Op>
void reduce_nonempty(const fb::ReduceNode& n, Context& c) {
  const auto& x = c.in(n.x());
  for (const int axis : checked_axes(n.axes(), static_cast<int>(x.ndim()))) {
    check_argument(x.shape(axis) > 0, "x: axis ", axis, " is empty");
  }
  reduce<Op>(n, c);
}

template <VarianceOp Op>
void variance(const fb::VarianceNode& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto axes = checked_axes(n.axes(), static_cast<int>(x.ndim()));
  c.set(n.out(), with_float32_sums(x, c.stream, [&](const mx::array& x) {
    return Op(x, axes, n.keepdims(), n.ddof(), c.stream);
  }));
}

template <ArgReduceOp Op>
void arg_reduce(const fb::ArgReduceNode& n, Context& c) {
  const auto& x = c.in(n.x());
  if (x.ndim() == 0) { // as in torch, a scalar has one element on axis 0
    checked_axis(n.axis(), 1);
    return c.set(n.out(), mx::zeros({}, mx::uint32, c.stream));
  }
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  check_argument(x.shape(axis) > 0, "x: axis ", axis, " is empty");
  if (x.size() == 0) { // MLX refuses it, although the result is only empty
    return c.set(n.out(), mx::astype(mx::sum(x, axis, n.keepdims(), c.stream), mx::uint32, c.stream));
  }
  c.set(n.out(), Op(x, axis, n.keepdims(), c.stream));
}

// `Op` sorts values or, with kIndices, returns the indices of the sorted values. Empty arrays do not reach MLX, which
// would divide by zero.
template <SortOp Op, bool kIndices>
void sort(const fb::AxisNode& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), std::max<int>(1, x.ndim()));
  if (x.size() == 0 || x.ndim() == 0) {
    return c.set(n.out(), kIndices ? mx::zeros(x.shape(), mx::uint32, c.stream) : x);
  }
  c.set(n.out(), Op(x, axis, c.stream));
}

template <PartitionOp Op>
void partition(const fb::KthNode& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const int kth = c.checked_int("kth", n.kth());
  const int length = x.shape(axis);
  check_argument(kth >= -length && kth < length, "kth ", kth, " is out of range [", -length, ", ", length, ")");
  c.set(n.out(), x.size() == 0 ? x : Op(x, kth, axis, c.stream));
}

void cumsum(const fb::CumsumParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), std::max<int>(1, x.ndim()));
  if (x.size() == 0 || x.ndim() == 0) {
    return c.set(n.out(), n.inclusive() ? x : mx::zeros_like(x, c.stream));
  }
  c.set(n.out(), with_float32_sums(x, c.stream, [&](const mx::array& x) {
    return mx::cumsum(x, axis, n.reverse(), n.inclusive(), c.stream);
  }));
}

} // namespace

MLX_OP(AllNode, any_or_all<mx::all, false>)
MLX_OP(AnyNode, any_or_all<mx::any, true>)
MLX_OP(LogSumExpNode, reduce<logsumexp>)
MLX_OP(MaxNode, reduce_nonempty<mx::max>)
MLX_OP(MeanNode, reduce<with_float32_sums<mx::mean>>)
MLX_OP(MedianNode, reduce_nonempty<mx::median>)
MLX_OP(MinNode, reduce_nonempty<mx::min>)
MLX_OP(ProdNode, reduce<with_float32_sums<mx::prod>>)
MLX_OP(SumNode, reduce<with_float32_sums<mx::sum>>)

MLX_OP(StdNode, variance<mx::std>)
MLX_OP(VarNode, variance<mx::var>)

MLX_OP(ArgmaxNode, arg_reduce<mx::argmax>)
MLX_OP(ArgminNode, arg_reduce<mx::argmin>)

MLX_OP(ArgPartitionNode, partition<mx::argpartition>)
MLX_OP(ArgsortNode, sort<mx::argsort, true>)
MLX_OP(PartitionNode, partition<mx::partition>)
MLX_OP(SortNode, sort<mx::sort, false>)

MLX_OP(CumsumNode, cumsum)

} // namespace executorch_mlx
