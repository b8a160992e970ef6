// Selects the kernels for the instruction set of this processor.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if EXECUTORCH_MLX_X86_KERNELS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif EXECUTORCH_MLX_ARM_KERNELS
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "instruction_set.h"
#include "kernels.h"

namespace executorch_mlx {

namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
};

#if EXECUTORCH_MLX_X86_KERNELS
// Whether the processor has AMX for bfloat16 and integers, and the system lets this process use it.
bool has_amx() {
  constexpr unsigned kBits = 1u << 22 | 1u << 24 | 1u << 25; // of edx: bfloat16, tiles and integers
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBits) == kBits &&
      syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void multiply_integers(
    const IntegerPanels& panels, const IntegerRows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  const auto multiply = m < kTileRows ? avx512_bf16::kernels.multiply_integers : amx::multiply_integer_tiles;
  multiply(panels, x, m, first, last, y, ldy);
}

const Kernels& amx_kernels() {
  static const Kernels result = [] {
    Kernels kernels = avx512_bf16::kernels;
    kernels.multiply_tiles = amx::multiply_tiles;
    kernels.multiply_value_tiles = amx::multiply_value_tiles;
    kernels.multiply_integers = multiply_integers;
    return kernels;
  }();
  return result;
}
#endif

std::vector<Choice> find_choices() {
  std::vector<Choice> result;
#if EXECUTORCH_MLX_X86_KERNELS
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) {
    if (has_amx()) {
      result.push_back({"amx", &amx_kernels()});
    }
    result.push_back({"avx512_bf16", &avx512_bf16::kernels});
  }
  if (has_avx512) {
    result.push_back({"avx512", &avx512::kernels});
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    result.push_back({"avx2", &avx2::kernels});
  }
#elif EXECUTORCH_MLX_ARM_KERNELS
  const bool has_dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
  constexpr unsigned long kBits = HWCAP2_I8MM | HWCAP2_BF16;
  if (has_dotprod && (getauxval(AT_HWCAP2) & kBits) == kBits) {
    result.push_back({"i8mm", &i8mm::kernels});
  }
  if (has_dotprod) {
    result.push_back({"dotprod", &dotprod::kernels});
  }
#endif
  result.push_back({"portable", &portable::kernels});
  return result;
}

// The kernels that this processor supports, fastest first.
const std::vector<Choice>& choices() {
  static const std::vector<Choice> all = find_choices();
  return all;
}

// The kernels of this name, or null.
const Kernels* find_kernels(const char* name) {
  for (const auto& choice : choices()) {
    if (std::strcmp(choice.name, name) == 0) {
      return choice.kernels;
    }
  }
  return nullptr;
}

const Kernels* first_selection() {
  const char* const name = std::getenv(EXECUTORCH_MLX_CPU_KERNELS);
  const Kernels* const kernels = name != nullptr ? find_kernels(name) : nullptr;
  return kernels != nullptr ? kernels : choices().front().kernels;
}

std::atomic<const Kernels*>& selected() {
  static std::atomic<const Kernels*> kernels{first_selection()};
  return kernels;
}

} // namespace

const Kernels& kernels() { return *selected().load(std::memory_order_relaxed); }

bool kernel::use_instruction_set(const char* name) {
  const Kernels* const kernels = find_kernels(name);
  if (kernels != nullptr) {
    selected().store(kernels, std::memory_order_relaxed);
  }
  return kernels != nullptr;
}

const char* kernel::instruction_set() {
  for (const auto& choice : choices()) {
    if (choice.kernels == &kernels()) {
      return choice.name;
    }
  }
  return "";
}

const char* kernel::instruction_sets() {
  static const std::string names = [] {
    std::string result;
    for (const auto& choice : choices()) {
      result += (result.empty() ? "" : ", ") + std::string(choice.name);
    }
    return result;
  }();
  return names.c_str();
}

} // namespace executorch_mlx
