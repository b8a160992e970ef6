#pragma GCC visibility push(default)
#include <executorch_mlx/kernels.h>
#pragma GCC visibility pop

#include "verdicts.h"

#include <executorch/runtime/platform/log.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <utility>

#include "../device.h"
#include "../guarded.h"
#include "metal.h"
#include "mlx_internals/cuda.h"
#include "verdict_file.h"

namespace executorch_mlx::gpu {

namespace {

constexpr char kVariable[] = "EXECUTORCH_MLX_KERNELS";
constexpr int kMaxCrashes = 2; // one may be the user who has stopped the process
constexpr const char* kNames[kKernels] = {"sample", "products", "quantized_products", "dequantize", "attention",
    "norm_rope", "silu_product", "add_rms_norm", "embedding", "replay"};
constexpr const char* kOutcomeNames[] = {"used", "wrong", "slow", "failed", "crashed"}; // in the order of Outcome

thread_local int trials_of_thread = 0;

// What the user has chosen for the process, until the kernels are decided.
struct Chosen {
  std::mutex mutex;
  Choices choices;
  bool is_fixed = false;
};

Chosen& chosen() {
  static auto* const instance = new Chosen();
  return *instance;
}

// The choices of the environment, and those of the API, which take precedence. From now on they do not change.
Choices take_choices() {
  const char* const value = std::getenv(kVariable);
  Choices choices = parse_choices(value != nullptr ? value : "", kVariable);
  auto& all = chosen();
  std::lock_guard lock(all.mutex);
  for (const auto& [kernel, is_used] : all.choices) {
    choices[kernel] = is_used;
  }
  all.is_fixed = true;
  return choices;
}

std::string joined_names() {
  std::string result;
  for (const char* kernel : kNames) {
    result += str(result.empty() ? "" : ", ", kernel);
  }
  return result;
}

bool is_alive(int process) { return process != getpid() && (kill(process, 0) == 0 || errno == EPERM); }

// The verdict of the file, or nullopt if a trial has to be held. Counts the trials in which a process has ended.
std::optional<Verdict> known_verdict(VerdictFile::Entry& entry) {
  if (entry.process == 0) {
    return entry.attempts == 0 && entry.verdict.outcome != Outcome::failed ? std::optional(entry.verdict)
                                                                           : std::nullopt;
  }
  if (is_alive(entry.process)) {
    entry.attempts = 0;
    return std::nullopt;
  }
  return entry.attempts >= kMaxCrashes ? std::optional(Verdict{.outcome = Outcome::crashed}) : std::nullopt;
}

Verdict verdict_of(
    Kernel kernel, const Trial& trial, mx::Stream stream, const VerdictFile* file, const Stopwatch& stopwatch) {
  auto entries = file != nullptr ? file->read() : std::map<std::string, VerdictFile::Entry>{};
  auto& entry = entries[name(kernel)];
  const auto write = [&](const Verdict& verdict, int process, int attempts) {
    if (file != nullptr) {
      entries[name(kernel)] = {verdict, process, attempts};
      file->write(entries);
    }
  };
  if (const auto known = known_verdict(entry)) {
    if (entry.process != 0) {
      write(*known, 0, 0);
    }
    return *known;
  }
  write({}, getpid(), entry.attempts + 1);
  const OnTrial on_trial;
  const Verdict verdict = hold(trial, stream, stopwatch);
  entries = file != nullptr ? file->read() : entries; // another process may have written
  write(verdict, 0, 0);
  return verdict;
}

std::string describe(const Decision& d) {
  const auto& v = d.verdict;
  switch (v.outcome) {
    case Outcome::wrong:
      return str("its error is ", v.error);
    case Outcome::slow:
      return str("it takes ", v.microseconds, " us, and MLX's operations ", v.microseconds_without, " us");
    case Outcome::crashed:
      return "the process ended in its trial";
    default:
      return v.reason;
  }
}

// What the only GPU of the process uses. Not destroyed: programs may be unloaded at the end of the process.
const std::vector<Decision>& decisions() {
  static const auto& all = *new std::vector<Decision>([] {
    const ProgramStream used(mx::Device::gpu); // no program of the GPU exists yet
    const auto choices = take_choices();
    const VerdictFile file(verdict_folder(), verdict_key());
    auto result = decide(trials_of(used.stream), choices, used.stream, &file);
    if (is_cuda(used.stream)) {
      const auto chosen = choices.find(Kernel::replay);
      const bool is_chosen = chosen != choices.end();
      result.push_back({Kernel::replay, !is_chosen || chosen->second, is_chosen, {.outcome = Outcome::used}});
    }
    for (const auto& d : result) {
      if (!d.is_used && !d.is_chosen) {
        ET_LOG(Info, "MLX: the kernel %s is not used on this GPU: %s", name(d.kernel), describe(d).c_str());
      }
    }
    return result;
  }());
  return all;
}

bool has_kernels(mx::Stream stream) { return is_cuda(stream) || is_metal(stream); }

bool find_decision(Kernel kernel) {
  static const auto table = [] {
    std::array<bool, kKernels> used{};
    for (const auto& decision : decisions()) {
      used[static_cast<size_t>(decision.kernel)] = decision.is_used;
    }
    return used;
  }();
  return table[static_cast<size_t>(kernel)];
}

} // namespace

const char* name(Kernel kernel) { return kNames[static_cast<size_t>(kernel)]; }

OnTrial::OnTrial() { ++trials_of_thread; }

OnTrial::~OnTrial() { --trials_of_thread; }

bool is_used(Kernel kernel, mx::Stream stream) {
  return has_kernels(stream) && (trials_of_thread > 0 || find_decision(kernel));
}

Choices parse_choices(const std::string& list, const char* origin) {
  Choices choices;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string item = list.substr(begin, end - begin);
    const size_t equals = std::min(item.find('='), item.size());
    const std::string kernel = item.substr(0, equals), value = item.substr(equals);
    const auto found = std::find(std::begin(kNames), std::end(kNames), kernel);
    const bool is_all = kernel == "all";
    check_argument((is_all || found != std::end(kNames)) && (value == "=on" || value == "=off"), origin, ": got \"",
        item, "\", expected all, ", joined_names(), ", with =on or =off");
    for (size_t i = 0; i < kKernels; ++i) {
      if (is_all || kernel == kNames[i]) {
        choices[static_cast<Kernel>(i)] = value == "=on";
      }
    }
    begin = end + 1;
  }
  return choices;
}

std::vector<Decision> decide(const std::vector<std::pair<Kernel, Trial>>& trials, const Choices& choices,
    mx::Stream stream, const VerdictFile* file, const Stopwatch& stopwatch) {
  std::vector<Decision> result;
  for (const auto& [kernel, trial] : trials) {
    if (const auto found = choices.find(kernel); found != choices.end()) {
      result.push_back({kernel, found->second, /*is_chosen=*/true, {}});
      continue;
    }
    const Verdict verdict = verdict_of(kernel, trial, stream, file, stopwatch);
    result.push_back({kernel, verdict.outcome == Outcome::used, /*is_chosen=*/false, verdict});
  }
  return result;
}

} // namespace executorch_mlx::gpu

// -- C API ------------------------------------------------------------------------

using namespace executorch_mlx;

int executorch_mlx_choose_kernels(const char* choices) {
  return static_cast<int>(guarded("choose_kernels", [&] {
    check_argument(choices != nullptr, "choices: got null");
    auto parsed = gpu::parse_choices(choices, "choices");
    auto& all = gpu::chosen();
    std::lock_guard lock(all.mutex);
    if (all.is_fixed) {
      fail(Error::InvalidState, "a program of the GPU has been loaded, which fixes the kernels of the process");
    }
    for (const auto& [kernel, is_used] : parsed) {
      all.choices[kernel] = is_used;
    }
  }));
}

int executorch_mlx_kernels(executorch_mlx_kernel* kernels, size_t capacity, size_t* count) {
  return static_cast<int>(guarded("kernels", [&] {
    check_argument(count != nullptr && (kernels != nullptr || capacity == 0), "got null");
    *count = 0;
    if (!mx::is_available(mx::Device::gpu) || !gpu::has_kernels(mx::Stream(0, mx::Device::gpu))) {
      return;
    }
    find_device("gpu");
    for (const auto& d : gpu::decisions()) {
      if (*count < capacity) {
        kernels[*count] = {gpu::name(d.kernel),
            d.is_chosen ? "chosen" : gpu::kOutcomeNames[static_cast<int>(d.verdict.outcome)], d.is_used,
            d.verdict.error, d.verdict.microseconds, d.verdict.microseconds_without, d.verdict.reason.c_str()};
      }
      ++*count;
    }
  }));
}
