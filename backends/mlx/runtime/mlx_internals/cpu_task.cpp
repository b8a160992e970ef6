#include "mlx_internals/cpu_task.h"

#include <mlx/backend/cpu/encoder.h>
#include <mlx/primitives.h>
#include <mlx/scheduler.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace executorch_mlx::internals {

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

  const char* name() const override { return name_; }

 private:
  const char* name_;
  MakeTasks make_tasks_;
};

} // namespace

std::vector<mx::array> lazy_results(const char* name, std::vector<mx::Shape> shapes,
    const std::vector<mx::Dtype>& dtypes, const std::vector<mx::array>& inputs, mx::Stream stream,
    MakeTasks make_tasks) {
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<CpuPrimitive>(stream, name, std::move(make_tasks)), inputs);
}

void run_on_thread(mx::Stream stream, Task task) { mx::scheduler::enqueue(stream, std::move(task)); }

void complete_count_of_tasks(mx::Stream stream) {
  while (stream.device == mx::Device::cpu && mx::scheduler::n_active_tasks() > 0) {
    mx::scheduler::notify_task_completion(stream);
  }
}

} // namespace executorch_mlx::internals
