// The slots a program reads and writes, and what of them outlives a call.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "kv_cache.h"
#include "program.h"

namespace executorch_mlx {

namespace mx = mlx::core;

using Value = std::variant<std::monostate, int64_t, double, bool>;

class State {
 public:
  explicit State(const Layout& layout);

  std::vector<std::optional<mx::array>> tensors;
  std::vector<Value> values;
  std::map<int, KvLayer> caches;  // by layer; mutable buffers that no slot names

  // What is in the slots now is what every call starts from.
  void keep();

  // A call is begin(), instructions and evaluate(), and rollback() if it fails.
  //
  // The mutable buffers of before the call are held until the first evaluation of
  // the call: until then a failed call is harmless. From there on MLX has to be
  // their only owner, or it would copy them instead of updating them in place. A
  // call that is `undoable` holds them to its end, at the price of that copy.
  void begin(bool undoable);
  void rollback();

  // Evaluates, in the middle of a call or at its end.
  void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

  // Drops the buffers of before the call, which has succeeded.
  void commit();

  // An evaluation failed that could not be undone.
  bool is_lost() const {
    return is_lost_;
  }

  // Empties what does not outlive the call.
  void release_temporaries();

  // Mutable buffers that have not been evaluated yet.
  std::vector<mx::array> pending() const;

 private:
  Layout layout_;
  std::vector<std::optional<mx::array>> buffers_before_;
  std::optional<std::map<int, KvLayer>> caches_before_;
  bool is_undoable_ = true;
  bool is_lost_ = false;
  // Temporaries and values that the init chain left behind; mostly empty.
  std::vector<std::pair<uint32_t, mx::array>> kept_tensors_;
  std::vector<Value> kept_values_;
};

} // namespace executorch_mlx
