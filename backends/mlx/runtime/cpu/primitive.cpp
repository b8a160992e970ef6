#include "primitive.h"

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <new>
#include <stdexcept>
#include <string>

namespace executorch_mlx::cpu {

namespace {

class CpuPrimitive : public mx::UnaryPrimitive {
 public:
  CpuPrimitive(mx::Stream stream, const char* name, MakeTask make_task)
      : UnaryPrimitive(stream), name_(name), make_task_(std::move(make_task)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    auto memory = mx::allocator::malloc(out.nbytes());
    if (memory.buffer().ptr() == nullptr) {
      throw std::bad_alloc();
    }
    out.set_data(std::move(memory));
    mx::cpu::get_command_encoder(stream()).dispatch(make_task_(inputs, out));
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error(std::string(name_) + ": runs on CPU streams only");
  }

  const char* name() const override {
    return name_;
  }

 private:
  const char* name_;
  MakeTask make_task_;
};

} // namespace

mx::array lazy_array(
    const char* name, mx::Shape shape, mx::Dtype dtype, std::vector<mx::array> inputs, mx::Stream stream,
    MakeTask make_task) {
  auto primitive = std::make_shared<CpuPrimitive>(stream, name, std::move(make_task));
  return mx::array(std::move(shape), dtype, std::move(primitive), std::move(inputs));
}

bool is_supported_operand(const mx::array& x, mx::Stream stream) {
  return stream.device == mx::Device::cpu && float_type(x.dtype()) && x.size() > 0 && x.ndim() > 0;
}

std::optional<FloatType> float_type(mx::Dtype dtype) {
  switch (dtype) {
    case mx::float32:
      return FloatType::float32;
    case mx::float16:
      return FloatType::float16;
    case mx::bfloat16:
      return FloatType::bfloat16;
    default:
      return std::nullopt;
  }
}

mx::array contiguous(const mx::array& x, mx::Stream stream) {
  const bool is_contiguous = x.is_available() && x.flags().row_contiguous;
  return is_contiguous ? x : mx::contiguous(x, /*allow_col_major=*/false, stream);
}

} // namespace executorch_mlx::cpu
