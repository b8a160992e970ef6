// A verified MLX program. Its slots, chains and required fields are valid. The IR nodes are not copied: the
// runtime reads them in the FlatBuffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "error.h"
#include "groups/elementwise_group.h"
#include "groups/product_group.h"
#include "groups/recurrent_loop.h"
#include "program/reflect.h"

namespace executorch_mlx {

class Context;
// Runs one instruction. `node` is the FlatBuffer table of its IR node.
using OpFunction = void (*)(const void* node, Context& context);

// The number of slots of each kind. Tensor slots are numbered in this order.
struct Layout {
  uint32_t constants = 0;
  uint32_t inputs = 0;
  uint32_t outputs = 0;
  uint32_t buffers = 0;
  uint32_t temps = 0;
  uint32_t values = 0;

  uint32_t inputs_begin() const { return constants; }
  uint32_t outputs_begin() const { return inputs_begin() + inputs; }
  uint32_t buffers_begin() const { return outputs_begin() + outputs; }
  uint32_t temps_begin() const { return buffers_begin() + buffers; }
  uint32_t num_tensors() const { return temps_begin() + temps; }
};

// An instruction, ready to run: load_program() has found its function in the dispatch table.
struct DecodedInstruction {
  OpFunction function;
  const void* node;
  const fb::Instruction* source;
  uint32_t index; // in the chain of the FlatBuffer, for messages; of a replacement, the first one it replaces
  uint32_t list_elements; // the total number of elements in the node's lists
  uint32_t elementwise_group = 0; // elementwise_groups[elementwise_group - 1] of the chain begins here; 0: none does
  uint32_t product_group = 0; // likewise for product_groups
};

struct Chain {
  std::vector<DecodedInstruction> instructions; // after the replacements of the program
  std::vector<ElementwiseGroup> elementwise_groups;
  std::vector<ProductGroup> product_groups;
};

// An MLX program, verified: what one payload holds.
struct MlxProgram {
  const fb::MLXGraph* graph = nullptr;
  Layout layout;
  std::vector<Chain> chains;
  std::vector<const char*> tensor_names; // by slot; null if unnamed
  std::vector<uint32_t> constant_uses; // by slot: in how many fields of instructions and outputs a constant is
  std::vector<bool> only_in_products; // by slot: whether a constant is used only by the AddmmNodes of product groups
  std::map<const void*, RecurrentLoop> recurrent_loops; // by ScanNode
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
