#include "quantized_product.h"

#if EXECUTORCH_MLX_BLAS

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <stdexcept>

#include "blas.h"
#include "contiguous.h"

namespace executorch_mlx {

namespace {

class QuantizedProduct : public mx::UnaryPrimitive {
 public:
  QuantizedProduct(mx::Stream stream, int group_size, int bits)
      : UnaryPrimitive(stream), group_size_(group_size), bits_(bits) {}

  // Inputs are x, w, scales and biases, all contiguous.
  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    const auto& x = inputs[0];
    const int k = x.shape(-1);
    const ExecutorchMlxQuantized product{
        .x = x.data<float>(),
        .w = inputs[1].data<uint32_t>(),
        .scales = inputs[2].data<void>(),
        .biases = inputs[3].data<void>(),
        .scale_type = inputs[2].dtype() == mx::float32 ? 0 : inputs[2].dtype() == mx::float16 ? 1 : 2,
        .bits = bits_,
        .group_size = group_size_,
        .m = static_cast<int>(x.size() / k),
        .n = out.shape(-1),
        .k = k,
        .y = out.data<float>()};
    mx::cpu::get_command_encoder(stream()).dispatch([product] { executorch_mlx_quantized_product(&product); });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("QuantizedProduct is for CPUs");
  }

  const char* name() const override {
    return "QuantizedProduct";
  }

 private:
  int group_size_;
  int bits_;
};

} // namespace

std::optional<mx::array> quantized_product(
    const mx::array& x,
    const mx::array& w,
    const mx::array& scales,
    const mx::array& biases,
    int group_size,
    int bits,
    mx::Stream stream) {
  const int k = x.shape(-1);
  const bool fits = stream.device == mx::Device::cpu && x.dtype() == mx::float32 && x.size() > 0 && w.ndim() == 2 &&
      w.size() > 0 && int64_t{w.shape(1)} * 32 == int64_t{k} * bits && scales.dtype() == biases.dtype() &&
      mx::issubdtype(scales.dtype(), mx::floating) && scales.dtype() != mx::float64 &&
      executorch_mlx_quantized_is_fast(bits, group_size, k);
  if (!fits) {
    return std::nullopt;
  }
  auto shape = x.shape();
  shape.back() = w.shape(0);
  return mx::array(
      shape, mx::float32, std::make_shared<QuantizedProduct>(stream, group_size, bits),
      {contiguous(x, stream), contiguous(w, stream), contiguous(scales, stream), contiguous(biases, stream)});
}

} // namespace executorch_mlx

#else

namespace executorch_mlx {

std::optional<mx::array> quantized_product(
    const mx::array&, const mx::array&, const mx::array&, const mx::array&, int, int, mx::Stream) {
  return std::nullopt;
}

} // namespace executorch_mlx

#endif
