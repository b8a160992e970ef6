#include "primitive.h"

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>

#include <new>
#include <stdexcept>
#include <string>

namespace executorch_mlx::cpu {

namespace {

class CpuPrimitive : public mx::Primitive {
 public:
  CpuPrimitive(mx::Stream stream, const char* name, MakeTasks make_tasks)
      : Primitive(stream), name_(name), make_tasks_(std::move(make_tasks)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) {
      auto memory = mx::allocator::malloc(out.nbytes());
      if (memory.buffer().ptr() == nullptr) {
        throw std::bad_alloc();
      }
      out.set_data(std::move(memory));
    }
    mx::cpu::get_command_encoder(stream()).dispatch(make_tasks_(inputs, outputs));
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name_) + ": runs on CPU streams only");
  }

  const char* name() const override {
    return name_;
  }

 private:
  const char* name_;
  MakeTasks make_tasks_;
};

} // namespace

mx::array lazy_array(
    const char* name, mx::Shape shape, mx::Dtype dtype, std::vector<mx::array> inputs, mx::Stream stream,
    MakeTask make_task) {
  MakeTasks make_tasks = [make_task = std::move(make_task)](const auto& inputs, auto& outputs) {
    return make_task(inputs, outputs[0]);
  };
  auto primitive = std::make_shared<CpuPrimitive>(stream, name, std::move(make_tasks));
  return mx::array(std::move(shape), dtype, std::move(primitive), std::move(inputs));
}

std::vector<mx::array> lazy_arrays(
    const char* name, std::vector<mx::Shape> shapes, const std::vector<mx::Dtype>& dtypes,
    std::vector<mx::array> inputs, mx::Stream stream, MakeTasks make_tasks) {
  auto primitive = std::make_shared<CpuPrimitive>(stream, name, std::move(make_tasks));
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
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
