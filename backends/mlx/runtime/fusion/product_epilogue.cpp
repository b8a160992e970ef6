#include "fusion/product_epilogue.h"

#include <map>
#include <memory>
#include <utility>

#include "call/context.h"
#include "dtype.h"
#include "fusion/patterns.h"
#include "ops/linalg.h"

namespace executorch_mlx {

namespace {

// What an instruction does with a product, or nullptr if no kernel does it.
std::unique_ptr<ProductEpilogue> epilogue_of(
    const DecodedInstruction& decoded, const Dataflow& flow, size_t chain, size_t i, uint32_t product) {
  const auto& instruction = *decoded.source;
  auto epilogue = std::make_unique<ProductEpilogue>(decoded.list_elements);
  const auto is_product = [&](const fb::Tid* slot) { return flow.read(chain, i, slot) == product; };
  const auto apply = [&](Elementwise activation, const fb::Tid* x, const fb::Tid* out) {
    epilogue->activation = activation;
    epilogue->out = out;
    return is_product(x) ? std::move(epilogue) : nullptr;
  };
  const auto combine = [&](Elementwise activation, const auto& n) {
    epilogue->other = is_product(n.a()) ? n.b() : n.a();
    return apply(activation, is_product(n.a()) ? n.a() : n.b(), n.out());
  };
  if (const auto* n = instruction.op_as_GeluNode()) {
    const auto form = n->approximate()->string_view();
    const auto activation = form == "none" ? Elementwise::gelu : Elementwise::gelu_tanh;
    return form == "none" || form == "tanh" ? apply(activation, n->x(), n->out()) : nullptr;
  }
  if (const auto* n = instruction.op_as_SiluNode()) {
    return apply(Elementwise::silu, n->x(), n->out());
  }
  if (const auto* n = instruction.op_as_MaximumNode()) {
    return combine(Elementwise::maximum, *n);
  }
  const auto* n = instruction.op_as_AddNode();
  return n == nullptr ? nullptr : combine(Elementwise::copy, *n);
}

const fb::AddmmParams& table_of(const DecodedInstruction& product) {
  return *static_cast<const fb::AddmmParams*>(product.node);
}

} // namespace

bool ProductEpilogue::run(Context& c) const try {
  const auto& n = table_of(*product);
  c.make_available({n.mat1(), other});
  const auto& x = c.in(n.mat1());
  const auto& w = c.in(product->matrix);
  const auto bias = c.optional(n.bias());
  if (x.ndim() == 0 || x.size() == 0 || x.shape(-1) != w.shape(-1) || (other != nullptr && !c.slot(other))) {
    return false;
  }
  const auto shape = product_shape(x, batch_shape(w), w.shape(-2));
  const bool adds = other != nullptr && activation == Elementwise::copy;
  if (other != nullptr && !(adds ? c.in(other).shape() == shape : is_float_zero(c.in(other)))) {
    return false;
  }
  c.check_product(shape, x.dtype(), x.shape(-1));
  cpu::RowMatrix matrix{w, bias, c.packed_weights(*product)};
  matrix.activation = activation;
  matrix.residual = adds ? std::optional(c.in(other)) : std::nullopt;
  auto y = cpu::matmuls(x, {std::move(matrix)}, c.stream);
  if (!y) {
    return false;
  }
  c.expect_product(shape, x.dtype(), x.shape(-1));
  c.count_operations((*y)[0].size(), other == nullptr ? 1 : 2);
  c.set(out, std::move((*y)[0]));
  return true;
} catch (const Failure&) {
  return false; // the instruction with the invalid operand will fail
}

// Leaves products of the same value, and those of half precision, to the product groups.
void find_product_epilogues(MlxProgram& program, const Dataflow& flow) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    if (static_cast<int64_t>(chain) == program.init_chain) { // this chain may write constants
      continue;
    }
    auto& instructions = program.chains[chain].instructions;
    std::map<uint32_t, int> products; // by the value that they multiply
    for (size_t i = 0; i < instructions.size(); ++i) {
      if (instructions[i].matrix != nullptr) {
        ++products[flow.read(chain, i, table_of(instructions[i]).mat1())];
      }
    }
    for (size_t i = 0; i + 1 < instructions.size(); ++i) {
      auto& first = instructions[i];
      auto& second = instructions[i + 1];
      if (first.matrix == nullptr || first.fused || second.fused ||
          dtype_of(program.meta(first.matrix->idx()).scalar_type()) != mx::float32) {
        continue;
      }
      const auto& n = table_of(first);
      const uint32_t number = flow.written(chain, i, n.out());
      const auto& value = flow.value(number);
      if (value.reads != 1 || flow.escapes(value) || products[flow.read(chain, i, n.mat1())] > 1) {
        continue;
      }
      if (auto epilogue = epilogue_of(second, flow, chain, i + 1, number)) {
        epilogue->product = &first;
        first.fused = std::move(epilogue);
      }
    }
  }
}

} // namespace executorch_mlx
