// Attention, with and without a KV cache of the runtime, and rotary position embeddings. See op.h.
#include "ops/attention.h"

#include <algorithm>
#include <limits>

#include "gpu/fused.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/rope.h"
#include "memory/views.h"
#include "mlx_internals/cuda.h"
#include "ops/cpu/attention_arrays.h"
#include "memory/kernel_result.h"
#include "ops/linalg.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace cpu { // kernels for Linux CPUs: see memory/kernel_result.h

namespace {

bool broadcasts_to(const mx::Shape& from, const mx::Shape& to) {
  return from.size() <= to.size() &&
      std::equal(from.rbegin(), from.rend(), to.rbegin(), [](int a, int b) { return a == b || a == 1; });
}

// `keys`: the number of keys of a query.
bool is_supported_attention(const mx::array& q, const mx::array& k, const mx::array& v, int keys,
    const std::optional<mx::array>& mask, mx::Stream stream) {
  for (const auto* x : {&q, &k, &v}) {
    if (!is_supported_operand(*x, stream) || x->ndim() != 4 || x->shape(0) != q.shape(0)) {
      return false;
    }
  }
  constexpr int kMaxKeys = 1 << 22; // bounds the memory for the scores
  if (keys > kMaxKeys || q.shape(1) % k.shape(1) != 0 || k.shape(1) != v.shape(1) || k.shape(2) != v.shape(2) ||
      q.shape(3) != k.shape(3)) {
    return false;
  }
  const mx::Shape scores{q.shape(0), q.shape(1), q.shape(2), keys};
  return !mask ||
      ((mask->dtype() == mx::bool_ || mask->dtype() == mx::float32) && broadcasts_to(mask->shape(), scores));
}

// The arguments of the kernel for q, k and v without a mask.
kernel::Attention attention_arguments(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal, void* y) {
  return {.q = heads_of(q),
      .k = heads_of(k),
      .v = heads_of(v),
      .batch = q.shape(0),
      .heads = q.shape(1),
      .kv_heads = k.shape(1),
      .queries = q.shape(2),
      .keys = k.shape(2),
      .width = q.shape(3),
      .v_width = v.shape(3),
      .causal = causal,
      .zero_if_unseen = false,
      .bool_mask = nullptr,
      .float_mask = nullptr,
      .mask_strides = {},
      .scale = scale,
      .y = y};
}

// Moves the beginning of x to the index `index` of axis 2.
void skip(kernel::Heads& x, int64_t index) {
  const int64_t width = x.type == FloatType::float32 ? 4 : 2;
  x.data = static_cast<const char*>(x.data) + index * x.strides[2] * width;
}

// Like mx::fast::rope with traditional=false, computed in float32. x [batch, heads, tokens, width] is float32, float16
// or bfloat16, and so is the result. offset contains one integer, or `batch` integers. freqs [dims / 2] is float32; if
// it is given, base is not used.
std::optional<mx::array> rope(const mx::array& x, int dims, float base, float scale, const mx::array& offset,
    const std::optional<mx::array>& freqs, mx::Stream stream) {
  if (!is_supported_operand(x, stream) || x.ndim() != 4 || (freqs && freqs->dtype() != mx::float32)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{x, contiguous(mx::astype(offset, mx::int32, stream), stream)};
  if (freqs) {
    inputs.push_back(contiguous(*freqs, stream));
  }
  const auto make_task = [=](const auto& inputs, auto& out) -> Task {
    const auto& x = inputs[0];
    const kernel::Rope rope{.x = heads_of(x),
        .batch = x.shape(0),
        .heads = x.shape(1),
        .tokens = x.shape(2),
        .width = x.shape(3),
        .half = dims / 2,
        .offsets = inputs[1].template data<int32_t>(),
        .offset_per_sequence = inputs[1].size() > 1,
        .periods = inputs.size() > 2 ? inputs[2].template data<float>() : nullptr,
        .base = base,
        .scale = scale,
        .y = out.template data<void>()};
    return [rope] { kernel::rope(rope); };
  };
  return kernel_result("Rope", x.shape(), x.dtype(), std::move(inputs), stream, make_task);
}

// Like mx::fast::scaled_dot_product_attention, with float32 sums. q [batch, heads, queries, width], k [batch, kv_heads,
// keys, width] and v [batch, kv_heads, keys, v_width] are float32, float16 or bfloat16; heads is a multiple of
// kv_heads. mask is bool or float32 and broadcasts to [batch, heads, queries, keys]. The result has the dtype of q.
// If `zero_if_unseen`, a query from which a bool mask hides all keys gets zeros.
std::optional<mx::array> attention(const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal,
    const std::optional<mx::array>& mask, mx::Stream stream, bool zero_if_unseen = false) {
  if (!is_supported_attention(q, k, v, k.ndim() == 4 ? k.shape(2) : 0, mask, stream)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{q, k, v};
  if (mask) {
    inputs.push_back(*mask);
  }
  const auto make_task = [=](const auto& inputs, auto& out) -> Task {
    auto attention = attention_arguments(inputs[0], inputs[1], inputs[2], scale, causal, out.template data<void>());
    attention.zero_if_unseen = zero_if_unseen;
    if (inputs.size() > 3) {
      set_mask(attention, inputs[3]);
    }
    return [attention] { kernel::attention(&attention, 1); };
  };
  return attention_result("Attention", q, v.shape(3), std::move(inputs), stream, make_task);
}

// attention() for each query of q [1, heads, N, width] by itself: query i sees the keys and values in spans[i], which
// lie within k and v, with masks[i] if there are masks. The masks are bool or float32 and broadcast to
// [1, heads, 1, stop - start].
std::optional<mx::array> attention_of_rows(const mx::array& q, const mx::array& k, const mx::array& v, float scale,
    const std::vector<Span>& spans, const std::vector<mx::array>& masks, mx::Stream stream) {
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto mask = masks.empty() ? std::nullopt : std::optional(masks[i]);
    if (!is_supported_attention(q, k, v, spans[i].stop - spans[i].start, mask, stream)) {
      return std::nullopt;
    }
  }
  std::vector<mx::array> inputs{q, k, v};
  inputs.insert(inputs.end(), masks.begin(), masks.end());
  const auto make_task = [=](const auto& inputs, auto& out) -> Task {
    std::vector<kernel::Attention> rows;
    for (size_t i = 0; i < spans.size(); ++i) {
      auto row = attention_arguments(inputs[0], inputs[1], inputs[2], scale, /*causal=*/false,
          out.template data<char>() + i * out.strides(1) * out.itemsize());
      row.queries = 1;
      row.keys = spans[i].stop - spans[i].start;
      skip(row.q, static_cast<int64_t>(i));
      skip(row.k, spans[i].start);
      skip(row.v, spans[i].start);
      if (inputs.size() > 3) {
        set_mask(row, inputs[3 + i]);
      }
      rows.push_back(row);
    }
    return [rows] { kernel::attention(rows.data(), static_cast<int>(rows.size())); };
  };
  return attention_result("AttentionOfRows", q, v.shape(3), std::move(inputs), stream, make_task);
}

} // namespace

} // namespace cpu

RopeOperands rope_operands(const fb::RopeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  check_argument(x.ndim() >= 3, "x: got ", x.ndim(), " axes, expected at least 3");
  check_program(n.dims() > 0 && n.dims() % 2 == 0 && n.dims() <= x.shape(-1), "dims: got ", n.dims(),
      ", expected an even number in (0, ", x.shape(-1), "]");
  auto freqs = c.optional(n.freqs());
  check_argument(!freqs || (freqs->ndim() == 1 && freqs->shape(0) == n.dims() / 2), "freqs: got ",
      describe(freqs.value_or(x)), ", expected shape [", n.dims() / 2, "]");
  auto offset =
      n.offset()->is_vid() ? mx::array(c.checked_int("offset", c.integer(n.offset()->vid()))) : c.in(n.offset()->tid());
  check_argument(x.size() == 0 ||
          (is_integral(offset.dtype()) && offset.ndim() <= 1 &&
              (offset.size() == 1 || offset.size() == static_cast<size_t>(x.shape(0)))),
      "offset: got ", describe(offset), ", expected 1 or ", x.shape(0), " integers");
  return {x, std::move(offset), std::move(freqs)};
}

mx::array attend(const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool is_causal,
    const std::optional<mx::array>& mask, const Context& c) {
  // A single query attends to all keys. For such a query, the causal kernel takes 40 us on an NVIDIA GPU, and the other
  // kernel 12 us.
  is_causal = is_causal && q.shape(2) > 1;
  const bool in_float32 = computes_in_float32(q, c);
  if (const auto y = mask ? std::nullopt : gpu::attention_of_token(q, k, v, scale, c.stream)) {
    return *y;
  }
  const auto wide_mask = mask && in_float32 ? std::optional(to_float32(*mask, c)) : mask;
  if (const auto y = cpu::attention(q, k, v, scale, is_causal, wide_mask, c.stream)) {
    return *y;
  }
  if (in_float32) {
    const auto y = attend(to_float32(q, c), to_float32(k, c), to_float32(v, c), scale, is_causal, wide_mask, c);
    return mx::astype(y, q.dtype(), c.stream);
  }
  auto added = mask;
  if (mask && mask->dtype() == mx::bool_ && gpu::is_cuda(c.stream)) {
    // MLX converts a bool mask for CUDA only after it has given it the shape of the scores.
    const auto dtype = q.dtype();
    const float infinity = std::numeric_limits<float>::infinity();
    added = mx::where(*mask, mx::array(0.0f, dtype), mx::array(-infinity, dtype), c.stream);
  }
  return mx::fast::scaled_dot_product_attention(q, mx::astype(k, q.dtype(), c.stream),
      mx::astype(v, q.dtype(), c.stream), scale, is_causal ? "causal" : "", added, std::nullopt, /*force_fused=*/false,
      c.stream);
}

namespace {

void rope(const fb::RopeParams& n, Context& c) {
  c.make_available({n.x(), n.offset()->is_vid() ? nullptr : n.offset()->tid()});
  const auto [x, offset, freqs] = rope_operands(n, c);
  if (x.size() == 0) {
    return c.set(n.out(), x);
  }
  const auto y = n.traditional() ? std::nullopt : cpu::rope(x, n.dims(), n.base(), n.scale(), offset, freqs, c.stream);
  if (y) {
    return c.set(n.out(), *y);
  }
  const auto base = freqs ? std::nullopt : std::optional<float>(n.base());
  c.set(n.out(), mx::fast::rope(x, n.dims(), n.traditional(), base, n.scale(), offset, freqs, c.stream));
}

void check_rank_4(const mx::array& q, const mx::array& k, const mx::array& v) {
  check_argument(q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4, "got q ", describe(q), ", k ", describe(k), " and v ",
      describe(v), ", expected 4 axes each");
}

void sdpa(const fb::SdpaParams& n, Context& c) {
  c.make_available({n.q(), n.k(), n.v(), n.mask()});
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  check_rank_4(q, k, v);
  if (q.size() == 0 || k.size() == 0 || v.size() == 0) { // MLX divides by the number of heads
    return c.set(n.out(), mx::zeros({q.shape(0), q.shape(1), q.shape(2), v.shape(3)}, q.dtype(), c.stream));
  }
  auto mask = c.optional(n.mask());
  check_program(!(mask && n.causal()), "mask: expected none if causal is true");
  if (mask && is_float(mask->dtype())) {
    mask = mx::astype(*mask, q.dtype(), c.stream);
  }
  c.count_operations(q.size(), k.shape(2));
  c.expect_product({q.shape(0), q.shape(1), q.shape(2), v.shape(3)}, q.dtype(), k.shape(2));
  c.set(n.out(), attend(q, k, v, n.scale(), n.causal(), mask, c));
}

} // namespace

std::optional<mx::array> attention_or_zeros(const fb::SdpaParams& n, Context& c) {
  c.make_available({n.q(), n.k(), n.v(), n.mask()});
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  const auto& mask = c.in(n.mask());
  const bool fits = q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && q.size() > 0 && k.size() > 0 && v.size() > 0 &&
      mask.dtype() == mx::bool_ && !n.causal() && cpu::are_available({q, k, v, mask});
  if (!fits) {
    return std::nullopt;
  }
  c.count_operations(q.size(), k.shape(2));
  c.expect_product({q.shape(0), q.shape(1), q.shape(2), v.shape(3)}, q.dtype(), k.shape(2));
  return cpu::attention(q, k, v, n.scale(), /*causal=*/false, mask, c.stream, /*zero_if_unseen=*/true);
}

namespace {

// Reads the ranges of a RowSdpaNode. Each contains at least one of the `length` keys.
std::vector<Span> checked_spans(const fb::RowSdpaParams& n, int length, Context& c) {
  const auto starts = c.sizes("starts", *n.starts());
  const auto stops = c.sizes("stops", *n.stops());
  check_program(starts.size() == stops.size(), "stops: got ", stops.size(), " numbers, expected ", starts.size());
  std::vector<Span> spans;
  for (size_t i = 0; i < starts.size(); ++i) {
    check_argument(starts[i] < stops[i] && stops[i] <= length, "got start ", starts[i], " and stop ", stops[i],
        ", expected keys in [0, ", length, ")");
    spans.push_back({starts[i], stops[i]});
  }
  return spans;
}

// x[:, :, start:stop], for x with 4 axes
mx::array slice_positions(const mx::array& x, int start, int stop, const Context& c) {
  const Slices at(x, {2, start, stop});
  return views::slice(x, at.start, at.stop, at.steps, c.stream);
}

void row_sdpa(const fb::RowSdpaParams& n, Context& c) {
  c.make_available({n.q(), n.k(), n.v()});
  if (n.masks() != nullptr) {
    c.make_available(*n.masks());
  }
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  check_rank_4(q, k, v);
  const auto spans = checked_spans(n, std::min(k.shape(2), v.shape(2)), c);
  const int rows = q.shape(2);
  check_argument(q.size() > 0 && q.shape(0) == 1 && static_cast<size_t>(rows) == spans.size(), "q: got ", describe(q),
      ", expected a query for each of ", spans.size(), " rows");
  const mx::Shape shape{1, q.shape(1), rows, v.shape(3)};
  if (k.size() == 0 || v.size() == 0) { // MLX and the kernel divide by the number of heads
    return c.set(n.out(), mx::zeros(shape, q.dtype(), c.stream));
  }
  auto masks = n.masks() ? c.list(*n.masks()) : std::vector<mx::array>{};
  check_program(
      masks.empty() || masks.size() == spans.size(), "masks: got ", masks.size(), ", expected 0 or ", spans.size());
  for (size_t i = 0; i < masks.size(); ++i) {
    auto& mask = masks[i];
    const mx::Shape scores{1, q.shape(1), 1, spans[i].stop - spans[i].start};
    check_argument(mx::broadcast_shapes(mask.shape(), scores) == scores, "masks: got ", describe(mask),
        ", expected an array that broadcasts to ", dims(scores));
    mask = is_float(mask.dtype()) ? mx::astype(mask, q.dtype(), c.stream) : mask;
    mask = computes_in_float32(q, c) ? to_float32(mask, c) : mask;
  }
  check_size(shape, q.dtype());
  for (const auto& [start, stop] : spans) {
    c.count_operations(q.size() / rows, stop - start);
    c.count_operations(uint64_t(q.shape(1)) * v.shape(3), stop - start);
  }
  if (const auto y = cpu::attention_of_rows(q, k, v, n.scale(), spans, masks, c.stream)) {
    return c.set(n.out(), *y);
  }
  if (const auto y = masks.empty() ? gpu::attention_of_rows(q, k, v, n.scale(), spans, c.stream) : std::nullopt) {
    return c.set(n.out(), *y);
  }
  std::vector<mx::array> results;
  for (int i = 0; i < rows; ++i) {
    const auto [start, stop] = spans[i];
    results.push_back(
        attend(slice_positions(q, i, i + 1, c), slice_positions(k, start, stop, c), slice_positions(v, start, stop, c),
            n.scale(), /*is_causal=*/false, masks.empty() ? std::nullopt : std::optional(masks[i]), c));
  }
  c.set(n.out(), mx::concatenate(std::move(results), 2, c.stream));
}

// Asks the processor to load x[:, :, index], which is about to be written.
void prefetch_position(const mx::array& x, int index) {
  constexpr int64_t kCacheLine = 64;
  const int64_t width = x.itemsize();
  for (int batch = 0; batch < x.shape(0); ++batch) {
    for (int head = 0; head < x.shape(1); ++head) {
      const int64_t offset = batch * x.strides(0) + head * x.strides(1) + index * x.strides(2);
      const char* begin = x.data<char>() + offset * width;
      for (int64_t i = 0; i < x.shape(3) * width; i += kCacheLine) {
        __builtin_prefetch(begin + i, /*rw=*/1);
      }
    }
  }
}

void row_update(const fb::RowUpdateParams& n, Context& c) {
  c.make_available({n.update()});
  const auto update = c.in(n.update());
  auto dst = c.in_for_update(n.dst(), n.out());
  const auto starts = c.sizes("starts", *n.starts());
  auto expected = dst.shape();
  if (dst.ndim() == 4) {
    expected[2] = static_cast<int>(starts.size());
  }
  check_argument(dst.ndim() == 4 && update.dtype() == dst.dtype() && update.shape() == expected, "update: got ",
      describe(update), ", expected ", starts.size(), " positions for ", describe(dst));
  for (const int start : starts) {
    check_argument(
        start < dst.shape(2), "starts: got ", start, ", expected less than ", dst.shape(2), " for ", describe(dst));
  }
  if (starts.empty() || dst.size() == 0) {
    return c.set(n.out(), dst);
  }
  if (dst.is_available() && dst.strides(3) == 1 && c.stream.device == mx::Device::cpu) {
    for (const int start : starts) {
      prefetch_position(dst, start);
    }
  }
  if (c.set_positions(n.out(), dst, update, starts)) {
    return;
  }
  for (size_t i = 0; i < starts.size(); ++i) {
    if (i > 0) {
      dst = c.in_for_update(n.out(), n.out());
    }
    const Slices at(dst, {2, starts[i], starts[i] + 1});
    const auto index = static_cast<int>(i);
    c.set_updated(n.out(), std::move(dst), slice_positions(update, index, index + 1, c), at.start, at.stop, at.steps);
  }
}

// Checks that `position` [tokens, 1] contains consecutive integers, and returns the first one. If the positions are not
// on the host, evaluates them now, because the KV cache needs the number while the graph is being built.
int first_position(const mx::array& position, int tokens, Context& c) {
  check_argument(
      position.ndim() == 2 && position.shape(0) == tokens && position.shape(1) == 1 && is_integral(position.dtype()),
      "position: got ", describe(position), ", expected integers of shape [", tokens, ",1]");
  mx::array on_host = position;
  if (!is_on_host(on_host)) {
    on_host = mx::contiguous(on_host, /*allow_col_major=*/false, c.stream);
    c.evaluate_now(on_host);
  }
  int64_t first = 0;
  int64_t count = 0;
  for_each_integer(on_host, [&](int64_t p) {
    first = count == 0 ? p : first;
    check_argument(p >= 0 && p - first == count, "position: got ", p, " at index ", count,
        ", expected consecutive integers of 0 or more");
    ++count;
  });
  return c.checked_int("position", first);
}

// Appends k and v to the KV cache of the layer. Each query then attends to the cached positions up to its own. The
// cache keeps the dtype of k and v. Attention is computed in the dtype of q.
void update_and_attend(const fb::UpdateAndAttendParams& n, Context& c) {
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  check_rank_4(q, k, v);
  const int tokens = q.shape(2);
  check_argument(q.size() > 0 && v.size() > 0 && k.shape(2) == tokens && v.shape(2) == tokens &&
          k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0) && v.shape(1) == k.shape(1) &&
          k.shape(3) == q.shape(3) && q.shape(1) % k.shape(1) == 0,
      "got q ", describe(q), ", k ", describe(k), " and v ", describe(v),
      ", expected matching batch, heads, tokens and head_dim");
  const auto inputs = c.cache(*n.layer_id()).append(k, v, first_position(c.in(n.position()), tokens, c), c.stream);
  c.count_operations(q.size(), inputs.keys.shape(2));
  c.expect_product({q.shape(0), q.shape(1), tokens, v.shape(3)}, q.dtype(), inputs.keys.shape(2));
  const auto attended = attend(q, inputs.keys, inputs.values, *n.scale(), inputs.is_causal, inputs.mask, c);
  c.set(n.out(), n.out_dtype() ? mx::astype(attended, dtype_of(*n.out_dtype()), c.stream) : attended);
}

} // namespace

MLX_OP(RopeNode, rope)
MLX_OP(SdpaNode, sdpa)
MLX_OP(RowSdpaNode, row_sdpa)
MLX_OP(RowUpdateNode, row_update)
MLX_OP(UpdateAndAttendNode, update_and_attend)

} // namespace executorch_mlx
