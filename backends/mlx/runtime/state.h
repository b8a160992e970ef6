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

// The contents of a value slot. std::monostate stands for an empty slot.
using Value = std::variant<std::monostate, int64_t, double, bool>;

class State {
 public:
  explicit State(const Layout& layout);

  // The tensor slots and the value slots. A slot is empty until something is written to it.
  std::vector<std::optional<mx::array>> tensors;
  std::vector<Value> values;

  // Returns the KV cache of a layer, for UpdateAndAttendNode, and creates it if there is none yet. KV caches have no
  // slots.
  KvLayer& cache(int layer);

  // -- loading ---------------------------------------------------------------

  // Connect this state to constants, buffers and caches, which other methods may share. The contents of buffers and
  // caches are in this state only during a call: begin() moves them in, commit() or rollback() moves them back.
  void set_constant(uint32_t slot, std::shared_ptr<const mx::array> constant);
  void set_buffer(uint32_t slot, std::shared_ptr<Buffer> buffer);
  void set_caches(std::shared_ptr<Caches> caches);

  // Ends loading, after the init chain has run. Stores the present contents of the temporaries and value slots: every
  // call starts with them. Empties the slots of the buffers. Their contents go to those Buffers that have no contents
  // yet; the others keep what they have.
  void finish_loading();

  // -- a call ----------------------------------------------------------------

  // A call is begin(), the instructions, evaluate(), and commit() or, if it fails, rollback().
  //
  // begin() makes a backup of the mutable buffers and caches, which holds the same arrays and copies no data. Until the
  // first evaluation of a call, rollback() restores the buffers from the backup. The first evaluation drops the
  // backup, because MLX updates an array in place only if nobody else holds it. With `keep_backup`, the backup stays
  // to the end of the call, and MLX writes the updated buffers to new memory. With a memory limit, every call can be
  // undone until its last evaluation is known to fit: each evaluation before that one saves the slices that it
  // overwrites.
  void begin(bool keep_backup);
  void commit();
  void rollback(mx::Stream stream);

  // Evaluates arrays in the middle of a call or, with `ends_call`, at its end. Drops the backup unless begin() was told
  // to keep it. If the evaluation fails without a backup and has buffers to compute, these are lost: see is_lost().
  void evaluate(std::vector<mx::array> arrays, mx::Stream stream, bool ends_call = false);

  // The arrays of buffers and caches that are not evaluated yet.
  std::vector<mx::array> pending() const;

  // Empties the slots of inputs, outputs and temporaries.
  void release_temporaries();

  // -- between calls ---------------------------------------------------------

  // Whether the contents of a buffer or cache were lost in an evaluation that failed without a backup, in this method
  // or in another one that shares the buffer or cache.
  bool is_lost() const;

  // The size of all buffers together.
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
  bool has_lost_buffers_ = false;  // in this call
  // The temporaries and values that the init chain computed, with which every call starts. Usually there are none.
  std::vector<std::pair<uint32_t, mx::array>> initial_tensors_;
  std::vector<Value> initial_values_;
};

} // namespace executorch_mlx
