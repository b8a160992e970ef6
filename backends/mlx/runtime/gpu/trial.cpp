#include "trial.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <stdexcept>
#include <utility>

#include "../call/evaluation.h"

namespace executorch_mlx::gpu {

namespace {

constexpr int kRounds = 15; // of a race
// A kernel that takes the same time as what it replaces must not lose because of noise: the fastest runs of the same
// work of 50 us, in different processes on one machine, differ by up to a third.
constexpr double kMargin = 1.4;
constexpr double kMaxError = 1e30; // also that of NaN: a file of verdicts has only finite numbers

// The elements as numbers on the host. Integers of the kernels are small enough for float32.
std::vector<float> values_of(const mx::array& x, mx::Stream stream) {
  const auto y =
      mx::contiguous(mx::astype(mx::flatten(x, stream), mx::float32, stream), /*allow_col_major=*/false, stream);
  evaluate({y}, stream);
  return {y.data<float>(), y.data<float>() + y.size()};
}

double error_of(const mx::array& result, const mx::array& expected, mx::Stream stream) {
  if (result.shape() != expected.shape() || result.dtype() != expected.dtype()) {
    return kMaxError;
  }
  const auto a = values_of(result, stream), b = values_of(expected, stream);
  double largest = 0, difference = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    largest = std::max(largest, std::abs(double{b[i]}));
    if (a[i] != b[i]) { // also if one of them is NaN
      const double distance = std::abs(double{a[i]} - double{b[i]});
      difference = std::isfinite(distance) ? std::max(difference, distance) : std::numeric_limits<double>::infinity();
    }
  }
  return difference == 0 ? 0 : std::min(difference / std::max(largest, 1e-30), kMaxError);
}

double largest_error(const std::vector<Comparison>& comparisons, mx::Stream stream) {
  double error = 0;
  for (const auto& [results, expected] : comparisons) {
    if (results.size() != expected.size()) {
      throw std::runtime_error("the reference has another number of results");
    }
    for (size_t i = 0; i < results.size(); ++i) {
      error = std::max(error, error_of(results[i], expected[i], stream));
    }
  }
  return error;
}

void hold_race(const Race& race, mx::Stream stream, const Stopwatch& stopwatch, Verdict& verdict) {
  const auto time = [&](const auto& work, bool has_kernel) {
    return stopwatch([&] { evaluate(work(), stream); }, has_kernel);
  };
  time(race.with_kernel, true); // compiles kernels
  time(race.without_kernel, false);
  verdict.microseconds = verdict.microseconds_without = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    verdict.microseconds = std::min(verdict.microseconds, time(race.with_kernel, true));
    verdict.microseconds_without = std::min(verdict.microseconds_without, time(race.without_kernel, false));
  }
}

} // namespace

double measure(const std::function<void()>& run, bool) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

Verdict hold(const Trial& trial, mx::Stream stream, const Stopwatch& stopwatch) {
  Verdict verdict;
  try {
    verdict.error = largest_error(trial.compare(stream), stream);
    if (!(verdict.error <= trial.tolerance)) {
      verdict.outcome = Outcome::wrong;
      return verdict;
    }
    hold_race(trial.race(stream), stream, stopwatch, verdict);
    const bool is_slow = verdict.microseconds > kMargin * verdict.microseconds_without;
    verdict.outcome = is_slow ? Outcome::slow : Outcome::used;
  } catch (const std::exception& error) {
    verdict.reason = error.what();
  } catch (...) {
    verdict.reason = "unknown exception";
  }
  return verdict;
}

} // namespace executorch_mlx::gpu
