// The trial of a kernel: a comparison of its results with those of a reference, then a race against the operations of
// MLX that it replaces. Nobody has run every kernel on every GPU, so each kernel proves itself on the device it meets.
#pragma once

#include <mlx/mlx.h>

#include <functional>
#include <string>
#include <vector>

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// Results of a kernel, and the results that the reference computes from the same inputs.
struct Comparison {
  std::vector<mx::array> results;
  std::vector<mx::array> expected;
};

// What the kernel computes in some steps of decoding, as lazy arrays: with the kernel, and with what it replaces.
struct Race {
  std::function<std::vector<mx::array>()> with_kernel;
  std::function<std::vector<mx::array>()> without_kernel;
};

struct Trial {
  // The largest error of a right kernel: the largest difference of an element from the expected one, as a part of the
  // largest magnitude in the expected array. 0 asks for equal results.
  double tolerance;
  std::function<std::vector<Comparison>(mx::Stream)> compare;
  std::function<Race(mx::Stream)> race;
};

enum class Outcome {
  used, // the kernel is right and not slower
  wrong,
  slow,
  failed, // the trial threw an exception
  crashed // the process ended in the trial, more than once
};

struct Verdict {
  Outcome outcome = Outcome::failed;
  double error = 0;
  double microseconds = 0; // of the work of the race, with the kernel
  double microseconds_without = 0;
  std::string reason = ""; // of a failure
};

// The time of run() in microseconds.
using Stopwatch = std::function<double(const std::function<void()>& run, bool has_kernel)>;

double measure(const std::function<void()>& run, bool has_kernel);

// Compares, then lets both sides run alternately, and compares the fastest run of each. Evaluates arrays on the stream.
// Throws nothing.
Verdict hold(const Trial& trial, mx::Stream stream, const Stopwatch& stopwatch = measure);

} // namespace executorch_mlx::gpu
