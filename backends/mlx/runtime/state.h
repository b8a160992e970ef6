// The slots a program reads and writes, and what of them outlives a call.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "kv_cache.h"
#include "program.h"
#include "shared.h"

namespace executorch_mlx {

namespace mx = mlx::core;

using Value = std::variant<std::monostate, int64_t, double, bool>;

class State {
 public:
  explicit State(const Layout& layout);

  std::vector<std::optional<mx::array>> tensors;
  std::vector<Value> values;

  // Mutable buffers that no slot names.
  KvLayer& cache(int layer);

  // While a method is loaded. A constant that other methods may hold; a buffer
  // and the caches that they may hold too, which are in the slots in calls only.
  void hold(uint32_t slot, std::shared_ptr<const mx::array> constant);
  void attach(uint32_t slot, std::shared_ptr<Buffer> buffer);
  void attach(std::shared_ptr<Caches> caches);

  // What is in the slots now is what every call starts from. What the slots have
  // of buffers goes to those that have no contents yet.
  void keep();

  // A call is begin(), instructions, evaluate() and commit(), or rollback() if it
  // fails.
  //
  // The mutable buffers of before the call are held until the first evaluation of
  // the call: until then a failed call is harmless. From there on MLX has to be
  // their only owner, or it would copy them instead of updating them in place. A
  // call that is `undoable` holds them to its end, at the price of that copy.
  void begin(bool undoable);
  void commit();
  void rollback();

  // Evaluates, in the middle of a call or at its end.
  void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

  // An evaluation failed that could not be undone, in this method or in another
  // one that shares a buffer with it.
  bool is_lost() const;

  // Between calls.
  size_t buffer_bytes() const;

  // Empties what does not outlive the call.
  void release_temporaries();

  // Mutable buffers that have not been evaluated yet.
  std::vector<mx::array> pending() const;

 private:
  void forget_before();
  void bring_back();

  Layout layout_;
  std::map<int, KvLayer> caches_;  // by layer
  std::vector<std::pair<uint32_t, std::shared_ptr<const mx::array>>> constants_;
  std::vector<std::shared_ptr<Buffer>> buffers_;  // by slot
  std::shared_ptr<Caches> shared_caches_;  // null if the program has none
  std::vector<std::optional<mx::array>> buffers_before_;
  std::optional<std::map<int, KvLayer>> caches_before_;
  bool is_undoable_ = true;
  bool is_losing_ = false;
  // Temporaries and values that the init chain left behind; mostly empty.
  std::vector<std::pair<uint32_t, mx::array>> kept_tensors_;
  std::vector<Value> kept_values_;
};

} // namespace executorch_mlx
