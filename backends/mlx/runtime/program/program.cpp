#include "program/program.h"

#include <algorithm>

#include "../serialization/output_fields.h"
#include "gpu/verdicts.h"
#include "mlx_internals/cuda.h"
#include "memory/kernel_result.h"
#include "program/dispatch_table.h"
#include "program/payload.h"
#include "program/tensor_meta.h"
#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

// These limits are far above what any real program needs, and low enough to bound the memory and time of loading.
constexpr uint64_t kMaxSlots = 1 << 20;
constexpr uint64_t kMaxInstructions = 1 << 22;
constexpr size_t kMaxListLength = 1 << 16; // elements of one list in an IR node
// Elements of the lists of all instructions. A file can store a list once and use it in many instructions.
constexpr uint64_t kMaxListElements = 1 << 24;
constexpr int kMaxNestedChains = 64; // a chain, a chain that it calls, a chain that the second one calls, and so on

constexpr int kFirstExtension = 200;

// Whether a device computes a replacement faster than the instructions that it replaces. Without a kernel for its rows
// or tokens, it does not.
bool runs_as_replacement(fb::OpNode op, mx::Device device) {
  const bool is_cpu = device == mx::Device::cpu;
  const mx::Stream stream(0, device); // of which the function looks at the device only
  if (static_cast<int>(op) < kFirstExtension) {
    return true;
  }
  switch (op) {
    case fb::OpNode::SampleNode:
      return is_cpu || gpu::is_used(gpu::Kernel::sample, stream);
    case fb::OpNode::RowSdpaNode:
    case fb::OpNode::RowUpdateNode:
      return is_cpu ? cpu::kHasKernels : gpu::is_cuda(stream) && gpu::is_used(gpu::Kernel::attention, stream);
    case fb::OpNode::GatedRecurrenceNode:
    case fb::OpNode::SelectiveScanNode:
    case fb::OpNode::ReadLayerStateNode:
      return cpu::computes_at_once(stream); // a GPU is faster with blocks of tokens
    case fb::OpNode::SdpaGradientsNode:
    case fb::OpNode::RMSNormGradientNode:
    case fb::OpNode::CrossEntropyNode:
    case fb::OpNode::CrossEntropyGradientNode:
    case fb::OpNode::SiluGradientNode:
      return !is_cpu; // MLX has kernels for GPUs
    default:
      return true;
  }
}

Layout read_layout(const fb::MLXGraph& graph) {
  const uint64_t total = uint64_t{graph.num_constant_tensors()} + graph.num_input_tensors() +
      graph.num_output_tensors() + graph.num_mutable_buffer_tensors() + graph.num_temp_tensors();
  check_program(total <= kMaxSlots && graph.num_values() <= kMaxSlots, "program: got ", total, " tensor slots and ",
      graph.num_values(), " value slots, expected at most ", kMaxSlots);
  return {graph.num_constant_tensors(), graph.num_input_tensors(), graph.num_output_tensors(),
      graph.num_mutable_buffer_tensors(), graph.num_temp_tensors(), graph.num_values()};
}

// Verifies the slots in the fields of one instruction.
class SlotVerifier {
 public:
  // The instruction may write only tensor slots with the number `first_writable` or higher. `where` names the
  // instruction in messages. Counts the fields with a constant in `constant_uses`.
  SlotVerifier(
      const Layout& layout, uint32_t first_writable, const std::string& where, std::vector<uint32_t>& constant_uses)
      : layout_(layout), first_writable_(first_writable), where_(where), constant_uses_(constant_uses) {}

  uint32_t list_elements() const { return list_elements_; }

  void operator()(const Field& field) {
    if (field.value == nullptr) {
      return;
    }
    if (field.is(fb::TidTypeTable)) {
      for_each_struct<fb::Tid, const fb::Tid*>(field, [&](const fb::Tid& tid) { check_tensor(field, tid); });
    } else if (field.is(fb::VidTypeTable)) {
      check_value(field, &field.structure<fb::Vid>());
    } else if (field.is(fb::IntOrVidTypeTable)) {
      for_each_table<fb::IntOrVid>(field, [&](const auto& x) {
        if (x.is_vid()) {
          check_value(field, x.vid());
        }
      });
    } else if (field.is(fb::FloatOrVidTypeTable)) {
      for_each_table<fb::FloatOrVid>(field, [&](const auto& x) {
        if (x.is_vid()) {
          check_value(field, x.vid());
        }
      });
    } else if (field.is(fb::VidOrTidTypeTable)) {
      for_each_table<fb::VidOrTid>(
          field, [&](const auto& x) { x.is_vid() ? check_value(field, x.vid()) : check_tensor(field, x.tid()); });
    } else if (field.is(fb::IntOrVidOrTidTypeTable)) {
      for_each_table<fb::IntOrVidOrTid>(field, [&](const auto& x) {
        check_program(x.kind() <= 2, where_, field.name, ": got kind ", int{x.kind()}, ", expected 0, 1 or 2");
        if (x.kind() == 1) {
          check_value(field, x.vid());
        } else if (x.kind() == 2) {
          check_tensor(field, x.tid());
        }
      });
    } else if (field.repeated) {
      check_length(field, flatbuffers::ReadScalar<flatbuffers::uoffset_t>(field.target()));
    }
  }

 private:
  template <typename T, typename Element, typename Visit>
  void for_each_struct(const Field& field, Visit&& visit) {
    if (!field.repeated) {
      visit(field.structure<T>());
      return;
    }
    const auto& list = field.vector<Element>();
    check_length(field, list.size());
    for (flatbuffers::uoffset_t i = 0; i < list.size(); ++i) {
      visit(*list.Get(i));
    }
  }

  template <typename T, typename Visit>
  void for_each_table(const Field& field, Visit&& visit) {
    if (!field.repeated) {
      visit(field.table<T>());
      return;
    }
    const auto& list = field.vector<flatbuffers::Offset<T>>();
    check_length(field, list.size());
    for (flatbuffers::uoffset_t i = 0; i < list.size(); ++i) {
      visit(*list.Get(i));
    }
  }

  void check_length(const Field& field, size_t size) {
    check_program(
        size <= kMaxListLength, where_, field.name, ": got ", size, " elements, expected at most ", kMaxListLength);
    list_elements_ += static_cast<uint32_t>(size);
  }

  void check_tensor(const Field& field, const fb::Tid* tid) {
    check_program(tid != nullptr, where_, field.name, ": expected a tensor slot");
    check_tensor(field, *tid);
  }

  void check_tensor(const Field& field, const fb::Tid& tid) {
    check_program(tid.idx() < layout_.num_tensors(), where_, field.name, ": tensor slot ", tid.idx(),
        " is out of range [0, ", layout_.num_tensors(), ")");
    check_program(!is_output_field(field.name) || tid.idx() >= first_writable_, where_, field.name, ": tensor slot ",
        tid.idx(), " is ", tid.idx() < layout_.constants ? "a constant" : "an input", " and cannot be written");
    if (tid.idx() < layout_.constants) {
      ++constant_uses_[tid.idx()];
    }
  }

  void check_value(const Field& field, const fb::Vid* vid) const {
    check_program(vid != nullptr, where_, field.name, ": expected a value slot");
    check_program(vid->idx() < layout_.values, where_, field.name, ": value slot ", vid->idx(), " is out of range [0, ",
        layout_.values, ")");
  }

  const Layout& layout_;
  uint32_t first_writable_;
  const std::string& where_;
  std::vector<uint32_t>& constant_uses_;
  uint32_t list_elements_ = 0;
};

// Refuses three kinds of nodes: one of a tensor-parallel program, Metal source that may not run, and an
// UpdateAndAttendNode without its required fields. `missing_for_metal` is the parameter of load_program(). `where`
// names the instruction in messages.
void check_supported(
    const fb::Instruction& instruction, const OpRow& row, const std::string& where, const char* missing_for_metal) {
  if (is_retired(row.op)) {
    fail(Error::NotSupported, where, "the program is a part of a model, exported in parts by an earlier version; ",
        "export the model again");
  }
  if (instruction.op_type() == fb::OpNode::MetalKernelNode && missing_for_metal != nullptr) {
    fail(Error::NotSupported, where, "Metal source needs ", missing_for_metal);
  }
  if (const auto* node = instruction.op_as_UpdateAndAttendNode()) {
    check_program(node->layer_id() && *node->layer_id() >= 0, where, "layer_id: expected an integer of 0 or more");
    check_program(node->scale().has_value(), where, "scale: expected a number");
  }
}

// Verifies the instructions of all chains, decodes them into `program`, and refuses chains that call themselves.
class ChainVerifier {
 public:
  ChainVerifier(MlxProgram& program, mx::Device device, const char* missing_for_metal)
      : program_(program), device_(device), missing_for_metal_(missing_for_metal) {}

  void run() {
    const auto& chains = *program_.graph->instruction_chains();
    check_program(chains.size() <= kMaxSlots, "program: got ", chains.size(), " chains, expected at most ", kMaxSlots);
    program_.chains.resize(chains.size());
    calls_.resize(chains.size());
    depth_.assign(chains.size(), kUnvisited);
    find_replacements();
    for (uint32_t i = 0; i < chains.size(); ++i) {
      decode(i, *chains.Get(i));
    }
    const auto main = program_.graph->main_chain_idx();
    const auto init = program_.graph->init_chain_idx();
    check_program(main < chains.size(), "program: main chain ", main, " is out of range [0, ", chains.size(), ")");
    check_program(init >= -1 && init < int64_t{chains.size()}, "program: init chain ", init, " is out of range [-1, ",
        chains.size(), ")");
    for (uint32_t i = 0; i < chains.size(); ++i) {
      measure_depth(i, 0);
    }
    program_.init_chain = init >= 0 && does_nothing(program_.chains[init]) ? -1 : init;
  }

 private:
  // Whether a chain has no instructions but NoopNodes. Such is an init chain that sets buffers to initial values which
  // this runtime reads from the named data.
  static bool does_nothing(const Chain& chain) {
    return std::all_of(chain.instructions.begin(), chain.instructions.end(),
        [](const auto& instruction) { return instruction.source->op_type() == fb::OpNode::NoopNode; });
  }

  static constexpr int kUnvisited = -1;
  static constexpr int kInProgress = -2;

  // Sorts the replacements of the program by chain and position, and checks their ranges.
  void find_replacements() {
    const auto* replacements = program_.graph->replacements();
    if (replacements == nullptr) {
      return;
    }
    const auto& chains = *program_.graph->instruction_chains();
    for (const auto* r : *replacements) {
      check_program(
          r->chain() < chains.size(), "replacement: chain ", r->chain(), " is out of range [0, ", chains.size(), ")");
      const uint64_t last = uint64_t{r->first()} + r->count();
      const auto size = chains.Get(r->chain())->instructions()->size();
      check_program(r->count() > 0 && last <= size, "replacement: got instructions ", r->first(), " to ", last,
          " of chain ", r->chain(), ", which has ", size);
      replacements_.push_back(r);
    }
    std::sort(replacements_.begin(), replacements_.end(), [](const auto* a, const auto* b) {
      return std::pair(a->chain(), a->first()) < std::pair(b->chain(), b->first());
    });
    for (size_t i = 1; i < replacements_.size(); ++i) {
      const auto &a = *replacements_[i - 1], &b = *replacements_[i];
      check_program(a.chain() != b.chain() || a.first() + a.count() <= b.first(), "replacement: instruction ",
          b.first(), " of chain ", b.chain(), " has two replacements");
    }
  }

  void decode(uint32_t index, const fb::InstructionChain& source) {
    auto& chain = program_.chains[index];
    chain.instructions.reserve(source.instructions()->size());
    num_instructions_ += source.instructions()->size();
    check_program(num_instructions_ <= kMaxInstructions, "program: got ", num_instructions_,
        " instructions, expected at most ", kMaxInstructions);
    // Constants and inputs are the first slots. Only the init chain, which runs once at load, may write them.
    const auto& graph = *program_.graph;
    const bool is_init = int64_t{graph.init_chain_idx()} == index && graph.main_chain_idx() != index;
    const uint32_t first_writable = is_init ? 0 : program_.layout.outputs_begin();
    for (uint32_t i = 0; i < source.instructions()->size(); ++i) {
      const fb::Replacement* const replacement = replacement_at(index, i);
      const auto& instruction = replacement ? *replacement->instruction() : *source.instructions()->Get(i);
      const auto tag = static_cast<size_t>(instruction.op_type());
      const auto* row = find_row(tag);
      check_program(row != nullptr && instruction.op() != nullptr, "chain ", index, ", instruction ", i, ": node ", tag,
          " is unknown to this runtime");
      const std::string where = str("chain ", index, ", instruction ", i, " (", row->name, "): ");
      SlotVerifier verifier(program_.layout, first_writable, where, program_.constant_uses);
      for_each_field(
          *static_cast<const flatbuffers::Table*>(instruction.op()), type_of(instruction.op_type()), verifier);
      num_list_elements_ += verifier.list_elements();
      check_program(num_list_elements_ <= kMaxListElements, where, "got ", num_list_elements_,
          " list elements so far, expected at most ", kMaxListElements);
      check_supported(instruction, *row, where, missing_for_metal_);
      program_.has_caches |= instruction.op_type() == fb::OpNode::UpdateAndAttendNode;
      for (const int64_t called : called_chains(instruction)) {
        check_program(called >= 0 && called < int64_t(program_.chains.size()), where, "chain ", called,
            " is out of range [0, ", program_.chains.size(), ")");
        calls_[index].push_back(static_cast<uint32_t>(called));
      }
      chain.instructions.push_back({.function = row->function,
          .node = instruction.op(),
          .source = &instruction,
          .index = i,
          .list_elements = verifier.list_elements()});
      i += replacement ? replacement->count() - 1 : 0;
    }
  }

  // The replacement whose range begins at an instruction, or null. Is called for the instructions in their order.
  const fb::Replacement* replacement_at(uint32_t chain, uint32_t instruction) {
    if (next_replacement_ == replacements_.size()) {
      return nullptr;
    }
    const auto* next = replacements_[next_replacement_];
    if (next->chain() != chain || next->first() != instruction) {
      return nullptr;
    }
    ++next_replacement_;
    return runs_as_replacement(next->instruction()->op_type(), device_) ? next : nullptr;
  }

  // Returns how deeply calls nest below a chain: 0 if the chain calls no other chain. Refuses chains that call
  // themselves, and more than kMaxNestedChains nested chains. `level` is the depth of the recursion of this function.
  // It is limited to protect the stack. The result is checked as well, because the recursion does not descend into
  // chains that have been measured before.
  int measure_depth(uint32_t index, int level) {
    check_program(depth_[index] != kInProgress, "program: chain ", index, " calls itself");
    check_nesting(index, level);
    if (depth_[index] == kUnvisited) {
      depth_[index] = kInProgress;
      int deepest = 0;
      for (const uint32_t called : calls_[index]) {
        deepest = std::max(deepest, 1 + measure_depth(called, level + 1));
      }
      check_nesting(index, deepest);
      depth_[index] = deepest;
    }
    return depth_[index];
  }

  static void check_nesting(uint32_t index, int depth) {
    check_program(
        depth < kMaxNestedChains, "program: chain ", index, ": expected at most ", kMaxNestedChains, " nested chains");
  }

  MlxProgram& program_;
  const mx::Device device_;
  const char* missing_for_metal_;
  uint64_t num_instructions_ = 0;
  uint64_t num_list_elements_ = 0;
  std::vector<const fb::Replacement*> replacements_; // sorted
  size_t next_replacement_ = 0; // the first replacement that is not part of `program_` yet
  std::vector<std::vector<uint32_t>> calls_; // for each chain, the chains that it calls
  std::vector<int> depth_; // for each chain, the result of measure_depth() or a constant above
};

// Checks `slot`, which is entry `i` of the list called `map_name`. The number of a tensor slot must be in
// [first, last).
void check_slot(const Layout& layout, const char* map_name, uint32_t i, const fb::SlotVariant& slot, uint32_t first,
    uint32_t last) {
  const bool is_tensor = slot.slot_type() == fb::SlotType::TensorSlot;
  check_program(slot.slot_type() >= fb::SlotType::MIN && slot.slot_type() <= fb::SlotType::MAX, map_name, " ", i,
      ": unknown slot type ", int(slot.slot_type()));
  if (!is_tensor) {
    first = 0;
    last = layout.values;
  }
  check_program(slot.idx() >= first && slot.idx() < last, map_name, " ", i, ": ", is_tensor ? "tensor" : "value",
      " slot ", slot.idx(), " is out of range [", first, ", ", last, ")");
}

// Checks the lists of slots outside the chains: the inputs, outputs, mutable buffers and named slots.
void check_maps(const MlxProgram& program) {
  const auto& graph = *program.graph;
  const auto& layout = program.layout;
  const auto check = [&](const char* map_name, const auto* map, uint32_t first, uint32_t last) {
    for (uint32_t i = 0; map != nullptr && i < map->size(); ++i) {
      check_slot(layout, map_name, i, *map->Get(i), first, last);
    }
  };
  check("input_map", graph.input_map(), layout.inputs_begin(), layout.outputs_begin());
  check("output_map", graph.output_map(), 0, layout.num_tensors());
  check("mutable_buffer_map", graph.mutable_buffer_map(), layout.buffers_begin(), layout.temps_begin());
  if (const auto* named = graph.named_slots()) {
    for (uint32_t i = 0; i < named->size(); ++i) {
      check_slot(layout, "named_slots", i, *named->Get(i)->slot(), 0, layout.num_tensors());
    }
  }
}

} // namespace

MlxProgram load_program(const void* data, size_t size, mx::Device device, const char* missing_for_metal) {
  MlxProgram program;
  program.graph = open_payload(data, size);
  program.device = device;
  program.layout = read_layout(*program.graph);
  check_maps(program);
  check_tensor_meta(*program.graph, program.layout);
  program.constant_uses.assign(program.layout.constants, 0);
  if (const auto* outputs = program.graph->output_map()) {
    for (const auto* slot : *outputs) {
      if (slot->slot_type() == fb::SlotType::TensorSlot && slot->idx() < program.layout.constants) {
        ++program.constant_uses[slot->idx()];
      }
    }
  }
  ChainVerifier(program, device, missing_for_metal).run();

  program.tensor_names.assign(program.layout.num_tensors(), nullptr);
  if (const auto* named = program.graph->named_slots()) {
    for (const auto* entry : *named) {
      if (entry->slot()->slot_type() == fb::SlotType::TensorSlot) {
        program.tensor_names[entry->slot()->idx()] = entry->name()->c_str();
      }
    }
  }
  return program;
}

} // namespace executorch_mlx
