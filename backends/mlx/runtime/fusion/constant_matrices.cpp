// Products with the transpose of a constant.
#include <vector>

#include "fusion/patterns.h"

namespace executorch_mlx {

namespace {

// The constant whose transpose an instruction computes, if it is a TransposeNode of a constant matrix, else null.
const fb::Tid* transposed_constant(const fb::Instruction& instruction, const Layout& layout) {
  const auto* n = instruction.op_as_TransposeNode();
  const bool is_transpose = n != nullptr && n->perm()->size() == 2 && n->perm()->Get(0) == 1 && n->perm()->Get(1) == 0;
  return is_transpose && n->x()->idx() < layout.constants ? n->x() : nullptr;
}

class Finder {
 public:
  Finder(MlxProgram& program, const Dataflow& flow) : program_(program), flow_(flow), products_(flow.size(), 0) {}

  // Sets DecodedInstruction::matrix of the products of a chain.
  void find(size_t chain) {
    auto& instructions = program_.chains[chain].instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      const auto* n = instructions[i].source->op_as_AddmmNode();
      const size_t writer = n != nullptr && has_valid_bias(*n) ? flow_.writer(chain, i, n->mat2()) : Dataflow::kNone;
      if (writer != Dataflow::kNone) {
        instructions[i].matrix = transposed_constant(*instructions[writer].source, program_.layout);
        products_[flow_.read(chain, i, n->mat2())] += instructions[i].matrix != nullptr ? 1 : 0;
      }
    }
  }

  // Sets MlxProgram::only_in_products, after all chains.
  void finish() {
    std::vector<uint32_t> transposes(program_.layout.constants, 0); // that only products use, by constant
    for (size_t chain = 0; chain < program_.chains.size(); ++chain) {
      const auto& instructions = program_.chains[chain].instructions;
      for (size_t i = 0; i < instructions.size(); ++i) {
        if (const auto* constant = transposed_constant(*instructions[i].source, program_.layout)) {
          const uint32_t number = flow_.written(chain, i, instructions[i].source->op_as_TransposeNode()->out());
          const auto& value = flow_.value(number);
          const bool only_in_products = !flow_.escapes(value) && value.reads == products_[number];
          transposes[constant->idx()] += only_in_products ? 1 : 0;
        }
      }
    }
    for (size_t i = 0; i < transposes.size(); ++i) {
      program_.only_in_products[i] = transposes[i] > 0 && transposes[i] == program_.constant_uses[i];
    }
  }

 private:
  // Whether the kernels add the bias, if there is one. Those of a GPU add none.
  bool has_valid_bias(const fb::AddmmParams& n) const {
    const auto* bias = n.bias();
    const bool is_valid = bias == nullptr ||
        (program_.device == mx::Device::cpu && bias->idx() < program_.layout.constants && n.beta() == 1.0f);
    return is_valid && n.alpha() == 1.0f;
  }

  MlxProgram& program_;
  const Dataflow& flow_;
  std::vector<uint32_t> products_; // by value: how many products multiply by it
};

} // namespace

void find_constant_matrices(MlxProgram& program, const Dataflow& flow) {
  Finder finder(program, flow);
  for (size_t i = 0; i < program.chains.size(); ++i) {
    if (static_cast<int64_t>(i) != program.init_chain) { // this chain may write constants
      finder.find(i);
    }
  }
  finder.finish();
}

} // namespace executorch_mlx
