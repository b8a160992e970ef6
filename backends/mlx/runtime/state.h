// The contents of a program's slots, during a call and between calls.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "evaluation.h"
#include "kv_cache.h"
#include "program.h"
#include "shared.h"
#include "undo.h"

namespace executorch_mlx {

namespace mx = mlx::core;

using Value = std::variant<std::monostate, int64_t, double, bool>;

class State {
 public:
  explicit State(const Layout& layout);

  std::vector<std::optional<mx::array>> tensors;
  std::vector<Value> values;

  // The KV cache of a layer, which UpdateAndAttendNode uses. It has no slot.
  KvLayer& cache(int layer);

  // -- loading ---------------------------------------------------------------

  // Other methods may share constants, buffers and caches. Buffers and caches are in this state only
  // during a call.
  void set_constant(uint32_t slot, std::shared_ptr<const mx::array> constant);
  void set_buffer(uint32_t slot, std::shared_ptr<Buffer> buffer);
  void set_caches(std::shared_ptr<Caches> caches);

  // Ends loading, after the init chain. Every call starts from the present contents of the slots.
  // Buffers without contents get those of their slots.
  void finish_loading();

  // -- a call ----------------------------------------------------------------

  // A call is begin(), the instructions, evaluate(), and commit() or, if it fails, rollback().
  //
  // Until the first evaluation of a call, a backup of the mutable buffers makes a failed call harmless.
  // Then the backup is dropped, because MLX updates an array in place only if nobody else holds it. A
  // call with `keep_backup` keeps it to the end, and copies the buffers that it updates. With a memory limit, every
  // call can be undone until its last evaluation has been found to fit: an evaluation before that saves the slices that
  // it overwrites.
  void begin(bool keep_backup);
  void commit();
  void rollback(mx::Stream stream);

  // Evaluates arrays in the middle of a call, or at its end.
  void evaluate(std::vector<mx::array> arrays, mx::Stream stream, bool ends_call = false);

  // Buffers and caches that are not evaluated yet.
  std::vector<mx::array> pending() const;

  // Empties the slots of inputs, outputs and temporaries.
  void release_temporaries();

  // -- between calls ---------------------------------------------------------

  // Whether an evaluation without a backup failed, in this method or in one that shares a buffer.
  bool is_lost() const;

  size_t buffer_bytes() const;

 private:
  // A buffer, or the keys or values of a cache.
  struct Tracked {
    std::optional<mx::array>* backup;
    const std::optional<mx::array>* now;
    Undo* undo;
  };
  std::vector<Tracked> tracked();  // those that the call has changed
  void evaluate_undoably(std::vector<mx::array> arrays, mx::Stream stream);
  void run(Evaluation& evaluation, bool risks_buffers);
  void undo_updates(mx::Stream stream);
  void drop_backup();
  void return_buffers();

  Layout layout_;
  std::map<int, KvLayer> caches_;  // by layer
  std::vector<std::pair<uint32_t, std::shared_ptr<const mx::array>>> constants_;
  std::vector<std::shared_ptr<Buffer>> buffers_;  // in slot order
  std::shared_ptr<Caches> shared_caches_;  // null if the program has none
  std::vector<std::optional<mx::array>> buffers_backup_;
  std::optional<std::map<int, KvLayer>> caches_backup_;
  std::vector<Undo> buffers_undo_;  // relative to the backup
  std::map<int, std::pair<Undo, Undo>> caches_undo_;  // of keys and values, by layer
  bool keeps_backup_ = true;
  bool has_lost_buffers_ = false;
  // Temporaries and values that the init chain computed. Usually none.
  std::vector<std::pair<uint32_t, mx::array>> initial_tensors_;
  std::vector<Value> initial_values_;
};

} // namespace executorch_mlx
