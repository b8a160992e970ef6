// The part of the C API of executorch_mlx/delegate.h about the log.
#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/delegate.h>
#pragma GCC visibility pop

#include <executorch/runtime/platform/platform.h>

#include <mutex>
#include <string>

namespace {

namespace et = executorch::runtime;

constexpr size_t kMaxBytes = 4096; // of the lines of a thread

thread_local std::string lines;
thread_local std::string taken;
pal_emit_log_message_method emit_before = nullptr;

struct Sink {
  std::mutex mutex; // held while the callback runs
  executorch_mlx_on_log callback = nullptr;
  void* user_data = nullptr;
};
Sink& sink() {
  static auto* const result = new Sink; // never freed: other threads may log while the process ends
  return *result;
}

// Passes the line to the callback, if there is one.
bool emit_to_callback(et_pal_log_level_t level, const char* message, size_t length) {
  std::lock_guard lock(sink().mutex);
  if (sink().callback == nullptr) {
    return false;
  }
  sink().callback(sink().user_data, static_cast<char>(level), message, length);
  return true;
}

// Writes the line, or passes it to the callback. Errors and fatal errors are also added to the lines of the thread.
void emit(et_timestamp_t timestamp, et_pal_log_level_t level, const char* file, const char* function, size_t line,
    const char* message, size_t length) {
  if (!emit_to_callback(level, message, length)) {
    emit_before(timestamp, level, file, function, line, message, length);
  }
  const bool is_error = level == et_pal_log_level_t::kError || level == et_pal_log_level_t::kFatal;
  if (is_error && lines.size() + length < kMaxBytes) {
    lines += lines.empty() ? "" : "\n";
    lines.append(message, length);
  }
}

} // namespace

void executorch_mlx_collect_errors() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  // register_pal() would log an error, because ExecuTorch's Python bindings have called it before.
  auto& now = const_cast<et::PalImpl*>(et::get_pal_impl())->emit_log_message;
  if (now != emit) {
    emit_before = now;
    now = emit;
  }
}

void executorch_mlx_set_log(executorch_mlx_on_log callback, void* user_data) {
  executorch_mlx_collect_errors();
  std::lock_guard lock(sink().mutex);
  sink().callback = callback;
  sink().user_data = user_data;
}

const char* executorch_mlx_take_errors() {
  taken.swap(lines);
  lines.clear();
  return taken.c_str();
}
