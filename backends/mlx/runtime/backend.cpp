// ExecuTorch's BackendInterface, and the C API of executorch_mlx/delegate.h. No exception leaves this file.
#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/delegate.h>
#pragma GCC visibility pop

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/platform/log.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "call/call_io.h"
#include "call/context.h"
#include "call/deferred.h"
#include "call/evaluation.h"
#include "call/profile.h"
#include "call/replay.h"
#include "call/reset.h"
#include "call/state.h"
#include "fusion/fuse.h"
#include "fusion/packed_weights.h"
#include "guarded.h"
#include "memory/limit.h"
#include "memory/mapped_files.h"
#include "mlx_internals/arrays.h"
#include "ops/cpu/cpu_kernels.h"
#include "options.h"
#include "call/constants.h"
#include "program/program.h"
#include "call/shared.h"

namespace executorch_mlx {

namespace {

namespace et = executorch::runtime;

constexpr char kBackendName[] = "MLXBackend";
constexpr char kVersion[] = "0.1.0";

// A loaded delegate. ExecuTorch gets a pointer to it as a DelegateHandle.
struct Handle final : Member {
  Handle(MlxProgram program, std::vector<uint64_t> copy)
      : copy(std::move(copy)), program(std::move(program)), state(this->program.layout) {}
  ~Handle() {
    if (session != nullptr) {
      std::lock_guard lock(session->mutex);
      std::erase(session->members, this);
    }
  }

  void reset(std::set<const Buffer*>& done) override;
  bool drop_contents() noexcept override {
    state.drop_contents();
    return state.has_contents();
  }

  std::vector<uint64_t> copy; // of the payload if its address is not aligned to 8 bytes, else empty
  MlxProgram program;
  State state;
  mx::Stream stream{0, mx::Device::cpu}; // set when the session is known
  std::optional<MappedFiles> files; // when the constants were loaded
  Limits limits;
  const et::NamedDataMap* named_data = nullptr; // exists as long as the method
  std::unique_ptr<Replay> replay; // null if calls cannot be replayed
  std::shared_ptr<void> membership = std::make_shared<char>(); // see SharedData::join()
  std::shared_ptr<SharedData> shared;
  std::shared_ptr<Session> session;
};

// Loads the constants and buffers. If they would exceed the memory limit, throws Failure before it reads any of them.
void load_data(Handle& handle, const et::NamedDataMap* named_data, const Options& options) {
  std::unique_lock<std::mutex> lock;
  if (has_memory_limit()) {
    lock = std::unique_lock(memory_mutex());
    check_memory(
        [] { return "constants and buffers"; }, bytes_to_load(handle.program, *handle.shared, *handle.session));
  }
  const size_t peak = in_place_peak();
  load_constants(handle.program, named_data, *handle.shared, handle.state, handle.stream);
  load_buffers(handle.program, named_data, *handle.session, options, handle.state, handle.stream);
  handle.files.emplace();
  pack_weights(handle.program, *handle.files, *handle.shared, handle.state, handle.stream);
  set_in_place_peak(peak);
}

// Runs the init chain, if the program has one, on the slots of `state`.
void run_init_chain(const Handle& handle, State& state) {
  const int64_t init = handle.program.init_chain;
  if (init >= 0) {
    Context context(handle.program, state, handle.stream, handle.limits);
    context.run(static_cast<uint32_t>(init));
    context.wait_for_started_work();
    std::vector<mx::array> arrays;
    for (const auto& slot : state.tensors) {
      if (slot) {
        arrays.push_back(*slot);
      }
    }
    evaluate(std::move(arrays), handle.stream);
  }
}

// Computes the contents as a load does. The init chain may have replaced constants, so it gets those of the file again.
void Handle::reset(std::set<const Buffer*>& done) {
  if (state.has_only(done)) {
    return;
  }
  State fresh = state.without_contents();
  if (program.graph->init_chain_idx() >= 0) {
    load_constants(program, named_data, *shared, fresh, stream);
  }
  fill_buffers(program, named_data, fresh, stream);
  run_init_chain(*this, fresh);
  state.reset(fresh, done);
}

// The name of a delegate in its session: the method and a hash of the payload, because a method may have several
// delegates.
std::string delegate_name(const et::BackendInitContext& context, const et::FreeableBuffer& processed) {
  const char* method = context.get_method_name();
  const std::string_view payload(static_cast<const char*>(processed.data()), processed.size());
  return str(method ? method : "", " ", std::hash<std::string_view>()(payload));
}

// Returns the argument `missing_for_metal` of load_program(): what is missing to run Metal source, or null if nothing
// is missing.
const char* missing_for_metal(const Options& options, mx::Device device) {
  if (!options.metal_kernels) {
    return "a build with EXECUTORCH_MLX_METAL_KERNELS and the load option metal_kernels=true";
  }
  return device == mx::Device::gpu && mx::metal::is_available() ? nullptr : "an Apple GPU";
}

// Returns the event tracer of the call if the tracer asks for the times of single instructions, else null.
et::EventTracer* instruction_tracer(et::BackendExecutionContext& context) {
  et::EventTracer* tracer = context.event_tracer();
  const bool wants_all =
      tracer != nullptr && tracer->event_tracer_profiling_level() == et::EventTracerProfilingLevel::kProfileAllEvents;
  return wants_all ? tracer : nullptr;
}

// Builds the graph of one call, evaluates it, and writes the outputs. A deferred call may return before the graph is
// evaluated. If the call fails after it has changed a mutable buffer, the buffers are undefined: see State::begin().
void run_call(Handle& handle, Arguments args, et::EventTracer* tracer, const std::optional<Deferral>& deferral) {
  auto& state = handle.state;
  std::optional<Profiler> profiler;
  if (tracer != nullptr) {
    profiler.emplace(handle.program, state, *tracer);
  }
  const auto tokens = deferral ? input_slot(handle.program, "tokens") : std::nullopt;
  const bool is_deferred = tokens && tracer == nullptr;
  const uint64_t failures = state.owner->failures;
  if (deferral && deferral->error != Error::Ok) {
    fail(deferral->error, "defer: it has failed");
  }
  state.begin();
  try {
    std::vector<mx::array> outputs, copies;
    read_inputs(handle.program, args, state, handle.stream);
    if (deferral && deferral->source != nullptr) {
      check_argument(tokens.has_value(), "defer: the program has no input named tokens");
      set_tokens(*deferral, *state.tensors[*tokens], handle.stream);
    }
    Context context(handle.program, state, handle.stream, handle.limits, profiler ? &*profiler : nullptr);
    const bool may_replay = handle.replay != nullptr && tracer == nullptr;
    const size_t done = may_replay ? handle.replay->run(state, context) : 0;
    context.run(handle.program.graph->main_chain_idx(), done);
    context.wait_for_started_work();
    outputs = collect_outputs(handle.program, args, state, *handle.files, handle.stream);
    write_value_outputs(handle.program, args, state);
    // Buffers are evaluated even if no output depends on them. Otherwise, their unevaluated graph would grow with
    // every call. Temporaries are released first, because MLX cannot update a buffer in place while a temporary
    // holds the same array.
    std::vector<mx::array> pending = state.pending();
    pending.insert(pending.end(), outputs.begin(), outputs.end());
    state.release_temporaries();
    if (is_deferred || done > 0) { // if the host read the memory of a replay, MLX would move it
      copies = copies_of(outputs, handle.stream);
      pending.insert(pending.end(), copies.begin(), copies.end());
    }
    is_deferred ? state.submit(std::move(pending), handle.stream) : state.evaluate(std::move(pending), handle.stream);
    if (handle.stream.device == mx::Device::gpu) {
      state.take_over_memory(outputs);
    }
    if (is_deferred) {
      set_deferred(std::make_unique<DeferredCall>(
          handle.program, handle.session, args, std::move(outputs), std::move(copies), handle.stream, failures));
    } else {
      write_tensor_outputs(handle.program, args, done > 0 ? copies : outputs);
    }
  } catch (...) {
    if (!state.abort(handle.stream)) {
      handle.session->make_undefined();
    }
    throw;
  }
  state.commit();
}

// Makes a call, after a reset of the mutable buffers if one is asked for.
void execute_call(Handle& handle, Arguments args, et::EventTracer* tracer, const std::optional<Deferral>& deferral) {
  const bool resets = take_reset();
  std::unique_lock<std::mutex> loading(handle.shared->loading, std::defer_lock);
  if (resets) {
    loading.lock(); // before the mutex of the session, as in a load
  }
  std::lock_guard lock(handle.session->mutex);
  if (resets) {
    handle.session->reset();
    loading.unlock();
  }
  handle.session->check_defined();
  run_call(handle, args, tracer, deferral);
}

const pid_t loading_process = getpid(); // the process that loaded this library, and MLX with it

bool is_forked() { return getpid() != loading_process; }

Error report_fork(const char* what) {
  return report(what, Error::InvalidState,
      "this process was forked after the delegate was loaded, so it lacks the threads "
      "of MLX");
}

class Backend final : public et::BackendInterface {
 public:
  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext& context, et::FreeableBuffer* processed, et::ArrayRef<et::CompileSpec>) const override {
    if (is_forked()) {
      return report_fork("init");
    }
    std::unique_ptr<Handle> handle;
    const Error error = guarded("init", [&] { handle = load(context, *processed); });
    if (error != Error::Ok) {
      return error;
    }
    return handle.release();
  }

  Error execute(
      et::BackendExecutionContext& context, et::DelegateHandle* opaque, et::Span<EValue*> args) const override {
    auto* handle = static_cast<Handle*>(opaque);
    const auto deferral = take_deferral();
    if (handle == nullptr) {
      return Error::DelegateInvalidHandle;
    }
    if (is_forked()) {
      return report_fork("execute");
    }
    const Error error = guarded("execute", [&] { execute_call(*handle, args, instruction_tracer(context), deferral); });
    set_undefined(error != Error::Ok && handle->session->is_undefined);
    return error;
  }

  void destroy(et::DelegateHandle* handle) const override {
    if (!is_forked()) { // else it would wait for threads
      delete static_cast<Handle*>(handle);
    }
  }

  // Returns `device`, or else the default load option.
  std::string device_option(const std::string& device) const {
    return device.empty() ? defaults_.get().device : device;
  }

  Error set_option(et::BackendOptionContext&, const et::Span<et::BackendOption>& options) override {
    return guarded("set_option", [&] { defaults_.set({options.data(), options.size()}); });
  }

  Error get_option(et::BackendOptionContext&, et::Span<et::BackendOption>& options) override {
    return guarded("get_option", [&] {
      for (auto& option : options) {
        get(defaults_.get(), option);
      }
    });
  }

 private:
  std::unique_ptr<Handle> load(et::BackendInitContext& context, const et::FreeableBuffer& processed) const {
    Options options = defaults_.get();
    for (const auto& option : context.runtime_specs()) {
      set(options, option);
    }
    const mx::Device device = chosen_device(options.device);
    cpu::check_instruction_set();

    const void* data = processed.data();
    std::vector<uint64_t> copy;
    if (reinterpret_cast<uintptr_t>(data) % alignof(uint64_t) != 0) {
      copy.resize((processed.size() + 7) / 8);
      std::memcpy(copy.data(), data, processed.size());
      data = copy.data();
    }
    auto program = load_program(data, processed.size(), device, missing_for_metal(options, device));
    fuse(program);
    auto handle = std::make_unique<Handle>(std::move(program), std::move(copy));
    handle->limits = options.limits;
    const auto* named_data = context.get_named_data_map();
    handle->named_data = named_data;
    handle->shared = SharedData::of(named_data);
    std::lock_guard lock(handle->shared->loading);
    handle->session = handle->shared->join(delegate_name(context, processed), handle->membership);
    std::lock_guard no_calls(handle->session->mutex);
    handle->stream = handle->session->stream(device, options.has_low_priority);
    handle->state.owner = handle->session->owner;
    handle->session->members.reserve(handle->session->members.size() + 1);
    try {
      load_data(*handle, named_data, options);
      if (device == mx::Device::gpu) {
        mx::clear_cache(); // of host memory from which the constants were copied
      }
      run_init_chain(*handle, handle->state);
      handle->state.finish_loading();
      handle->replay = Replay::make(handle->program, handle->stream);
    } catch (...) {
      settle(handle->stream);
      throw;
    }
    handle->session->members.push_back(handle.get());
    return handle;
  }

  DefaultOptions defaults_;
};

Backend& the_backend() {
  static auto* backend = new Backend(); // never deleted, because ExecuTorch's registry keeps the pointer
  return *backend;
}

} // namespace
} // namespace executorch_mlx

// -- C API ------------------------------------------------------------------------

using namespace executorch_mlx;

const char* executorch_mlx_version() { return kVersion; }

int executorch_mlx_register() {
  auto* registered = et::get_backend_class(kBackendName);
  if (registered != nullptr) {
    return registered == &the_backend() ? 0 : 1;
  }
  const Error error = et::register_backend({kBackendName, &the_backend()});
  return error == Error::Ok ? 0 : static_cast<int>(error);
}

int executorch_mlx_is_forked() { return is_forked(); }

void executorch_mlx_set_on_load(executorch_mlx_on_load callback, void* user_data) { set_on_load(callback, user_data); }

int executorch_mlx_set_option(const char* key, const char* value) {
  et::BackendOption option;
  std::array<char, et::kMaxOptionValueLength> string{};
  const bool fits =
      key != nullptr && value != nullptr && std::strlen(key) < sizeof(option.key) && std::strlen(value) < string.size();
  if (!fits) {
    ET_LOG(Error, "MLX set_option: the key or the value is null or too long");
    return static_cast<int>(Error::InvalidArgument);
  }
  std::strcpy(option.key, key);
  std::strcpy(string.data(), value);
  option.value = string;
  et::BackendOptionContext context;
  return static_cast<int>(the_backend().set_option(context, et::Span<et::BackendOption>(&option, 1)));
}

const char* executorch_mlx_device(const char* device) {
  const char* result = nullptr;
  guarded(
      "device", [&] { result = name(chosen_device(the_backend().device_option(device == nullptr ? "" : device))); });
  return result;
}

const char* executorch_mlx_cpu_kernels() { return cpu::instruction_set().value_or(""); }

const char* executorch_mlx_blas() { return cpu::blas_name().value_or("mlx"); }

namespace {

// Loading the library registers the backend. A later call of executorch_mlx_register() returns whether this succeeded.
[[maybe_unused]] const int registered_at_load = executorch_mlx_register();

} // namespace
