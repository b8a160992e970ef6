#include "one_pass.h"

#if EXECUTORCH_MLX_BLAS

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "blas.h"
#include "contiguous.h"

namespace executorch_mlx {

namespace {

// `run(inputs, out)` returns what the stream is to do once the inputs have their values.
class OnePass : public mx::UnaryPrimitive {
 public:
  using Task = std::function<void()>;
  using Run = std::function<Task(const std::vector<mx::array>&, mx::array&)>;

  OnePass(mx::Stream stream, const char* name, Run run) : UnaryPrimitive(stream), name_(name), run_(std::move(run)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    mx::cpu::get_command_encoder(stream()).dispatch(run_(inputs, out));
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("OnePass is for CPUs");
  }

  const char* name() const override {
    return name_;
  }

 private:
  const char* name_;
  Run run_;
};

bool fits(const mx::array& x, mx::Stream stream) {
  return stream.device == mx::Device::cpu && x.dtype() == mx::float32 && x.size() > 0 && x.ndim() > 0;
}

mx::array one_pass(
    const mx::Shape& shape, const char* name, std::vector<mx::array> inputs, mx::Stream stream, OnePass::Run run) {
  return mx::array(shape, mx::float32, std::make_shared<OnePass>(stream, name, std::move(run)), std::move(inputs));
}

ExecutorchMlxHeads heads_of(const mx::array& x) {
  return {x.data<float>(), {x.strides(0), x.strides(1), x.strides(2), x.strides(3)}};
}

bool broadcasts_to(const mx::Shape& from, const mx::Shape& to) {
  return from.size() <= to.size() && std::equal(from.rbegin(), from.rend(), to.rbegin(), [](int a, int b) {
           return a == b || a == 1;
         });
}

} // namespace

std::optional<mx::array> silu_in_one_pass(const mx::array& x, mx::Stream stream) {
  if (!fits(x, stream)) {
    return std::nullopt;
  }
  return one_pass(x.shape(), "Silu", {contiguous(x, stream)}, stream, [](const auto& inputs, mx::array& out) {
    return [x = inputs[0].template data<float>(), y = out.data<float>(), count = out.size()] {
      executorch_mlx_silu(x, y, static_cast<int64_t>(count));
    };
  });
}

std::optional<mx::array> rms_norm_in_one_pass(
    const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::Stream stream) {
  if (!fits(x, stream) || (weight && weight->dtype() != mx::float32)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{contiguous(x, stream)};
  if (weight) {
    inputs.push_back(contiguous(*weight, stream));
  }
  return one_pass(x.shape(), "RmsNorm", std::move(inputs), stream, [eps](const auto& inputs, mx::array& out) {
    const float* weight = inputs.size() > 1 ? inputs[1].template data<float>() : nullptr;
    const int64_t width = out.shape(-1);
    return [=, x = inputs[0].template data<float>(), y = out.data<float>(), rows = out.size() / width] {
      executorch_mlx_rms_norm(x, weight, y, static_cast<int64_t>(rows), width, eps);
    };
  });
}

std::optional<mx::array> rope_in_one_pass(
    const mx::array& x,
    int dims,
    float base,
    float scale,
    const mx::array& offset,
    const std::optional<mx::array>& freqs,
    mx::Stream stream) {
  if (!fits(x, stream) || x.ndim() != 4 || (freqs && freqs->dtype() != mx::float32)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{x, contiguous(mx::astype(offset, mx::int32, stream), stream)};
  if (freqs) {
    inputs.push_back(contiguous(*freqs, stream));
  }
  const auto run = [=](const std::vector<mx::array>& inputs, mx::array& out) -> OnePass::Task {
    const auto& x = inputs[0];
    const ExecutorchMlxRope rope{
        .x = x.data<float>(),
        .strides = {x.strides(0), x.strides(1), x.strides(2), x.strides(3)},
        .batch = x.shape(0),
        .heads = x.shape(1),
        .tokens = x.shape(2),
        .width = x.shape(3),
        .half = dims / 2,
        .offsets = inputs[1].data<int32_t>(),
        .offset_for_each = inputs[1].size() > 1,
        .periods = inputs.size() > 2 ? inputs[2].data<float>() : nullptr,
        .base = base,
        .scale = scale,
        .y = out.data<float>()};
    return [rope] { executorch_mlx_rope(&rope); };
  };
  return one_pass(x.shape(), "Rope", std::move(inputs), stream, run);
}

std::optional<mx::array> attention_in_one_pass(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    const std::optional<mx::array>& mask,
    mx::Stream stream) {
  for (const auto* x : {&q, &k, &v}) {
    if (!fits(*x, stream) || x->ndim() != 4 || x->shape(0) != q.shape(0)) {
      return std::nullopt;
    }
  }
  const mx::Shape scores{q.shape(0), q.shape(1), q.shape(2), k.shape(2)};
  const bool is_bool = mask && mask->dtype() == mx::bool_;
  constexpr int kMostKeys = 1 << 22;  // the scores of some queries are there at a time
  if (k.shape(2) > kMostKeys || q.shape(1) % k.shape(1) != 0 || k.shape(1) != v.shape(1) || k.shape(2) != v.shape(2) ||
      q.shape(3) != k.shape(3) ||
      (mask && ((!is_bool && mask->dtype() != mx::float32) || !broadcasts_to(mask->shape(), scores)))) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{q, k, v};
  if (mask) {
    inputs.push_back(mx::broadcast_to(*mask, scores, stream));
  }
  const auto run = [=](const std::vector<mx::array>& inputs, mx::array& out) -> OnePass::Task {
    ExecutorchMlxAttention attention{
        .q = heads_of(inputs[0]),
        .k = heads_of(inputs[1]),
        .v = heads_of(inputs[2]),
        .batch = out.shape(0),
        .heads = out.shape(1),
        .kv_heads = inputs[1].shape(1),
        .queries = out.shape(2),
        .keys = inputs[1].shape(2),
        .width = inputs[0].shape(3),
        .values = out.shape(3),
        .causal = causal,
        .seen = nullptr,
        .added = nullptr,
        .mask_strides = {},
        .scale = scale,
        .y = out.data<float>()};
    if (inputs.size() > 3) {
      const auto& mask = inputs[3];
      attention.seen = is_bool ? mask.data<bool>() : nullptr;
      attention.added = is_bool ? nullptr : mask.data<float>();
      std::copy(mask.strides().begin(), mask.strides().end(), attention.mask_strides);
    }
    return [attention] { executorch_mlx_attention(&attention); };
  };
  auto shape = q.shape();
  shape.back() = v.shape(3);
  return one_pass(shape, "Attention", std::move(inputs), stream, run);
}

} // namespace executorch_mlx

#else

namespace executorch_mlx {

std::optional<mx::array> silu_in_one_pass(const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> rms_norm_in_one_pass(
    const mx::array&, const std::optional<mx::array>&, float, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> rope_in_one_pass(
    const mx::array&, int, float, float, const mx::array&, const std::optional<mx::array>&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> attention_in_one_pass(
    const mx::array&, const mx::array&, const mx::array&, float, bool, const std::optional<mx::array>&, mx::Stream) {
  return std::nullopt;
}

} // namespace executorch_mlx

#endif
