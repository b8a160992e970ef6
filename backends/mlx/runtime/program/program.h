// A verified MLX program. Its slots, chains and required fields are valid. The IR nodes are not copied: the
// runtime reads them in the FlatBuffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <mlx/mlx.h>

#include "error.h"
#include "program/reflect.h"

namespace executorch_mlx {

namespace mx = mlx::core;

class Context;
class FilePages;
struct PackedWeights;

// Runs one instruction. `node` is the FlatBuffer table of its IR node.
using OpFunction = void (*)(const void* node, Context& context);

// What computes several instructions together: a field of the first of them. See fuse.h. A call that is profiled runs
// none.
class FusedInstruction {
 public:
  // Computes `length` consecutive instructions, with at most `list_elements` elements in the lists of their nodes
  // besides those of the first one.
  explicit FusedInstruction(uint32_t length = 1, uint32_t list_elements = 0)
      : length(length), list_elements(list_elements) {}
  virtual ~FusedInstruction() = default;
  FusedInstruction(const FusedInstruction&) = delete;
  FusedInstruction& operator=(const FusedInstruction&) = delete;

  // Returns whether the instructions are computed. Otherwise they run one by one. Some of them may then find their
  // result computed: see Context::hold().
  virtual bool run(Context& c) const = 0;

  const uint32_t length;
  const uint32_t list_elements;
};

// The number of slots of each kind. Tensor slots are numbered in this order.
struct Layout {
  uint32_t constants = 0;
  uint32_t inputs = 0;
  uint32_t outputs = 0;
  uint32_t buffers = 0;
  uint32_t temps = 0;
  uint32_t values = 0;

  // Further places for tensors, which no field of an instruction names: see DecodedInstruction.
  uint32_t held = 0;
  uint32_t kept = 0;

  uint32_t inputs_begin() const { return constants; }
  uint32_t outputs_begin() const { return inputs_begin() + inputs; }
  uint32_t buffers_begin() const { return outputs_begin() + outputs; }
  uint32_t temps_begin() const { return buffers_begin() + buffers; }
  uint32_t num_tensors() const { return temps_begin() + temps; }

  bool is_buffer(uint32_t tensor) const { return tensor >= buffers_begin() && tensor < temps_begin(); }

  // Adds places, and returns the number of the first one.
  uint32_t add_held(size_t count = 1) { return std::exchange(held, held + static_cast<uint32_t>(count)); }
  uint32_t add_kept() { return kept++; }
};

// Operands of an instruction, for a later one that computes both together. State::held[first + i] is operand i from the
// run of the instruction on. The instruction itself only adds its result to MLX's lazy graph. If nothing needs this
// result in the end, MLX does not compute it.
struct HeldOperands {
  uint32_t first;
  std::vector<const fb::Tid*> slots;
  int64_t max_rows; // vectors on the last axis; if an operand has more, none is held
};

// An instruction, ready to run: load_program() has found its function in the dispatch table, and fuse() what the
// runtime computes together. A call looks up nothing.
struct DecodedInstruction {
  static constexpr uint32_t kNone = UINT32_MAX;

  OpFunction function;
  const void* node;
  const fb::Instruction* source;
  uint32_t index; // in the chain of the FlatBuffer, for messages; of a replacement, the first one it replaces
  uint32_t list_elements; // the total number of elements in the node's lists

  // What fuse() adds. `fused` computes this instruction and others together; null: nothing does.
  std::unique_ptr<const FusedInstruction> fused = nullptr;
  const fb::Tid* matrix = nullptr; // of an AddmmNode: the constant whose transpose is the second operand, if one is
  std::unique_ptr<const HeldOperands> operands = nullptr;
  uint32_t early = kNone; // State::held[early] is the result, if it was computed together with that of an earlier one
  uint32_t kept = kNone; // State::kept[kept] is the result of an earlier call, if the instruction reads only constants
  std::vector<uint32_t> released = {}; // temporary slots to be emptied when it has run: no later one reads them

  // What pack_weights() adds after the constants have been loaded.
  std::shared_ptr<const PackedWeights> packed_weights = nullptr; // of a product; may be null
  std::shared_ptr<const FilePages> partly_read = nullptr; // of a TakeNode: pages to be released after it; may be null
};

struct Chain {
  std::vector<DecodedInstruction> instructions; // after the replacements of the program
};

// An MLX program, verified: what one payload holds.
struct MlxProgram {
  const fb::MLXGraph* graph = nullptr;
  mx::Device device = mx::Device::cpu;
  Layout layout;
  std::vector<Chain> chains;
  std::vector<const char*> tensor_names; // by slot; null if unnamed
  std::vector<uint32_t> constant_uses; // by slot: in how many fields of instructions and outputs a constant is
  std::vector<bool> only_in_products; // by slot: whether a constant is used only by the AddmmNodes of product groups
  int64_t init_chain = -1; // runs once at load; -1: none, or one that does nothing here
  bool has_caches = false; // whether the program contains an UpdateAndAttendNode

  const fb::TensorMeta& meta(uint32_t tensor) const { return *graph->tensor_meta()->Get(tensor); }
};

// Reads a program from a payload and verifies everything that does not depend on the inputs. `data` must be aligned to
// 8 bytes and outlive the program. The program is for `device`. `missing_for_metal` is null if the program may contain
// Metal source. Otherwise it says what is missing to run Metal source, and a program that contains Metal source is
// rejected with this text. Throws Failure.
MlxProgram load_program(const void* data, size_t size, mx::Device device, const char* missing_for_metal);

} // namespace executorch_mlx
