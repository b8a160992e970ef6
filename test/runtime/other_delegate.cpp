// A delegate with the same name as ours, for test_import_order.py. Like ExecuTorch's own MLX delegate on macOS, it
// registers itself when its library is loaded, and ignores whether that succeeds. A call fills its last argument, the
// output, with 42.
#include <executorch/runtime/backend/interface.h>

#include <algorithm>

namespace {

namespace et = executorch::runtime;

class OtherDelegate final : public et::BackendInterface {
 public:
  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext&, et::FreeableBuffer*, et::ArrayRef<et::CompileSpec>) const override {
    return nullptr;
  }

  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle*, et::Span<et::EValue*> args) const override {
    auto output = args[args.size() - 1]->toTensor();
    std::fill_n(output.mutable_data_ptr<float>(), output.numel(), 42.0f);
    return et::Error::Ok;
  }
};

OtherDelegate delegate;
[[maybe_unused]] const et::Error ignored = et::register_backend({"MLXBackend", &delegate});

} // namespace
