#include "fusion/product_group.h"

#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "fusion/patterns.h"
#include "gpu/fused.h"
#include "ops/linalg.h"
#include "ops/quant.h"

namespace executorch_mlx {

namespace {

// The largest number of rows of x. The products of a prompt share the preparation of x. The limit bounds the memory of
// the results, which are computed early.
constexpr int64_t kMaxRowsOnCpu = 4096;
constexpr size_t kMaxMembers = 8;

template <typename Table>
const Table& table_of(const DecodedInstruction& member) {
  return *static_cast<const Table*>(member.node);
}

class GroupFinder {
 public:
  GroupFinder(MlxProgram& program, const Dataflow& flow)
      : program_(program), flow_(flow), on_cpu_(program.device == mx::Device::cpu) {}

  void find(size_t chain) {
    auto& instructions = program_.chains[chain].instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      if (const auto product = product_of(chain, i)) {
        add(*product, chain, i);
      }
    }
    for (auto& [first, group] : groups_) {
      if (group->members.size() > 1 || !on_cpu_) {
        for (const auto* member : group->members) {
          instructions[member - instructions.data()].early = program_.layout.add_held();
        }
        instructions[first].fused = std::move(group);
      }
    }
    groups_.clear();
    open_.clear();
  }

 private:
  // What the members of a group have in common: the value of x, op, group size and bits.
  using Key = std::tuple<uint32_t, fb::OpNode, int, int>;

  bool is_constant(const fb::Tid* slot) const { return slot != nullptr && slot->idx() < program_.layout.constants; }

  // Returns nullopt if an instruction is no product for a group.
  std::optional<Key> product_of(size_t chain, size_t i) const {
    const auto& decoded = program_.chains[chain].instructions[i];
    const auto& instruction = *decoded.source;
    if (decoded.fused != nullptr) {
      return std::nullopt;
    }
    if (const auto* n = instruction.op_as_AddmmNode()) {
      return decoded.matrix == nullptr
          ? std::nullopt
          : std::optional(Key(flow_.read(chain, i, n->mat1()), fb::OpNode::AddmmNode, 0, 0));
    }
    if (const auto* n = instruction.op_as_QuantizedMatmulNode()) {
      const bool fits = n->transpose() && n->mode()->string_view() == "affine";
      return fits ? quantized_product(*n, chain, i) : std::nullopt;
    }
    const auto* n = instruction.op_as_Int8QuantizedMatmulNode();
    return n != nullptr ? quantized_product(*n, chain, i) : std::nullopt;
  }

  template <typename Node>
  std::optional<Key> quantized_product(const Node& n, size_t chain, size_t i) const {
    const auto& decoded = program_.chains[chain].instructions[i];
    const bool fits = on_cpu_ ? is_constant(n.w()) && is_constant(n.scales()) && is_constant(n.biases())
                              : ProductOperands::of(program_, decoded).has_value();
    if (!fits) {
      return std::nullopt;
    }
    const auto op = decoded.source->op_type();
    return Key(flow_.read(chain, i, n.x()), op, n.group_size(), n.bits());
  }

  // Adds a product to a group that is open, or to a new one.
  void add(const Key& key, size_t chain, size_t i) {
    const auto [found, is_new] = open_.emplace(key, i);
    if (!is_new && groups_[found->second]->members.size() == kMaxMembers) {
      found->second = i;
    }
    auto& group = groups_[found->second];
    if (group == nullptr) {
      group = std::make_unique<ProductGroup>();
      group->op = std::get<fb::OpNode>(key);
      if (!on_cpu_) {
        group->norm = VectorNorm::find(program_, flow_, chain, std::get<0>(key));
      }
    }
    group->members.push_back(&program_.chains[chain].instructions[i]);
  }

  MlxProgram& program_;
  const Dataflow& flow_;
  const bool on_cpu_;
  // Of the present chain:
  std::map<size_t, std::unique_ptr<ProductGroup>> groups_; // by the instruction of the first member
  std::map<Key, size_t> open_; // groups that can get more members
};

template <typename Node>
std::vector<cpu::PackedMatrix> packed_matrices(const mx::array& x, const ProductGroup& group, Context& c) {
  std::vector<cpu::PackedMatrix> matrices;
  for (const auto* member : group.members) {
    auto q = read_weights(table_of<Node>(*member), c);
    check_transposed_product(x, q.w, c);
    matrices.push_back({std::move(q.w), std::move(q.scales), std::move(*q.biases), c.packed_weights(*member)});
  }
  return matrices;
}

using Results = std::optional<std::vector<mx::array>>;

template <typename Node>
Results packed_products(const ProductGroup& group, Context& c,
    Results (*multiply)(const mx::array&, const std::vector<cpu::PackedMatrix>&, int, int, mx::Stream)) {
  const auto& first = table_of<Node>(*group.members[0]);
  const auto& x = c.in(first.x());
  return multiply(x, packed_matrices<Node>(x, group, c), first.group_size(), first.bits(), c.stream);
}

Results products_on_gpu(const ProductGroup& group, const mx::array& x, Context& c) {
  std::vector<gpu::Matrix> matrices;
  for (const auto* member : group.members) {
    const ProductOperands operands{nullptr, member->matrix, member->source->op_as_QuantizedMatmulNode()};
    matrices.push_back(operands.weights(c));
  }
  return gpu::products_of_row(vectors_of(x, group.norm, c), matrices, c.stream);
}

const fb::Tid* operand_of(const ProductGroup& group) {
  const auto& first = *group.members[0];
  switch (group.op) {
    case fb::OpNode::QuantizedMatmulNode:
      return table_of<fb::QuantizedMatmulParams>(first).x();
    case fb::OpNode::Int8QuantizedMatmulNode:
      return table_of<fb::Int8QuantizedMatmulParams>(first).x();
    default:
      return table_of<fb::AddmmParams>(first).mat1();
  }
}

Results results_on_cpu(const ProductGroup& group, Context& c) {
  switch (group.op) {
    case fb::OpNode::QuantizedMatmulNode:
      return packed_products<fb::QuantizedMatmulParams>(group, c, cpu::quantized_matmuls);
    case fb::OpNode::Int8QuantizedMatmulNode:
      return packed_products<fb::Int8QuantizedMatmulParams>(group, c, cpu::int8_quantized_matmuls);
    default:
      return products_by_constants(group.members, c);
  }
}

} // namespace

std::optional<std::vector<mx::array>> ProductGroup::compute(Context& c) const {
  const bool on_cpu = c.stream.device == mx::Device::cpu;
  const auto* slot = operand_of(*this);
  c.make_available({slot});
  const auto& x = c.in(slot);
  if (x.ndim() == 0 || x.size() == 0 || rows_of(x) > (on_cpu ? kMaxRowsOnCpu : kMaxRowsOnGpu)) {
    return std::nullopt;
  }
  return on_cpu ? results_on_cpu(*this, c) : products_on_gpu(*this, x, c);
}

bool ProductGroup::run(Context& c) const try {
  const auto results = compute(c);
  for (size_t i = 0; results && i < results->size(); ++i) {
    c.set_early(*members[i], (*results)[i]);
  }
  return false;
} catch (const Failure&) {
  return false; // the instruction with the invalid operand will fail
}

void find_product_groups(MlxProgram& program, const Dataflow& flow) {
  GroupFinder finder(program, flow);
  for (size_t i = 0; i < program.chains.size(); ++i) {
    if (static_cast<int64_t>(i) != program.init_chain) { // this chain may write constants
      finder.find(i);
    }
  }
}

} // namespace executorch_mlx
