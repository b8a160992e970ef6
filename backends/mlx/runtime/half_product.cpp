#include "half_product.h"

#if EXECUTORCH_MLX_BLAS

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <stdexcept>

#include "blas.h"
#include "contiguous.h"

namespace executorch_mlx {

namespace {

class HalfProduct : public mx::UnaryPrimitive {
 public:
  explicit HalfProduct(mx::Stream stream) : UnaryPrimitive(stream) {}

  // Inputs are x, contiguous, and b.
  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    const auto& x = inputs[0];
    const auto& b = inputs[1];
    const int k = b.shape(0);
    const ExecutorchMlxHalf product{
        .x = x.data<float>(),
        .w = b.data<uint16_t>(),
        .type = b.dtype() == mx::float16 ? 1 : 2,
        .row = b.strides(1),
        .column = b.strides(0),
        .m = static_cast<int>(x.size() / k),
        .n = b.shape(1),
        .k = k,
        .y = out.data<float>()};
    mx::cpu::get_command_encoder(stream()).dispatch([product] { executorch_mlx_half_product(&product); });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("HalfProduct is for CPUs");
  }

  const char* name() const override {
    return "HalfProduct";
  }
};

} // namespace

std::optional<mx::array> half_product(const mx::array& x, const mx::array& b, mx::Stream stream) {
  constexpr int kLongest = 1 << 20;  // rows, of which some are float32 at a time
  const bool is_half = b.dtype() == mx::float16 || b.dtype() == mx::bfloat16;
  const bool fits = stream.device == mx::Device::cpu && x.dtype() == mx::float32 && x.size() > 0 && is_half &&
      b.ndim() == 2 && b.size() > 0 && b.shape(0) == x.shape(-1) && b.shape(0) <= kLongest;
  if (!fits) {
    return std::nullopt;
  }
  auto shape = x.shape();
  shape.back() = b.shape(1);
  return mx::array(shape, mx::float32, std::make_shared<HalfProduct>(stream), {contiguous(x, stream), b});
}

} // namespace executorch_mlx

#else

namespace executorch_mlx {

std::optional<mx::array> half_product(const mx::array&, const mx::array&, mx::Stream) {
  return std::nullopt;
}

} // namespace executorch_mlx

#endif
