// Runs the chains of a program in one call. The functions of the ops get this Context: it has the slots that they read
// and write, and the stream, and it counts what they do against the limits of the call.
#pragma once

#include <mlx/mlx.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "call/evaluation.h"
#include "call/state.h"
#include "checks.h"
#include "memory/kernel_result.h"
#include "device.h"
#include "dtype.h"
#include "error.h"
#include "memory/limit.h"
#include "options.h"
#include "program/program.h"
#include "call/shared.h"

namespace executorch_mlx {

class Profiler;

class Context {
 public:
  // `profiler` may be null. Otherwise, the profiler runs each instruction, evaluates the results and measures the time.
  Context(
      const MlxProgram& program, State& state, mx::Stream stream, const Limits& limits, Profiler* profiler = nullptr)
      : stream(stream), program_(program), state_(state), limits_(limits), profiler_(profiler) {}

  const mx::Stream stream;

  // -- tensors ---------------------------------------------------------------

  // The tensor in a slot. Throws Failure if the slot is empty.
  const mx::array& in(const fb::Tid* tid) {
    const auto& slot = state_.tensors[tid->idx()];
    if (!slot) [[unlikely]] {
      fail(Error::InvalidProgram, slot_name(tid->idx()), " is read before it is written");
    }
    operations_ += slot->size();
    return *slot;
  }

  // The tensor in a slot, or nullopt if `tid` is null.
  std::optional<mx::array> optional(const fb::Tid* tid) {
    return tid == nullptr ? std::nullopt : std::optional(in(tid));
  }

  // The tensors in several slots.
  std::vector<mx::array> list(const flatbuffers::Vector<const fb::Tid*>& tids) {
    std::vector<mx::array> result;
    result.reserve(tids.size());
    for (const auto* tid : tids) {
      result.push_back(in(tid));
    }
    return result;
  }

  // The contents of a slot, which may be empty.
  const std::optional<mx::array>& slot(const fb::Tid* tid) const { return state_.tensors[tid->idx()]; }

  // compute(), which is the result `kept` of an instruction that reads only constants, or kNone. Later calls return the
  // first result if it is available.
  template <typename Compute>
  mx::array constant_result(uint32_t kept, Compute&& compute) {
    if (kept == DecodedInstruction::kNone) {
      return compute();
    }
    auto& result = state_.kept[kept];
    if (result) {
      return *result;
    }
    const mx::array computed = compute();
    if (computed.is_available()) {
      result = computed;
    }
    return computed;
  }

  // Reads the slot `tid` for an op that updates the array and writes the result to the slot `out`. If `tid` and `out`
  // are the same slot, the slot is emptied: MLX updates an array in place only if nothing else refers to it.
  mx::array in_for_update(const fb::Tid* tid, const fb::Tid* out) {
    if (tid->idx() != out->idx()) {
      return in(tid);
    }
    mx::array result = in(tid);
    state_.tensors[tid->idx()].reset();
    return result;
  }

  // Writes `update` to a slice of x, and sets the slot `tid` to the result. x is an array that in_for_update()
  // returned. The update is written at once and in place if possible. Otherwise MLX writes it in the next evaluation.
  void set_updated(const fb::Tid* tid, mx::array x, const mx::array& update, const mx::Shape& start,
      const mx::Shape& stop, const mx::Shape& steps);

  // Writes update[:, :, i] to x[:, :, positions[i]] for each i, at once and in place, and sets the slot `tid` to the
  // result. x is as above, and has 4 axes. Returns false, and changes nothing, if x cannot be updated in place.
  bool set_positions(const fb::Tid* tid, mx::array& x, const mx::array& update, const mx::Shape& positions);

  // Evaluates those operands of an expensive op that are not available, so that the kernel of the op can run at once.
  // Ignores null pointers and empty slots. Does nothing in three cases: on a GPU; in a chain that another chain runs,
  // such as a loop body; and after an update of a buffer has been left to MLX, so that the evaluation at the end of the
  // call makes it.
  template <typename Tids = std::initializer_list<const fb::Tid*>>
  void make_available(const Tids& tids) {
    if (!can_evaluate()) {
      return;
    }
    std::vector<mx::array> arrays;
    for (const auto* tid : tids) {
      const auto* slot = tid == nullptr ? nullptr : &state_.tensors[tid->idx()];
      if (slot != nullptr && *slot && !(*slot)->is_available()) {
        arrays.push_back(**slot);
      }
    }
    if (!arrays.empty()) {
      state_.evaluate(std::move(arrays), stream);
    }
  }

  // Writes a result to the slot `tid`. A lazy result without elements is replaced by an empty array of its shape,
  // because some of MLX's functions divide by zero when they compute a result without elements.
  void set(const fb::Tid* tid, mx::array x) {
    check_size(x.shape(), x.dtype());
    if (x.size() == 0 && x.has_primitive()) {
      x = mx::zeros(x.shape(), x.dtype(), stream);
    }
    operations_ += x.size();
    has_lazy_buffers_ |= program_.layout.is_buffer(tid->idx()) && !x.is_available();
    state_.tensors[tid->idx()] = std::move(x);
  }

  // Replaces the contents of a temporary slot by an array with the same elements. Does nothing for other slots: the
  // verifier of the program protects those that are no outputs of an instruction.
  void replace_temporary(const fb::Tid* tid, const mx::array& x) {
    if (tid->idx() >= program_.layout.temps_begin()) {
      state_.tensors[tid->idx()] = x;
    }
  }

  // Throws Failure if a result of this shape is too large, or if the call would exceed its limit of operations. Each
  // element of the result is a sum of `depth` products. To be called before a kernel that may run at once.
  void check_product(const mx::Shape& shape, mx::Dtype dtype, int64_t depth) const {
    check_operations(operations_ + product_operations(shape, dtype, depth));
  }

  // Does the same, and counts the operations.
  void expect_product(const mx::Shape& shape, mx::Dtype dtype, int64_t depth) {
    count_operations(product_operations(shape, dtype, depth), 1);
  }

  // The instruction that runs. While a control instruction runs another chain, that of this chain.
  const DecodedInstruction& instruction() const { return *instruction_; }

  // Sets the result of an instruction before it runs.
  void set_early(const DecodedInstruction& instruction, mx::array x) { state_.held[instruction.early] = std::move(x); }

  // Returns the result of the instruction if it was set before, or nullopt.
  std::optional<mx::array> take_early() {
    const uint32_t early = instruction_->early;
    return early == DecodedInstruction::kNone ? std::nullopt : take_held(early);
  }

  // An array that one fused instruction leaves for another one, or an operand of an earlier instruction: see
  // HeldOperands. The operand is nullopt if this instruction has not run by itself, or has too many vectors.
  void hold(uint32_t number, const mx::array& x) { state_.held[number] = x; }
  void release(uint32_t number) { state_.held[number].reset(); }
  const std::optional<mx::array>& held(uint32_t number) const { return state_.held[number]; }
  std::optional<mx::array> take_held(uint32_t number) { return std::exchange(state_.held[number], std::nullopt); }

  // mx::take(x, indices, 0, stream) for a TakeNode. Computes some rows at a time and releases their pages each time, if
  // DecodedInstruction::partly_read says so.
  mx::array take_rows(const mx::array& x, const mx::array& indices);

  // The packed weights of a product, or nullopt: see packed_weights.h.
  std::optional<mx::array> packed_weights() const { return packed_weights(*instruction_); }
  static std::optional<mx::array> packed_weights(const DecodedInstruction& product) {
    const auto& packed = product.packed_weights;
    return packed ? std::optional(packed->panels) : std::nullopt;
  }

  // Adds `elements` * `depth` to the operations that the load option `max_operations` bounds, and throws Failure if
  // they exceed it. The product is less than 2^63. To be called before a kernel that may run at once.
  void count_operations(uint64_t elements, uint64_t depth) {
    operations_ += std::min(elements * depth, uint64_t{1} << 60);
    check_operations(operations_);
  }

  // The KV cache of a layer, for an op that updates it.
  KvLayer& cache(int layer) {
    has_lazy_buffers_ = true;
    return state_.cache(layer);
  }

  // -- values ----------------------------------------------------------------

  int64_t integer(const fb::Vid* vid) const;
  double real(const fb::FloatOrVid* x) const;
  int64_t integer(const fb::IntOrVid* x) const { return x->is_vid() ? integer(x->vid()) : x->literal(); }

  void set(const fb::Vid* vid, int64_t x) { state_.values[vid->idx()] = x; }

  // Returns x as an int, because MLX's sizes, axes and offsets are ints. Throws Failure if x does not fit in 32 bits;
  // `argument` names x in the message.
  int checked_int(const char* argument, int64_t x) const {
    check_argument(x >= std::numeric_limits<int>::min() && x <= std::numeric_limits<int>::max(), argument, " ", x,
        " does not fit in 32 bits");
    return static_cast<int>(x);
  }
  int checked_int(const char* argument, const fb::IntOrVid* x) const { return checked_int(argument, integer(x)); }

  // Reads a list of sizes and checks that each is at least `lowest`.
  mx::Shape sizes(
      const char* argument, const flatbuffers::Vector<flatbuffers::Offset<fb::IntOrVid>>& list, int lowest = 0) const {
    mx::Shape result;
    for (const auto* x : list) {
      result.push_back(checked_int(argument, x));
      check_argument(result.back() >= lowest, argument, ": got ", result.back(), ", expected at least ", lowest);
    }
    return result;
  }

  // -- execution -------------------------------------------------------------

  // Whether the limits of the call allow a loop with so many instructions and operations in each iteration, and counts
  // it.
  bool allows_iterations(int iterations, int64_t instructions, uint64_t operations) const;
  void count_iterations(int iterations, int64_t instructions, uint64_t operations);

  // Runs a chain, or its instructions [begin, end), with all chains that it calls. An exception of an instruction is
  // rethrown as a LocatedFailure.
  void run(uint32_t chain, size_t begin = 0, size_t end = SIZE_MAX);

  // Evaluates x in the middle of a program and waits for the result. Arrays that x does not depend on stay lazy.
  void evaluate_now(const mx::array& x) { state_.evaluate({x}, stream); }

  // Starts to compute arrays without waiting for them. With a memory limit, waits: whether the next evaluation fits can
  // be checked only when it is known how much memory this one leaves in use.
  void start(std::vector<mx::array> arrays) {
    if (has_memory_limit()) [[unlikely]] {
      return state_.evaluate(std::move(arrays), stream);
    }
    has_started_work_ = true;
    Evaluation(std::move(arrays), stream, state_.owner).start();
  }

  // Waits for the work of start(). Throws if it has failed.
  void wait_for_started_work() {
    if (has_started_work_) {
      Evaluation({}, stream, state_.owner).wait();
      check_no_failure_since(*state_.owner, failures_);
    }
  }

  // The number and name of a tensor slot, for messages.
  std::string slot_name(uint32_t tensor) const;

  // The operands of an instruction, with the type of each tensor and the value of each number, for messages.
  std::string describe_operands(const fb::Instruction& instruction) const;

 private:
  // Whether arrays can be evaluated before the end of the call: see make_available().
  bool can_evaluate() const { return !has_lazy_buffers_ && depth_ <= 1 && cpu::computes_at_once(stream); }

  void count_instruction();
  // Returns the number of instructions that have run: those of a FusedInstruction run together.
  size_t run_instruction(uint32_t chain, size_t i);
  bool run_fused(const DecodedInstruction& instruction);
  // Empties the slots that nothing reads after the instructions from `begin` up to `end`.
  void release_slots(const Chain& chain, size_t begin, size_t end);
  // Holds the operands of the instruction that is about to run, unless it has run together with others. Those of a
  // buffer are not held, because MLX then could not update it in place.
  void hold(const HeldOperands& operands, bool is_fused);
  void check_operations(uint64_t operations) const;
  static uint64_t product_operations(const mx::Shape& shape, mx::Dtype dtype, int64_t depth);
  void evaluate_slots();
  // Whether the host may write to the memory of buffers. On CUDA, later kernels have read the old contents.
  bool allows_host_updates() const;

  const MlxProgram& program_;
  State& state_;
  const Limits limits_;
  Profiler* profiler_;
  const DecodedInstruction* instruction_ = nullptr; // that runs
  int depth_ = 0; // the number of nested chains that are running: 1 in the main chain, 2 in a loop body that it runs
  bool has_started_work_ = false; // by start()
  const uint64_t failures_ = state_.owner->failures; // before the call
  bool has_lazy_buffers_ = false; // whether an update of a buffer or a cache has been left to MLX
  int64_t executed_ = 0; // the number of instructions that have run so far, plus one for each run of a chain
  int64_t evaluated_at_ = 0; // `executed_` at the last evaluation of all slots
  uint64_t operations_ = 0; // elements read and written so far, and products summed up; see max_operations
};

} // namespace executorch_mlx
