// Changes of shape, and joining and splitting tensors. See op.h.
#include "ops/shape.h"

#include "memory/strided_copy.h"
#include "memory/views.h"
#include "memory/kernel_result.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace cpu {

namespace {

// mx::concatenate for available arrays of the same dtype: float32, float16 or bfloat16.
std::optional<mx::array> concatenate(const std::vector<mx::array>& arrays, int axis, mx::Stream stream) {
  auto shape = arrays[0].shape();
  shape[axis] = 0;
  for (const auto& x : arrays) {
    if (!is_supported_operand(x, stream) || x.dtype() != arrays[0].dtype() || x.ndim() != shape.size() ||
        !x.is_available()) {
      return std::nullopt;
    }
    shape[axis] += x.shape(axis);
    auto expected = shape;
    expected[axis] = x.shape(axis);
    if (x.shape() != expected) {
      return std::nullopt;
    }
  }
  auto result = allocate_result(shape, arrays[0].dtype());
  auto* to = result.data<char>();
  for (const auto& x : arrays) {
    strided_copy(x.shape(), x.itemsize(), x.data<char>(), x.strides(), to, result.strides());
    to += result.strides(axis) * x.shape(axis) * static_cast<int64_t>(x.itemsize());
  }
  return result;
}

} // namespace

} // namespace cpu

namespace {

void noop(const fb::EmptyNode&, Context&) {}

void id_copy(const fb::UnaryNode& n, Context& c) { c.set(n.out(), c.in(n.x())); }

void contiguous(const fb::UnaryNode& n, Context& c) {
  c.set(n.out(), mx::contiguous(c.in(n.x()), /*allow_col_major=*/false, c.stream));
}

void expand_dims(const fb::AxisNode& n, Context& c) {
  const auto& x = c.in(n.x());
  c.set(n.out(), views::expand_dims(x, checked_axis(n.axis(), static_cast<int>(x.ndim()) + 1), c.stream));
}

void squeeze(const fb::SqueezeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  if (n.dims() == nullptr || n.dims()->size() == 0) {
    return c.set(n.out(), mx::squeeze(x, c.stream));
  }
  // As in torch, an axis whose size is not 1 stays, even if the node lists the axis.
  std::vector<int> ones;
  for (const int axis : checked_axes(n.dims(), static_cast<int>(x.ndim()))) {
    if (x.shape(axis) == 1) {
      ones.push_back(axis);
    }
  }
  c.set(n.out(), ones.empty() ? x : views::squeeze(x, ones, c.stream));
}

void reshape(const fb::ShapeNode& n, Context& c) {
  const auto& x = c.in(n.x());
  auto shape = c.sizes("shape", *n.shape(), -1);
  int64_t known = 1;
  int* unknown = nullptr;
  for (int& size : shape) {
    if (size == -1) {
      check_program(unknown == nullptr, "shape: got ", dims(shape), ", expected at most one -1");
      unknown = &size;
    } else {
      check_argument(!__builtin_mul_overflow(known, size, &known), "shape: ", dims(shape), " is too large");
    }
  }
  const auto total = static_cast<int64_t>(x.size());
  if (unknown != nullptr) {
    check_argument(known != 0 && total % known == 0, "shape: got ", dims(shape), ", expected ", total, " elements");
    *unknown = c.checked_int("shape", total / known);
    known = total;
  }
  check_argument(known == total, "shape: got ", dims(shape), ", expected ", total, " elements");
  c.set(n.out(), views::reshape(x, shape, c.stream));
}

// As in torch's expand, a size of -1 keeps the size of x.
void broadcast_to(const fb::ShapeNode& n, Context& c) {
  const auto& x = c.in(n.x());
  auto shape = c.sizes("shape", *n.shape(), -1);
  const int added = static_cast<int>(shape.size()) - static_cast<int>(x.ndim());
  check_argument(added >= 0, "shape: got ", dims(shape), ", expected at least ", x.ndim(), " axes");
  for (int i = 0; i < static_cast<int>(shape.size()); ++i) {
    if (shape[i] == -1) {
      check_argument(i >= added, "shape: got ", dims(shape), ", expected a size instead of -1 for the new axis ", i);
      shape[i] = x.shape(i - added);
    }
  }
  check_size(shape, x.dtype());
  c.set(n.out(), mx::broadcast_to(x, shape, c.stream));
}

void transpose(const fb::TransposeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  check_program(n.perm()->size() == x.ndim(), "perm: got ", n.perm()->size(), " axes, expected ", x.ndim());
  if (x.ndim() == 0) {
    return c.set(n.out(), x);
  }
  const auto transposed = [&] {
    return views::transpose(x, checked_axes(n.perm(), static_cast<int>(x.ndim())), c.stream);
  };
  c.set(n.out(), c.constant_result(c.instruction().kept, transposed));
}

void flip(const fb::FlipParams& n, Context& c) {
  const auto& x = c.in(n.x());
  if (n.axes()->size() == 0) {
    return c.set(n.out(), x);
  }
  c.set(n.out(), mx::flip(x, checked_axes(n.axes(), static_cast<int>(x.ndim())), c.stream));
}

void tile(const fb::TileParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto reps = c.sizes("reps", *n.reps());
  mx::Shape shape(std::max(reps.size(), x.ndim()), 1);
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t size = i < x.ndim() ? x.shape(-1 - static_cast<int>(i)) : 1;
    const int64_t rep = i < reps.size() ? reps[reps.size() - 1 - i] : 1;
    shape[shape.size() - 1 - i] = c.checked_int("result size", size * rep);
  }
  check_size(shape, x.dtype());
  c.set(n.out(), mx::tile(x, std::vector<int>(reps.begin(), reps.end()), c.stream));
}

void repeat(const fb::RepeatParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const int repeats = c.checked_int("repeats", n.repeats());
  check_argument(repeats >= 0, "repeats: got ", repeats, ", expected 0 or more");
  auto shape = x.shape();
  shape[axis] = c.checked_int("result size", int64_t{shape[axis]} * repeats);
  check_size(shape, x.dtype());
  c.set(n.out(), mx::repeat(x, repeats, axis, c.stream));
}

void roll(const fb::RollParams& n, Context& c) {
  const auto& x = c.in(n.x());
  std::vector<int64_t> shifts;
  for (const auto* shift : *n.shift()) {
    shifts.push_back(c.integer(shift));
  }
  if (x.size() == 0) {
    return c.set(n.out(), x);
  }
  if (n.axes()->size() == 0) {
    check_program(shifts.size() == 1, "shift: got ", shifts.size(), " values, expected 1 without axes");
    const auto shift = static_cast<int>(shifts[0] % static_cast<int64_t>(x.size()));
    return c.set(n.out(), mx::roll(x, shift, c.stream));
  }
  check_program(shifts.size() == n.axes()->size(), "shift: got ", shifts.size(), " values, expected one for each of ",
      n.axes()->size(), " axes");
  mx::array y = x;
  for (size_t i = 0; i < shifts.size(); ++i) {
    const int axis = checked_axis(n.axes()->Get(i), static_cast<int>(x.ndim()));
    y = mx::roll(y, static_cast<int>(shifts[i] % x.shape(axis)), axis, c.stream);
  }
  c.set(n.out(), y);
}

void split(const fb::SplitParams& n, Context& c) {
  const auto x = c.in(n.x()); // no reference, because one of the outs may have the slot of x
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  auto sizes = c.sizes("sizes", *n.sizes());
  // If there is only one size for several parts, all parts have this size, but the last one may be smaller.
  if (sizes.size() == 1 && n.outs()->size() > 1) {
    const int64_t rest = x.shape(axis) - int64_t{sizes[0]} * (n.outs()->size() - 1);
    check_argument(rest >= 0 && rest <= sizes[0], "outs: got ", n.outs()->size(),
        ", expected the number of parts of size ", sizes[0], " on axis ", axis, " of size ", x.shape(axis));
    sizes.resize(n.outs()->size(), sizes[0]);
    sizes.back() = static_cast<int>(rest);
  }
  check_program(sizes.size() == n.outs()->size(), "sizes: got ", sizes.size(), ", expected one for each of ",
      n.outs()->size(), " outs");
  mx::Shape ends;
  int64_t end = 0;
  for (const int size : sizes) {
    end += size;
    ends.push_back(c.checked_int("sum of sizes", end));
  }
  check_argument(
      end == x.shape(axis), "sizes: got a sum of ", end, ", expected ", x.shape(axis), ", the size of axis ", axis);
  if (sizes.size() == 1) {
    return c.set(n.outs()->Get(0), x);
  }
  for (uint32_t i = 0; i < sizes.size(); ++i) {
    mx::Shape first(x.ndim(), 0);
    mx::Shape last = x.shape();
    first[axis] = ends[i] - sizes[i];
    last[axis] = ends[i];
    c.set(n.outs()->Get(i), views::slice(x, first, last, mx::Shape(x.ndim(), 1), c.stream));
  }
}

void pad(const fb::PadParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto widths = c.sizes("pad_width", *n.pad_width());
  const std::string mode = n.mode()->str();
  check_program(mode == "constant" || mode == "edge", "mode: got \"", mode, "\", expected \"constant\" or \"edge\"");
  check_program(widths.size() == 2 * x.ndim(), "pad_width: got ", widths.size(), " values, expected ", 2 * x.ndim());
  if (x.ndim() == 0) {
    return c.set(n.out(), x);
  }
  std::vector<std::pair<int, int>> pairs;
  auto shape = x.shape();
  for (size_t i = 0; i < x.ndim(); ++i) {
    pairs.emplace_back(widths[2 * i], widths[2 * i + 1]);
    shape[i] = c.checked_int("result size", int64_t{shape[i]} + widths[2 * i] + widths[2 * i + 1]);
    check_argument(mode == "constant" || x.shape(static_cast<int>(i)) > 0 || shape[i] == 0, "x: axis ", i,
        " is empty, expected an edge to pad with");
  }
  check_size(shape, x.dtype());
  c.set(n.out(), mx::pad(x, pairs, scalar("constant_value", n.constant_value(), x.dtype()), mode, c.stream));
}

// Checks that the elements of the view lie within x. MLX does not check this.
void as_strided(const fb::AsStridedParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto shape = c.sizes("shape", *n.shape());
  check_program(n.strides()->size() == shape.size(), "strides: got ", n.strides()->size(), ", expected ", shape.size());
  check_size(shape, x.dtype());
  mx::Strides strides;
  __int128 lowest = n.offset();
  __int128 highest = n.offset();
  bool empty = false;
  for (size_t i = 0; i < shape.size(); ++i) {
    strides.push_back(c.integer(n.strides()->Get(i)));
    const __int128 reach = __int128{strides.back()} * (shape[i] - 1);
    (reach < 0 ? lowest : highest) += reach;
    empty |= shape[i] == 0;
  }
  check_argument(empty || (lowest >= 0 && highest < static_cast<__int128>(x.size())), "shape ", dims(shape),
      ", strides ", dims(strides), " and offset ", n.offset(), " exceed the ", x.size(), " elements of x");
  if (empty) {
    return c.set(n.out(), mx::zeros(shape, x.dtype(), c.stream));
  }
  c.set(n.out(), mx::as_strided(x, shape, strides, n.offset(), c.stream));
}

// Checks the size of the arrays joined along `axis`, because MLX and the kernel add the sizes without a check.
void check_joined(const std::vector<mx::array>& arrays, int axis, const Context& c) {
  auto shape = arrays[0].shape();
  int64_t size = 0;
  for (const auto& x : arrays) {
    check_argument(x.ndim() == shape.size(), "tensors: got ", describe(x), " beside ", describe(arrays[0]),
        ", expected the same number of axes");
    size += x.shape(axis);
  }
  shape[axis] = c.checked_int("result size", size);
  check_size(shape, mx::result_type(arrays));
}

void concatenate(const fb::JoinNode& n, Context& c) {
  auto arrays = c.list(*n.tensors());
  check_program(!arrays.empty(), "tensors: expected at least one");
  const int axis = checked_axis(n.axis(), static_cast<int>(arrays[0].ndim()));
  check_joined(arrays, axis, c);
  if (const auto y = cpu::concatenate(arrays, axis, c.stream)) {
    return c.set(n.out(), *y);
  }
  c.set(n.out(), mx::concatenate(std::move(arrays), axis, c.stream));
}

} // namespace

// The shape of `count` arrays like x, stacked along a new axis.
mx::Shape shape_stacked(const mx::array& x, int count, int axis) {
  auto shape = x.shape();
  shape.insert(shape.begin() + axis, count);
  return shape;
}

// Returns the arrays stacked along a new axis.
mx::array stacked(const std::vector<mx::array>& arrays, int axis, Context& c) {
  for (const auto& x : arrays) {
    check_argument(x.shape() == arrays[0].shape(), "tensors: got ", describe(x), " beside ", describe(arrays[0]),
        ", expected equal shapes");
  }
  const int count = c.checked_int("result size", static_cast<int64_t>(arrays.size()));
  check_size(shape_stacked(arrays[0], count, axis), mx::result_type(arrays));
  if (!arrays[0].is_available()) {
    return mx::stack(arrays, axis, c.stream);
  }
  std::vector<mx::array> parts;
  for (const auto& x : arrays) {
    parts.push_back(views::expand_dims(x, axis, c.stream));
  }
  const auto y = cpu::concatenate(parts, axis, c.stream);
  return y ? *y : mx::stack(arrays, axis, c.stream);
}

namespace {

void stack(const fb::JoinNode& n, Context& c) {
  const auto arrays = c.list(*n.tensors());
  check_program(!arrays.empty(), "tensors: expected at least one");
  c.set(n.out(), stacked(arrays, checked_axis(n.axis(), static_cast<int>(arrays[0].ndim()) + 1), c));
}

} // namespace

MLX_OP(AsStridedNode, as_strided)
MLX_OP(BroadcastToNode, broadcast_to)
MLX_OP(ConcatenateNode, concatenate)
MLX_OP(ContiguousNode, contiguous)
MLX_OP(ExpandDimsNode, expand_dims)
MLX_OP(FlipNode, flip)
MLX_OP(IdCopyNode, id_copy)
MLX_OP(NoopNode, noop)
MLX_OP(PadNode, pad)
MLX_OP(RepeatNode, repeat)
MLX_OP(ReshapeNode, reshape)
MLX_OP(RollNode, roll)
MLX_OP(SplitNode, split)
MLX_OP(SqueezeNode, squeeze)
MLX_OP(StackNode, stack)
MLX_OP(TileNode, tile)
MLX_OP(TransposeNode, transpose)

} // namespace executorch_mlx
