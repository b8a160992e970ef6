// Fuzz target: one .pte file per input, for ExecuTorch's loader, the delegate and the LLM engine. See CONTRIBUTING.md.
#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>
#include <executorch_mlx/delegate.h>
#include <executorch_mlx/engine.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "mutate_payload.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

namespace et = executorch::runtime;
using executorch::extension::BufferDataLoader;

constexpr size_t kMaxMemory = 1 << 20; // bytes of a method
constexpr size_t kMaxMethods = 32;

// Thrown where ExecuTorch would end the process. This target does not test ExecuTorch's checks of its own part of the
// file.
struct Aborted {};

[[noreturn]] void on_abort() { throw Aborted(); }

void quiet(et_timestamp_t, et_pal_log_level_t, const char*, const char*, size_t, const char*, size_t) {}

// Returns the memory that a method plans for its tensors, or an empty list if it is more than kMaxMemory.
std::vector<std::vector<uint8_t>> planned_memory(const et::MethodMeta& meta) {
  std::vector<std::vector<uint8_t>> buffers;
  size_t total = 0;
  for (size_t i = 0; i < meta.num_memory_planned_buffers(); ++i) {
    const auto size = meta.memory_planned_buffer_size(i);
    if (!size.ok() || *size < 0 || total + static_cast<size_t>(*size) > kMaxMemory) {
      return {};
    }
    total += static_cast<size_t>(*size);
    buffers.emplace_back(static_cast<size_t>(*size));
  }
  return buffers;
}

bool has_only_delegates(const et::MethodMeta& meta) {
  return meta.num_backends() > 0 && meta.num_instructions() == meta.num_backends();
}

// Loads a method and, if the delegate runs all of it, calls it twice. Returns false if the method has invalid metadata
// or plans more memory than kMaxMemory.
bool run_method(const et::Program& program, const char* name) {
  const auto meta = program.method_meta(name);
  if (!meta.ok()) {
    return false;
  }
  auto memory = planned_memory(*meta);
  if (memory.size() != meta->num_memory_planned_buffers()) {
    return false;
  }
  std::vector<et::Span<uint8_t>> spans;
  for (auto& buffer : memory) {
    spans.emplace_back(buffer.data(), buffer.size());
  }
  std::vector<uint8_t> pool(kMaxMemory);
  et::MemoryAllocator allocator(kMaxMemory, pool.data());
  et::HierarchicalAllocator planned({spans.data(), spans.size()});
  et::MemoryManager manager(&allocator, &planned);
  auto method = program.load_method(name, &manager);
  if (!method.ok()) {
    return true;
  }
  for (int call = 0; call < 2 && has_only_delegates(*meta); ++call) {
    (void)method->execute();
  }
  return true;
}

// Loads the program and runs its methods. Returns true if the program is valid and its methods are few and small, so
// that the engine may load all of them.
bool run_program(const uint8_t* data, size_t size) {
  BufferDataLoader loader(data, size);
  const auto program = et::Program::load(&loader, et::Program::Verification::InternalConsistency);
  if (!program.ok() || program->num_methods() > kMaxMethods) {
    return false;
  }
  bool fits = true;
  for (size_t i = 0; i < program->num_methods(); ++i) {
    const auto name = program->get_method_name(i);
    fits = name.ok() && run_method(*program, *name) && fits;
  }
  return fits;
}

void open_model(const uint8_t* data, size_t size) {
  const int file = memfd_create("fuzz.pte", 0);
  if (write(file, data, size) == static_cast<ssize_t>(size)) {
    try {
      executorch_mlx::Model model("/proc/self/fd/" + std::to_string(file), "cpu");
    } catch (const executorch_mlx::LlmError&) {
    }
  }
  close(file);
}

} // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  et::runtime_init();
  auto platform = et::PalImpl::create(quiet, __FILE__);
  platform.abort = on_abort;
  et::register_pal(platform);
  executorch_mlx_register();
  executorch_mlx_set_option("device", "cpu");
  executorch_mlx_set_option("max_instructions", "4000");
  executorch_mlx_set_option("max_operations", "1000000");
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    if (run_program(data, size)) {
      open_model(data, size);
    }
  } catch (const Aborted&) {
  }
  return 0;
}

// Half of the mutations change fields of a payload in the file. The others change any bytes.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const size_t magic = file.find("MLX0"); // at offset 4 of a payload, which is aligned to 8 bytes
  if (seed % 2 == 0 && magic != std::string_view::npos && magic % 8 == 4) {
    const size_t begin = magic - 4;
    std::vector<uint64_t> payload((size - begin + 7) / 8);
    auto* bytes = reinterpret_cast<uint8_t*>(payload.data());
    std::memcpy(bytes, data + begin, size - begin);
    if (fuzz::mutate_fields(bytes, size - begin, seed / 2)) {
      std::memcpy(data + begin, bytes, size - begin);
      return size;
    }
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
