// The contents of a program's slots, during a call and between calls.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <variant>
#include <vector>

#include "call/evaluation.h"
#include "call/kv_cache.h"
#include "call/undo.h"
#include "memory/mapped_files.h"
#include "program/program.h"
#include "program/shared.h"

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

  // Results of nodes that read only constants, by node. See Context::constant_result().
  std::unordered_map<const void*, mx::array> constant_results;

  // Returns the KV cache of a layer, for UpdateAndAttendNode, and creates it if there is none yet. KV caches have no
  // slots.
  KvLayer& cache(int layer);

  // -- loading ---------------------------------------------------------------

  // Connect this state to constants, buffers and caches, which other methods may share. The contents of buffers and
  // caches are in this state only during a call: begin() moves them in, commit() or rollback() moves them back.
  void set_constant(uint32_t slot, std::shared_ptr<const mx::array> constant);
  void set_buffer(uint32_t slot, std::shared_ptr<Buffer> buffer);
  void set_caches(std::shared_ptr<Caches> caches);

  // The packed weights of products, by node: see packed_weights.h.
  std::map<const void*, std::shared_ptr<const PackedWeights>> packed_weights;

  // By slot, the constants that packed weights replace in products, and of which other instructions read some rows, as
  // of an embedding. The pages of these rows are released at once, so that they do not add up to the whole constant.
  std::map<uint32_t, FilePages> partly_read;

  // Ends loading, after the init chain has run. Stores the present contents of the temporaries and value slots: every
  // call starts with them. Moves the contents of each buffer's slot to its Buffer, or discards them if the Buffer
  // already has contents.
  void finish_loading();

  // -- a call ----------------------------------------------------------------

  // A call is begin(), the instructions, evaluate(), and commit() or, if it fails, rollback().
  //
  // begin() makes a backup of the mutable buffers and caches. The backup refers to the same arrays and copies no data.
  // As long as the backup exists, rollback() restores the buffers from it. How long it exists depends:
  //
  // - Usually, the evaluation that ends the call drops the backup of the buffers that it computes, because MLX updates
  //   an array in place only if nothing else refers to the array. With a memory limit, the backup stays until this
  //   evaluation is known to fit.
  // - If an evaluation in the middle of the call overwrites slices of a buffer, these slices are saved first, and
  //   rollback() writes them back. Another buffer that it computes keeps its backup, and gets new memory.
  // - update_in_place() drops the backup of its buffer, and saves the contents that it overwrites.
  // - Without `restores_buffers`, and without a memory limit, nothing is saved. After an evaluation in the middle of
  //   the call, the backup of a buffer is what this evaluation has written.
  // - With `keep_backup`, the backup stays to the end of the call, and MLX writes the updated buffers to new memory.
  void begin(bool keep_backup, bool restores_buffers);
  void commit();
  void rollback(mx::Stream stream);

  // Writes `update` to a slice of x at once and in place, and returns true. x is the contents of the buffer in `slot`,
  // and the slot itself is empty. With `restores_buffers`, rollback() undoes the write. Returns false with
  // `keep_backup`, or if InPlaceUpdates::write() returns false. MLX then has to update the array.
  bool update_in_place(
      uint32_t slot, mx::array& x, const mx::array& update, const mx::Shape& start, const mx::Shape& stop,
      const mx::Shape& steps);

  // The same for InPlaceUpdates::write_positions().
  bool update_positions_in_place(
      uint32_t slot, mx::array& x, const mx::array& update, const mx::Shape& positions);

  // Whether x can be updated in place: only x and its backup, which the next evaluation drops, refer to x and its
  // memory, and no elements share memory. x is the contents of the buffer in `slot`, and the slot itself is empty.
  // Returns false with `keep_backup` or a memory limit.
  bool can_update_in_place(uint32_t slot, const mx::array& x);

  // Evaluates arrays in the middle of a call or, with `ends_call`, at its end. In the middle, it also evaluates the
  // buffers that could not be restored otherwise. If the evaluation computes buffers that have no backup, and it fails
  // after it has started, all buffers are lost: see is_lost().
  void evaluate(std::vector<mx::array> arrays, mx::Stream stream, bool ends_call = false);

  // Like evaluate() with `ends_call`, but returns before the arrays are computed, unless the call keeps a backup, there
  // is a memory limit, or the program has caches.
  void submit(std::vector<mx::array> arrays, mx::Stream stream);

  // Lets the next call on a GPU update the buffers in place. To be called after the evaluation that ends the call.
  // `outputs` are the arrays that the caller keeps.
  void take_over_memory(const std::vector<mx::array>& outputs);

  // The arrays of buffers and caches that are not evaluated yet.
  std::vector<mx::array> pending() const;

  // Empties the slots of inputs, outputs and temporaries.
  void release_temporaries();

  // -- between calls ---------------------------------------------------------

  // Marks all buffers and caches as lost. To be called if work that submit() has started fails.
  void lose_buffers();

  // Whether the contents of a buffer or cache were lost in an evaluation that failed without a backup, in this method
  // or in another one that shares the buffer or cache.
  bool is_lost() const;

  // The size of all buffers together.
  size_t buffer_bytes() const;

 private:
  // A buffer, or the keys or values of a cache, that the call has changed.
  struct Changed {
    std::optional<mx::array>* backup;
    const std::optional<mx::array>* now;
    Undo* undo;  // leads from the backup to the contents from before the call
  };
  std::vector<Changed> changed();
  // The records of buffers that were written in place in this call and now also have an update that MLX has to make.
  std::vector<InPlaceUpdates*> superseded_updates();
  bool owns_memory(uint32_t buffer, const std::vector<mx::array>& outputs) const;
  void evaluate_undoably(std::vector<mx::array> arrays, mx::Stream stream);
  // Runs `body`, an evaluation. `risks_buffers`: whether the buffers are lost if it fails.
  template <typename Body>
  void run(bool risks_buffers, Body&& body);
  template <typename Write>
  bool write_in_place(uint32_t slot, Write&& write);
  void undo_updates(mx::Stream stream);
  void drop_backup();
  void drop_backup_of_pending();
  // Makes a backup of what has none: of its contents if they are computed, or else of the array that they update.
  void back_up_computed();
  void return_buffers();

  Layout layout_;
  std::map<int, KvLayer> caches_;  // by layer
  std::vector<std::pair<uint32_t, std::shared_ptr<const mx::array>>> constants_;
  std::vector<std::shared_ptr<Buffer>> buffers_;  // in slot order
  std::shared_ptr<Caches> shared_caches_;  // null if the program has none
  std::vector<std::optional<mx::array>> buffers_backup_;
  std::optional<std::map<int, KvLayer>> caches_backup_;
  std::vector<Undo> buffers_undo_;  // what to undo in the backup, by buffer
  std::map<int, std::pair<Undo, Undo>> caches_undo_;  // what to undo in the backups of keys and values, by layer
  std::vector<InPlaceUpdates> in_place_;  // of this call, by buffer
  // The memory of a buffer at the beginning of a call.
  struct Memory {
    const void* data;  // the address of a Data of MLX
    bool is_unshared;  // whether no other array uses it
  };
  std::vector<Memory> memory_before_;  // by buffer
  bool keeps_backup_ = true;
  bool restores_buffers_ = true;
  bool has_lost_buffers_ = false;  // in this call
  // The temporaries and values that the init chain computed, with which every call starts. Usually there are none.
  std::vector<std::pair<uint32_t, mx::array>> initial_tensors_;
  std::vector<Value> initial_values_;
};

} // namespace executorch_mlx
