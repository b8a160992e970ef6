#include "groups/product_group.h"

#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "gpu/cuda_kernel.h"
#include "gpu/fused.h"
#include "ops/attention.h"
#include "ops/quant.h"
#include "program/program.h"
#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

// The largest number of rows of x. On a GPU, the kernels multiply up to 32 rows: see gpu::products_of_row(). On a CPU,
// the products of a prompt share the preparation of x, and the limit bounds the memory of the results, which are
// computed early.
constexpr int64_t kMaxRowsOnGpu = 32;
constexpr int64_t kMaxRowsOnCpu = 4096;
constexpr size_t kMaxMembers = 8;

template <typename Table>
const Table& table_of(const void* node) {
  return *static_cast<const Table*>(node);
}

class GroupFinder {
 public:
  explicit GroupFinder(MlxProgram& program) : program_(program) {
    program.only_in_products.assign(program.layout.constants, false);
    if (const auto* outputs = program.graph->output_map()) {
      for (const auto* slot : *outputs) {
        if (slot->slot_type() == fb::SlotType::TensorSlot) {
          outputs_.insert(slot->idx());
        }
      }
    }
  }

  // `is_main`: no instruction runs after the chain.
  void find(Chain& chain, bool is_main) {
    for (uint32_t i = 0; i < chain.instructions.size(); ++i) {
      const auto& instruction = *chain.instructions[i].source;
      if (const auto* silu = instruction.op_as_SiluNode()) {
        if (const auto found = results_.find(silu->x()->idx()); found != results_.end()) {
          groups_[found->second].feeds_silu = true;
        }
      }
      const auto product = product_of(instruction);
      const auto group = product ? add(*product, i) : 0;
      note_reads_of_transposed(instruction, product.has_value());
      forget_written_slots(instruction);
      if (product) {
        results_[product->out] = group;
      }
      if (i > 0) {
        add_ropes(*chain.instructions[i - 1].source, instruction, i - 1);
      }
    }
    for (const auto& [first, group] : groups_) {
      if (group.members.size() > 1 || group.op == fb::OpNode::AddmmNode) {
        chain.product_groups.push_back(group);
        chain.instructions[first].product_group = static_cast<uint32_t>(chain.product_groups.size());
      }
    }
    if (!is_main) {
      note_other_readers();
    }
    groups_.clear();
    open_.clear();
    transposed_.clear();
    results_.clear();
  }

  // After all chains.
  void finish() {
    for (const auto& [constant, count] : transposes_) {
      program_.only_in_products[constant] =
          program_.constant_uses[constant] == count && read_otherwise_.count(constant) == 0;
    }
  }

 private:
  // What the members of a group have in common besides x.
  using Key = std::tuple<fb::OpNode, int, int>; // op, group size, bits

  struct Product {
    uint32_t x;
    uint32_t out;
    Key key;
    ProductGroup::Member member;
  };

  bool is_constant(const fb::Tid* slot) const { return slot != nullptr && slot->idx() < program_.layout.constants; }

  std::optional<Product> product_of(const fb::Instruction& instruction) const {
    if (const auto* n = instruction.op_as_QuantizedMatmulNode()) {
      const bool fits = n->transpose() && n->mode()->string_view() == "affine" && is_constant(n->biases());
      return fits ? packed_product(*n, instruction) : std::nullopt;
    }
    if (const auto* n = instruction.op_as_Int8QuantizedMatmulNode()) {
      return is_constant(n->biases()) ? packed_product(*n, instruction) : std::nullopt;
    }
    if (const auto* n = instruction.op_as_AddmmNode()) {
      const auto found = transposed_.find(n->mat2()->idx());
      const bool has_valid_bias = n->bias() == nullptr || (is_constant(n->bias()) && n->beta() == 1.0f);
      if (found != transposed_.end() && has_valid_bias && n->alpha() == 1.0f) {
        const Key key{instruction.op_type(), 0, 0};
        return Product{n->mat1()->idx(), n->out()->idx(), key, {instruction.op(), found->second}};
      }
    }
    return std::nullopt;
  }

  template <typename Node>
  std::optional<Product> packed_product(const Node& n, const fb::Instruction& instruction) const {
    if (!is_constant(n.w()) || !is_constant(n.scales())) {
      return std::nullopt;
    }
    const Key key{instruction.op_type(), n.group_size(), n.bits()};
    return Product{n.x()->idx(), n.out()->idx(), key, {instruction.op(), nullptr}};
  }

  // Adds a product to a group that is open, or to a new one. Returns the instruction of the first member.
  uint32_t add(const Product& product, uint32_t instruction) {
    auto& open = open_[product.x];
    const auto [found, is_new] = open.emplace(product.key, instruction);
    if (!is_new && groups_[found->second].members.size() == kMaxMembers) {
      found->second = instruction;
    }
    auto& group = groups_[found->second];
    group.op = std::get<0>(product.key);
    group.members.push_back(product.member);
    return found->second;
  }

  // Adds a group of two consecutive instructions if both are RopeNodes of the same kind and in no group yet.
  void add_ropes(const fb::Instruction& before, const fb::Instruction& instruction, uint32_t first) {
    const auto* a = before.op_as_RopeNode();
    const auto* b = instruction.op_as_RopeNode();
    const bool has_same_options = a != nullptr && b != nullptr && !a->traditional() && !b->traditional() &&
        a->dims() == b->dims() && a->base() == b->base() && a->scale() == b->scale();
    const auto earlier = groups_.find(first - 1);
    const bool is_second = earlier != groups_.end() && earlier->second.op == fb::OpNode::RopeNode;
    if (has_same_options && !is_second && a->freqs() != nullptr && b->freqs() != nullptr && !a->offset()->is_vid() &&
        !b->offset()->is_vid() && a->freqs()->idx() == b->freqs()->idx() &&
        a->offset()->tid()->idx() == b->offset()->tid()->idx() && b->x()->idx() != a->out()->idx() &&
        a->out()->idx() != b->freqs()->idx() && a->out()->idx() != b->offset()->tid()->idx()) {
      groups_[first] = {fb::OpNode::RopeNode, false, {{a, nullptr}, {b, nullptr}}};
    }
  }

  // Notes the constants whose transposes an instruction reads, unless it is a product with the transpose.
  void note_reads_of_transposed(const fb::Instruction& instruction, bool is_product) {
    if (is_control(instruction)) {
      return note_other_readers();
    }
    const auto* product = is_product ? instruction.op_as_AddmmNode() : nullptr;
    for_each_tensor_slot(instruction, [&](const fb::Tid& slot, Access access) {
      const auto found = transposed_.find(slot.idx());
      const bool is_matrix = product != nullptr && &slot == product->mat2();
      if (found != transposed_.end() && access != Access::write && !is_matrix) {
        read_otherwise_.insert(found->second->idx());
      }
    });
  }

  // Notes that instructions of other chains may read the transposes.
  void note_other_readers() {
    for (const auto& [slot, constant] : transposed_) {
      read_otherwise_.insert(constant->idx());
    }
  }

  // After an instruction, the slots that it has written hold other values. A control instruction may have written any
  // slot.
  void forget_written_slots(const fb::Instruction& instruction) {
    if (is_control(instruction)) {
      open_.clear();
      transposed_.clear();
      results_.clear();
      return;
    }
    for_each_tensor_slot(instruction, [&](const fb::Tid& slot, Access access) {
      if (access != Access::read) {
        open_.erase(slot.idx());
        transposed_.erase(slot.idx());
        results_.erase(slot.idx());
      }
    });
    const auto* n = instruction.op_as_TransposeNode();
    const bool is_matrix = n != nullptr && n->perm()->size() == 2 && n->perm()->Get(0) == 1 && n->perm()->Get(1) == 0;
    if (is_matrix && is_constant(n->x())) {
      const uint32_t out = n->out()->idx();
      transposed_[out] = n->x();
      ++transposes_[n->x()->idx()];
      if (out < program_.layout.temps_begin() || outputs_.count(out) > 0) {
        read_otherwise_.insert(n->x()->idx());
      }
    }
  }

  MlxProgram& program_;
  std::set<uint32_t> outputs_; // slots of the outputs of the program
  std::map<uint32_t, uint32_t> transposes_; // how many TransposeNodes a constant has, by slot
  std::set<uint32_t> read_otherwise_; // constants with a transpose that not only products read
  std::map<uint32_t, ProductGroup> groups_; // by the instruction of the first member
  std::map<uint32_t, std::map<Key, uint32_t>> open_; // groups that can get more members, by the slot of x
  std::map<uint32_t, const fb::Tid*> transposed_; // slots that hold the transposed matrix of a constant
  std::map<uint32_t, uint32_t> results_; // slots that hold the result of a member: the group
};

// Checks the product of x with the transposed matrix w, before a kernel computes it.
void check_product(const mx::array& x, const mx::array& w, const Context& c) {
  c.check_product(product_shape(x, batch_shape(w), w.shape(-2)), x.dtype(), x.shape(-1));
}

template <typename Node>
std::vector<cpu::PackedMatrix> packed_matrices(const mx::array& x, const ProductGroup& group, Context& c) {
  std::vector<cpu::PackedMatrix> matrices;
  for (const auto& member : group.members) {
    auto q = read_weights(table_of<Node>(member.node), c);
    check_product(x, q.w, c);
    matrices.push_back({std::move(q.w), std::move(q.scales), std::move(*q.biases), c.packed_weights(member.node)});
  }
  return matrices;
}

using Results = std::optional<std::vector<mx::array>>;

template <typename Node>
Results packed_products(const ProductGroup& group, Context& c,
    Results (*multiply)(const mx::array&, const std::vector<cpu::PackedMatrix>&, int, int, mx::Stream)) {
  const auto& first = table_of<Node>(group.members[0].node);
  const auto& x = c.in(first.x());
  return multiply(x, packed_matrices<Node>(x, group, c), first.group_size(), first.bits(), c.stream);
}

// On a GPU.
Results ropes(const ProductGroup& group, Context& c) {
  std::vector<mx::array> arrays;
  for (const auto& member : group.members) {
    arrays.push_back(rope_operands(table_of<fb::RopeParams>(member.node), c).x);
  }
  const auto& n = table_of<fb::RopeParams>(group.members[0].node);
  const auto [x, offset, freqs] = rope_operands(n, c);
  return n.dims() == x.shape(-1) ? gpu::norm_rope(arrays, n.scale(), offset, *freqs, c.stream) : std::nullopt;
}

// On a GPU. If the results are operands of a kernel for several operations, this kernel computes them from single
// products.
Results products_of_row(const ProductGroup& group, Context& c) {
  std::vector<mx::array> matrices;
  for (const auto& member : group.members) {
    if (table_of<fb::AddmmParams>(member.node).bias() != nullptr) {
      return std::nullopt;
    }
    matrices.push_back(c.in(member.matrix));
  }
  const auto& x = c.in(table_of<fb::AddmmParams>(group.members[0].node).mat1());
  if (!group.feeds_silu) {
    return gpu::products_of_row(x, matrices, c.stream);
  }
  std::vector<mx::array> results;
  for (const auto& w : matrices) {
    const auto y = gpu::products_of_row(x, {w}, c.stream);
    if (!y) {
      return std::nullopt;
    }
    results.push_back((*y)[0]);
  }
  return results;
}

Results products_of_floats(const ProductGroup& group, Context& c) {
  const auto x = c.in(table_of<fb::AddmmParams>(group.members[0].node).mat1());
  std::vector<cpu::RowMatrix> matrices;
  std::vector<mx::Dtype> dtypes;
  for (const auto& member : group.members) {
    const auto& n = table_of<fb::AddmmParams>(member.node);
    matrices.push_back({c.in(member.matrix), c.optional(n.bias()), c.packed_weights(member.node)});
    const auto& [w, bias, panels] = matrices.back();
    if (w.dtype() != x.dtype() || (bias && bias->dtype() != x.dtype())) {
      return std::nullopt;
    }
    check_product(x, w, c);
    dtypes.push_back(bias ? mx::float32 : x.dtype());
  }
  return is_half(x.dtype()) ? cpu::matmuls_half(x, matrices, dtypes, c.stream) : cpu::matmuls(x, matrices, c.stream);
}

const fb::Tid* operand_of(const ProductGroup& group) {
  const void* node = group.members[0].node;
  switch (group.op) {
    case fb::OpNode::QuantizedMatmulNode:
      return table_of<fb::QuantizedMatmulParams>(node).x();
    case fb::OpNode::Int8QuantizedMatmulNode:
      return table_of<fb::Int8QuantizedMatmulParams>(node).x();
    default:
      return table_of<fb::AddmmParams>(node).mat1();
  }
}

Results results_of(const ProductGroup& group, Context& c) {
  if (!cpu::computes_at_once(c.stream)) {
    return products_of_row(group, c);
  }
  switch (group.op) {
    case fb::OpNode::QuantizedMatmulNode:
      return packed_products<fb::QuantizedMatmulParams>(group, c, cpu::quantized_matmuls);
    case fb::OpNode::Int8QuantizedMatmulNode:
      return packed_products<fb::Int8QuantizedMatmulParams>(group, c, cpu::int8_quantized_matmuls);
    default:
      return products_of_floats(group, c);
  }
}

bool has_kernel(const ProductGroup& group, const Context& c) {
  if (gpu::is_cuda(c.stream)) {
    return group.op == fb::OpNode::AddmmNode || group.op == fb::OpNode::RopeNode;
  }
  if (!cpu::computes_at_once(c.stream) || group.op == fb::OpNode::RopeNode) {
    return false;
  }
  return group.members.size() > 1 || c.packed_weights(group.members[0].node).has_value();
}

Results compute(const ProductGroup& group, Context& c) {
  if (!has_kernel(group, c)) {
    return std::nullopt;
  }
  if (group.op == fb::OpNode::RopeNode) {
    return ropes(group, c);
  }
  const auto* slot = operand_of(group);
  c.make_available({slot});
  const auto& x = c.in(slot);
  const bool is_on_cpu = cpu::computes_at_once(c.stream);
  const int64_t most = is_on_cpu ? kMaxRowsOnCpu : kMaxRowsOnGpu;
  const bool is_single = is_on_cpu && group.members.size() == 1;
  const bool has_few_rows = x.ndim() > 0 && x.size() > 0 && (is_single || rows_of(x) <= most);
  return has_few_rows ? results_of(group, c) : std::nullopt;
}

} // namespace

void find_product_groups(MlxProgram& program) {
  GroupFinder finder(program);
  const int64_t init = program.init_chain; // this chain may write constants
  for (size_t i = 0; i < program.chains.size(); ++i) {
    if (static_cast<int64_t>(i) != init) {
      finder.find(program.chains[i], i == program.graph->main_chain_idx());
    }
  }
  finder.finish();
}

Products compute_products(const ProductGroup& group, Context& c) try {
  const auto results = compute(group, c);
  Products products;
  for (size_t i = 0; results && i < results->size(); ++i) {
    products.emplace_back(group.members[i].node, (*results)[i]);
  }
  return products;
} catch (const Failure&) {
  return {}; // the instruction with the invalid operand will fail
}

} // namespace executorch_mlx
