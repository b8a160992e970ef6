// Fuzz target: one delegate payload per input. See CONTRIBUTING.md.
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>
#include <executorch_mlx/delegate.h>

#include <cstdint>

#include "call.h"
#include "mutate_payload.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  namespace et = executorch::runtime;
  et::runtime_init();
  // Most payloads are refused with a log message. Printing these messages would take most of the time.
  const auto quiet = [](et_timestamp_t, et_pal_log_level_t, const char*, const char*, size_t, const char*, size_t) {};
  et::register_pal(et::PalImpl::create(quiet, __FILE__));
  executorch_mlx_register();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::load_and_call(data, size);
  return 0;
}

// Three mutations out of four change fields. The others change any bytes, and most of these payloads are refused.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  if (seed % 4 != 0 && fuzz::mutate_fields(data, size, seed / 4)) {
    return size;
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
