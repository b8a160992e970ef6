// Which kernels of this library a GPU uses. At the first use of the device, when its first program is loaded, each
// kernel has a trial: see trial.h. The verdicts hold for the process, so that nothing changes in the life of a program,
// and are kept in a file for later processes: see verdict_file.h.
#pragma once

#include <mlx/mlx.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trial.h"

namespace executorch_mlx::gpu {

enum class Kernel {
  sample,
  products,
  quantized_products,
  dequantize,
  attention,
  norm_rope,
  silu_product,
  add_rms_norm,
  embedding,
  replay // of calls for one token, which has its trial in each program: see call/replay.h
};

inline constexpr size_t kKernels = 10;

const char* name(Kernel kernel);

// Whether the stream is one of a GPU that uses the kernel. The first call for a GPU holds the trials, which evaluate
// arrays: load_program() makes it, before any program of the device exists. Throws Failure if the environment variable
// EXECUTORCH_MLX_KERNELS is invalid.
bool is_used(Kernel kernel, mx::Stream stream);

// While this exists, is_used() returns true in this thread for each kernel that the platform has.
class OnTrial {
 public:
  OnTrial();
  ~OnTrial();
  OnTrial(const OnTrial&) = delete;
  OnTrial& operator=(const OnTrial&) = delete;
};

// Kernels that are used or not used without a trial.
using Choices = std::map<Kernel, bool>;

// Reads a list such as "sample=off,attention=on"; "all" stands for all kernels. Throws Failure, which names `origin`.
Choices parse_choices(const std::string& list, const char* origin);

struct Decision {
  Kernel kernel;
  bool is_used;
  bool is_chosen; // by the user, without a trial
  Verdict verdict;
};

class VerdictFile;

// Decides about each of the kernels. Trials whose verdicts are in the file are not held. `file` may be null.
std::vector<Decision> decide(const std::vector<std::pair<Kernel, Trial>>& trials, const Choices& choices,
    mx::Stream stream, const VerdictFile* file, const Stopwatch& stopwatch = measure);

// The trials of the kernels that the GPU of the stream has.
std::vector<std::pair<Kernel, Trial>> trials_of(mx::Stream stream);
Trial products_trial();
Trial quantized_products_trial();
Trial dequantize_trial();
Trial embedding_trial();

} // namespace executorch_mlx::gpu
