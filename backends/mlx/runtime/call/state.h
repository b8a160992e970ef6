// The contents of a program's slots, during a call and between calls.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <variant>
#include <vector>

#include "call/evaluation.h"
#include "call/kv_cache.h"
#include "program/program.h"
#include "call/shared.h"

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

  // Results of instructions before they run, operands of instructions after they have run, and results of earlier
  // calls: see DecodedInstruction.
  std::vector<std::optional<mx::array>> held;
  std::vector<std::optional<mx::array>> kept;

  // Returns the KV cache of a layer, for UpdateAndAttendNode, and creates it if there is none yet. KV caches have no
  // slots.
  KvLayer& cache(int layer);

  // -- loading ---------------------------------------------------------------

  // Connect this state to constants, buffers and caches, which other methods may share. The contents of buffers and
  // caches are in this state only during a call: begin() moves them in, commit() or abort() moves them back.
  void set_constant(uint32_t slot, std::shared_ptr<const mx::array> constant);
  void set_buffer(uint32_t slot, std::shared_ptr<Buffer> buffer);
  void set_caches(std::shared_ptr<Caches> caches);

  // The owner of the evaluations of this state, which is that of the session.
  std::shared_ptr<Owner> owner = std::make_shared<Owner>();

  // Ends loading, after the init chain has run. Stores the present contents of the temporaries and value slots: every
  // call starts with them. Moves the contents of each buffer's slot to its Buffer, or discards them if the Buffer
  // already has contents.
  void finish_loading();

  // -- a call ----------------------------------------------------------------

  // A call is begin(), the instructions, evaluate(), and commit() or, if it fails, abort().
  //
  // begin() keeps a second reference to the contents of each buffer and cache. It copies no data. MLX, and the kernels
  // of this library, update an array in place only if nothing else refers to it. The reference is therefore dropped
  // when the buffer is about to be updated: by update_in_place(), and by an evaluation, once it is known to fit into
  // the memory limit. As long as all references exist, no buffer has changed, and abort() returns the contents from
  // before the call. Otherwise the buffers are undefined until they are reset.
  //
  // begin() changes nothing if it throws.
  void begin();
  void commit() noexcept;
  // Returns whether the buffers and caches have their contents from before the call. If not, they have none.
  bool abort(mx::Stream stream) noexcept;

  // Writes `update` to a slice of x at once and in place, and returns true. x is the contents of the buffer in `slot`,
  // and the slot itself is empty. Returns false if write_in_place() does: MLX then has to update the array.
  bool update_in_place(uint32_t slot, mx::array& x, const mx::array& update, const mx::Shape& start,
      const mx::Shape& stop, const mx::Shape& steps);

  // The same for write_positions_in_place().
  bool update_positions_in_place(uint32_t slot, mx::array& x, const mx::array& update, const mx::Shape& positions);

  // Whether x can be updated in place: only x and the reference of begin() refer to x and its memory, and no elements
  // share memory. x is the contents of the buffer in `slot`, and the slot itself is empty. Returns false with a memory
  // limit.
  bool can_update_in_place(uint32_t slot, const mx::array& x);

  // Drops the reference of begin() to a buffer, which kernels are about to update.
  void drop_reference(uint32_t slot) { before(slot)->reset(); }

  // Evaluates arrays.
  void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

  // Starts to compute the arrays that end the call, and returns before they are computed, unless there is a memory
  // limit or the program has caches.
  void submit(std::vector<mx::array> arrays, mx::Stream stream);

  // Lets the next call on a GPU update the buffers in place. To be called after the evaluation that ends the call.
  // `outputs` are the arrays that the caller keeps.
  void take_over_memory(const std::vector<mx::array>& outputs);

  // The buffers, in the order of their slots. Between calls, they have their contents.
  const std::vector<std::shared_ptr<Buffer>>& buffers() const { return buffers_; }

  // After kernels that write to the memory of the buffers have been submitted, and then the computation of `later`: the
  // host waits for it before it reads a buffer.
  void set_written(const mx::array& later);

  // The arrays of buffers and caches that are not evaluated yet.
  std::vector<mx::array> pending() const;

  // Empties the slots of inputs, outputs and temporaries, and `held`.
  void release_temporaries();

  // -- between calls ---------------------------------------------------------

  // Frees the contents of the buffers and caches, because they are undefined.
  void drop_contents() noexcept;

  // For a reset: a state with the same caches, but without contents.
  State without_contents() const;

  // Replaces the contents of the buffers by those in the slots of `fresh`, and empties the caches. Skips the buffers in
  // `done`, and adds the others.
  void reset(State& fresh, std::set<const Buffer*>& done);

  // Whether this state has mutable buffers or caches.
  bool has_contents() const { return layout_.buffers > 0 || shared_caches_ != nullptr; }

  // Whether all buffers of this state are in `buffers`.
  bool has_only(const std::set<const Buffer*>& buffers) const;

 private:
  // The reference of begin() to the contents of a buffer. Null if `slot` is no buffer.
  std::optional<mx::array>* before(uint32_t slot);
  bool owns_memory(uint32_t buffer, const std::vector<mx::array>& outputs) const;
  // Drops the references of begin() to arrays that an evaluation is about to update.
  void drop_references_to_pending();
  // The ids of the evaluated arrays that it updates.
  std::vector<std::uintptr_t> overwritable() const;
  void return_buffers() noexcept;

  Layout layout_;
  std::map<int, KvLayer> caches_; // by layer
  std::vector<std::pair<uint32_t, std::shared_ptr<const mx::array>>> constants_;
  std::vector<std::shared_ptr<Buffer>> buffers_; // in slot order
  std::shared_ptr<Caches> shared_caches_; // null if the program has none
  std::vector<std::optional<mx::array>> buffers_before_; // the references of begin(), by buffer
  std::map<int, KvLayer> caches_before_; // the same for the caches, by layer
  // The memory of a buffer at the beginning of a call.
  struct Memory {
    const void* data; // the address of a Data of MLX
    bool is_unshared; // whether no other array uses it
  };
  std::vector<Memory> memory_before_; // by buffer
  // The temporaries and values that the init chain computed, with which every call starts. Usually there are none.
  std::vector<std::pair<uint32_t, mx::array>> initial_tensors_;
  std::vector<Value> initial_values_;
};

} // namespace executorch_mlx
