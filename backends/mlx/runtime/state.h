// The slots a program reads and writes, and what of them outlives a call.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "program.h"

namespace executorch_mlx {

namespace mx = mlx::core;

using Value = std::variant<std::monostate, int64_t, double, bool>;

class State {
 public:
  explicit State(const Layout& layout);

  std::vector<std::optional<mx::array>> tensors;
  std::vector<Value> values;

  // What is in the slots now is what every call starts from.
  void keep();

  // A call is begin(), instructions, and then either commit() once nothing but
  // the evaluation can fail, or rollback(). Until commit() the mutable buffers
  // of before the call are held: that is what makes a failed call harmless, and
  // why MLX updates them in place only in the evaluation after it.
  void begin();
  void commit();
  void rollback();

  // Empties what does not outlive the call.
  void release_temporaries();

  // Mutable buffers that this call has replaced.
  std::vector<mx::array> replaced() const;

 private:
  Layout layout_;
  std::vector<std::optional<mx::array>> buffers_before_;
  // Temporaries and values that the init chain left behind; mostly empty.
  std::vector<std::pair<uint32_t, mx::array>> kept_tensors_;
  std::vector<Value> kept_values_;
};

} // namespace executorch_mlx
