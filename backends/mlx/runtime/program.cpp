#include "program.h"

#include <cstring>

#include "dispatch.h"

namespace executorch_mlx {

namespace {

// Far above any real program, far below what would hurt.
constexpr uint64_t kMaxSlots = 1 << 20;
constexpr uint64_t kMaxInstructions = 1 << 22;
constexpr size_t kMaxListed = 1 << 16;  // elements of one list in a node
constexpr int kMaxChainDepth = 64;
constexpr size_t kMaxRank = 16;

struct Header {
  uint8_t zeros[4];
  char magic[4];
  uint64_t data_offset;
  uint64_t data_size;
};
static_assert(sizeof(Header) == 24);

const fb::MLXGraph* open_flatbuffer(const void* data, size_t size) {
  check_program(
      size > sizeof(Header), "payload: ", size, " bytes came, more than ", sizeof(Header), " were expected");
  Header header;
  std::memcpy(&header, data, sizeof(header));
  constexpr uint8_t kZeros[4] = {};
  check_program(
      std::memcmp(header.zeros, kZeros, 4) == 0 && std::memcmp(header.magic, "MLX0", 4) == 0,
      "payload: the header does not say MLX0");
  // The FlatBuffer ends before `data_offset`, up to padding; a writer that knows
  // of no data may leave both at zero.
  const uint64_t end = header.data_offset == 0 ? size : header.data_offset;
  check_program(
      end > sizeof(Header) && end - 15 <= size + 0ull && header.data_size <= size,
      "payload: data at ", header.data_offset, ", ", header.data_size, " bytes, does not lie in ", size, " bytes");
  const auto* bytes = static_cast<const uint8_t*>(data) + sizeof(Header);
  const size_t length = std::min<uint64_t>(end, size) - sizeof(Header);
  // Every table takes at least four bytes of its own, unless tables are shared
  // in a way no writer makes: this keeps verification linear in the size.
  flatbuffers::Verifier verifier(
      bytes, length, /*max_depth=*/16, static_cast<flatbuffers::uoffset_t>(length / 4 + 1));
  check_program(
      length >= 8 && verifier.VerifyBuffer<fb::MLXGraph>(nullptr),
      "payload: ", length, " bytes that are no valid FlatBuffer of an MLXGraph");
  return flatbuffers::GetRoot<fb::MLXGraph>(bytes);
}

Layout read_layout(const fb::MLXGraph& graph) {
  const uint64_t total = uint64_t{graph.num_constant_tensors()} + graph.num_input_tensors() +
      graph.num_output_tensors() + graph.num_mutable_buffer_tensors() + graph.num_temp_tensors();
  check_program(
      total <= kMaxSlots && graph.num_values() <= kMaxSlots,
      "program: ", total, " tensor and ", graph.num_values(), " value slots, at most ", kMaxSlots, " are allowed");
  return {
      graph.num_constant_tensors(),
      graph.num_input_tensors(),
      graph.num_output_tensors(),
      graph.num_mutable_buffer_tensors(),
      graph.num_temp_tensors(),
      graph.num_values()};
}

bool is_written(const Field& field) {
  for (const char* name : {"out", "outs", "outputs", "sliced", "carry"}) {
    if (std::strcmp(field.name, name) == 0) {
      return true;
    }
  }
  return false;
}

// Verifies the slots that one instruction names.
class SlotVerifier {
 public:
  // Tensors from `writable` on may be written.
  SlotVerifier(const Layout& layout, uint32_t writable, const std::string& where)
      : layout_(layout), writable_(writable), where_(where) {}

  void operator()(const Field& field) const {
    if (field.value == nullptr) {
      return;
    }
    if (field.is(fb::TidTypeTable)) {
      each<fb::Tid, const fb::Tid*>(field, [&](const fb::Tid& tid) { tensor(field, tid); });
    } else if (field.is(fb::VidTypeTable)) {
      value(field, &field.structure<fb::Vid>());
    } else if (field.is(fb::IntOrVidTypeTable)) {
      each_table<fb::IntOrVid>(field, [&](const auto& x) {
        if (x.is_vid()) {
          value(field, x.vid());
        }
      });
    } else if (field.is(fb::FloatOrVidTypeTable)) {
      each_table<fb::FloatOrVid>(field, [&](const auto& x) {
        if (x.is_vid()) {
          value(field, x.vid());
        }
      });
    } else if (field.is(fb::VidOrTidTypeTable)) {
      each_table<fb::VidOrTid>(field, [&](const auto& x) {
        x.is_vid() ? value(field, x.vid()) : tensor(field, x.tid());
      });
    } else if (field.is(fb::IntOrVidOrTidTypeTable)) {
      each_table<fb::IntOrVidOrTid>(field, [&](const auto& x) {
        check_program(x.kind() <= 2, where_, field.name, " is of kind ", int{x.kind()}, ", expected 0, 1 or 2");
        if (x.kind() == 1) {
          value(field, x.vid());
        } else if (x.kind() == 2) {
          tensor(field, x.tid());
        }
      });
    } else if (field.repeated) {
      length(field, flatbuffers::ReadScalar<flatbuffers::uoffset_t>(field.target()));
    }
  }

 private:
  template <typename T, typename Element, typename Visit>
  void each(const Field& field, Visit&& visit) const {
    if (!field.repeated) {
      visit(field.structure<T>());
      return;
    }
    const auto& list = field.vector<Element>();
    length(field, list.size());
    for (flatbuffers::uoffset_t i = 0; i < list.size(); ++i) {
      visit(*list.Get(i));
    }
  }

  template <typename T, typename Visit>
  void each_table(const Field& field, Visit&& visit) const {
    if (!field.repeated) {
      visit(field.table<T>());
      return;
    }
    const auto& list = field.vector<flatbuffers::Offset<T>>();
    length(field, list.size());
    for (flatbuffers::uoffset_t i = 0; i < list.size(); ++i) {
      visit(*list.Get(i));
    }
  }

  void length(const Field& field, size_t size) const {
    check_program(size <= kMaxListed, where_, field.name, " lists ", size, " elements, at most ", kMaxListed, " are allowed");
  }

  void tensor(const Field& field, const fb::Tid* tid) const {
    check_program(tid != nullptr, where_, field.name, " is said to be a tensor slot and names none");
    tensor(field, *tid);
  }

  void tensor(const Field& field, const fb::Tid& tid) const {
    check_program(
        tid.idx() < layout_.num_tensors(),
        where_, field.name, " is tensor slot ", tid.idx(), ", there are ", layout_.num_tensors());
    check_program(
        !is_written(field) || tid.idx() >= writable_,
        where_, field.name, " writes tensor slot ", tid.idx(),
        tid.idx() < layout_.constants ? ", a constant" : ", an input");
  }

  void value(const Field& field, const fb::Vid* vid) const {
    check_program(vid != nullptr, where_, field.name, " is said to be a value slot and names none");
    check_program(
        vid->idx() < layout_.values,
        where_, field.name, " is value slot ", vid->idx(), ", there are ", layout_.values);
  }

  const Layout& layout_;
  uint32_t writable_;
  const std::string& where_;
};

// Chains that an instruction runs.
std::vector<int64_t> callees(const fb::Instruction& instruction) {
  if (const auto* node = instruction.op_as_IfNode()) {
    return {node->then_chain_idx(), node->else_chain_idx()};
  }
  if (const auto* node = instruction.op_as_WhileNode()) {
    return {node->cond_chain_idx(), node->body_chain_idx()};
  }
  if (const auto* node = instruction.op_as_ScanNode()) {
    return {node->body_chain_idx()};
  }
  return {};
}

void check_supported(const fb::Instruction& instruction, const std::string& where, const char* no_metal_kernels) {
  if (instruction.op_type() == fb::OpNode::MetalKernelNode && no_metal_kernels != nullptr) {
    fail(Error::NotSupported, where, "Metal source inside a program is not run: ", no_metal_kernels);
  }
  if (const auto* node = instruction.op_as_UpdateAndAttendNode()) {
    if (!node->layer_id() || *node->layer_id() < 0 || !node->scale()) {
      fail(Error::InvalidProgram, where, "layer_id or scale is absent, or layer_id below 0");
    }
  }
}

class ChainVerifier {
 public:
  ChainVerifier(Program& program, const char* no_metal_kernels)
      : program_(program), no_metal_kernels_(no_metal_kernels) {}

  void run() {
    const auto& chains = *program_.graph->instruction_chains();
    check_program(chains.size() <= kMaxSlots, "program: ", chains.size(), " chains, at most ", kMaxSlots, " are allowed");
    program_.chains.resize(chains.size());
    calls_.resize(chains.size());
    depth_.assign(chains.size(), kUnseen);
    for (uint32_t i = 0; i < chains.size(); ++i) {
      chain(i, *chains.Get(i));
    }
    const auto main = program_.graph->main_chain_idx();
    const auto init = program_.graph->init_chain_idx();
    check_program(main < chains.size(), "program: main chain ", main, ", there are ", chains.size());
    check_program(
        init >= -1 && init < int64_t{chains.size()}, "program: init chain ", init, ", there are ", chains.size());
    for (uint32_t i = 0; i < chains.size(); ++i) {
      measure(i, 0);
    }
  }

 private:
  static constexpr int kUnseen = -1;
  static constexpr int kOpen = -2;

  void chain(uint32_t index, const fb::InstructionChain& source) {
    auto& chain = program_.chains[index];
    chain.source = &source;
    chain.steps.reserve(source.instructions()->size());
    total_ += source.instructions()->size();
    // The init chain may rewrite constants: it runs once, before anybody reads them.
    const auto& graph = *program_.graph;
    const bool is_init = int64_t{graph.init_chain_idx()} == index && graph.main_chain_idx() != index;
    const uint32_t writable = is_init ? 0 : program_.layout.outputs_begin();
    check_program(total_ <= kMaxInstructions, "program: more than ", kMaxInstructions, " instructions");
    for (uint32_t i = 0; i < source.instructions()->size(); ++i) {
      const auto& instruction = *source.instructions()->Get(i);
      const auto tag = static_cast<size_t>(instruction.op_type());
      const auto* row = find_row(tag);
      check_program(
          row != nullptr && instruction.op() != nullptr,
          "chain ", index, ", instruction ", i, ": node ", tag, " is unknown to this runtime, which has ", num_rows());
      const std::string where = str("chain ", index, ", instruction ", i, " (", row->name, "): ");
      for_each_field(
          *static_cast<const flatbuffers::Table*>(instruction.op()),
          type_of(instruction.op_type()),
          SlotVerifier(program_.layout, writable, where));
      check_supported(instruction, where, no_metal_kernels_);
      program_.has_caches |= instruction.op_type() == fb::OpNode::UpdateAndAttendNode;
      for (const int64_t callee : callees(instruction)) {
        check_program(
            callee >= 0 && callee < int64_t(program_.chains.size()),
            where, "runs chain ", callee, ", there are ", program_.chains.size());
        calls_[index].push_back(static_cast<uint32_t>(callee));
      }
      chain.steps.push_back({row->handler, instruction.op()});
    }
  }

  // Depth of the calls below a chain. A chain that is open on the way down
  // runs itself.
  int measure(uint32_t index, int level) {
    check_program(
        depth_[index] != kOpen && level < kMaxChainDepth,
        "program: chain ", index, depth_[index] == kOpen ? " runs itself" : " is nested too deep");
    if (depth_[index] == kUnseen) {
      depth_[index] = kOpen;
      int depth = 0;
      for (const uint32_t callee : calls_[index]) {
        depth = std::max(depth, 1 + measure(callee, level + 1));
      }
      depth_[index] = depth;
    }
    return depth_[index];
  }

  Program& program_;
  const char* no_metal_kernels_;
  uint64_t total_ = 0;
  std::vector<std::vector<uint32_t>> calls_;
  std::vector<int> depth_;
};

void check_slot(const Layout& layout, const char* map, uint32_t i, const fb::SlotVariant& slot, uint32_t first, uint32_t last) {
  const bool is_tensor = slot.slot_type() == fb::SlotType::TensorSlot;
  check_program(
      slot.slot_type() >= fb::SlotType::MIN && slot.slot_type() <= fb::SlotType::MAX,
      map, " ", i, ": slot type ", int(slot.slot_type()), " is unknown");
  check_program(
      is_tensor ? slot.idx() >= first && slot.idx() < last : slot.idx() < layout.values,
      map, " ", i, ": ", is_tensor ? "tensor" : "value", " slot ", slot.idx(), " is out of range");
}

void check_maps(const Program& program) {
  const auto& graph = *program.graph;
  const auto& layout = program.layout;
  const auto check = [&](const char* name, const auto* map, uint32_t first, uint32_t last) {
    for (uint32_t i = 0; map != nullptr && i < map->size(); ++i) {
      check_slot(layout, name, i, *map->Get(i), first, last);
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

bool is_permutation(const flatbuffers::Vector<uint8_t>& order) {
  uint32_t seen = 0;
  for (const uint8_t axis : order) {
    if (axis >= order.size() || (seen >> axis & 1) != 0) {
      return false;
    }
    seen |= 1u << axis;
  }
  return true;
}

void check_tensor_meta(const Program& program) {
  const auto& layout = program.layout;
  const auto* all = program.graph->tensor_meta();
  const uint32_t size = all == nullptr ? 0 : all->size();
  check_program(
      size >= layout.temps_begin(),
      "tensor_meta: ", size, " entries, expected one for each of ", layout.temps_begin(), " tensors");
  for (uint32_t i = 0; i < layout.temps_begin(); ++i) {
    const auto& meta = *all->Get(i);
    const auto& shape = *meta.shape();
    check_program(shape.size() <= kMaxRank, "tensor_meta ", i, ": rank ", shape.size(), ", at most ", kMaxRank, " is allowed");
    const bool is_static = i < layout.constants || i >= layout.buffers_begin();
    for (uint32_t d = 0; d < shape.size(); ++d) {
      const auto& dim = *shape.Get(d);
      check_program(
          is_static ? dim.value() >= 0 : dim.value() >= -1,
          "tensor_meta ", i, ": dimension ", d, " is ", dim.value());
      check_program(
          dim.min_value() >= 0 && (dim.max_value() == -1 || dim.max_value() >= dim.min_value()),
          "tensor_meta ", i, ": dimension ", d, " is within [", dim.min_value(), ", ", dim.max_value(), "]");
    }
    if (const auto* order = meta.dim_order()) {
      check_program(
          order->size() == 0 || (order->size() == shape.size() && is_permutation(*order)),
          "tensor_meta ", i, ": dim_order is no order of ", shape.size(), " dimensions");
    }
  }
}

} // namespace

Program load_program(const void* data, size_t size, const char* no_metal_kernels) {
  Program program;
  program.graph = open_flatbuffer(data, size);
  program.layout = read_layout(*program.graph);
  check_maps(program);
  check_tensor_meta(program);
  ChainVerifier(program, no_metal_kernels).run();

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
