// The part of a program that replays run: the first instructions of its main chain, up to the first one that uses the
// positions of the tokens otherwise than attention does, or reads the elements of another input on the host.
#pragma once

#include <mlx/mlx.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "call/context.h"
#include "call/position.h"
#include "call/state.h"
#include "program/program.h"

namespace executorch_mlx {

namespace mx = mlx::core;

// In a trial, a replay may take this much longer than the same call without it.
constexpr double kMaxSlowdown = 1.05;

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct ReplayedPart {
  using Slots = std::vector<std::pair<uint32_t, mx::array>>;

  // nullopt if no call of the program can be replayed.
  static std::optional<ReplayedPart> find(const MlxProgram& program);

  // Runs these instructions, and drops all results but those that later instructions or the caller read. Returns those
  // that kernels compute; they are lazy.
  Slots run(State& state, Context& context) const;

  // Sets the value slots to those of a call at the present positions: `values` are those of a call with the same
  // shapes. Returns false if an instruction fails: the call will fail with the error.
  bool set_values(const std::vector<Value>& values, State& state, Context& context) const;

  std::span<const int64_t> positions(const State& state) const;

  // The addresses of what slots hold.
  static std::vector<const void*> addresses(const State& state, const std::vector<uint32_t>& slots);

  // Whether the KV caches are at these addresses, and nothing else uses them.
  bool finds_caches(State& state, const std::vector<const void*>& addresses) const;

  const MlxProgram& program;
  PositionUse use;
  uint32_t tokens; // the slot of the input
  // Slots: those that kernels of these instructions write and the caller or later instructions read; and the inputs,
  // and others that later instructions read.
  std::vector<uint32_t> results, kept;
  std::vector<uint32_t> buffers; // that these instructions read, without the KV caches
};

} // namespace executorch_mlx
