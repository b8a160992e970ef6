#include "fusion/quantized_embedding.h"

#include <memory>

#include "fusion/patterns.h"
#include "gpu/fused.h"
#include "ops/index.h"

namespace executorch_mlx {

namespace {

const fb::TakeParams* row_of_constant(const MlxProgram& program, const fb::Instruction& instruction) {
  const auto* n = instruction.op_as_TakeNode();
  const bool fits =
      n != nullptr && n->axis() == 0 && n->index()->kind() == 2 && n->x()->idx() < program.layout.constants;
  return fits ? n : nullptr;
}

// Whether only instruction `reader` reads what instruction `writer` writes to a slot, and reads it from there.
bool is_passed(
    const Dataflow& flow, size_t chain, size_t writer, const fb::Tid* written, size_t reader, const fb::Tid* read) {
  const auto& value = flow.value(flow.written(chain, writer, written));
  return written->idx() == read->idx() && flow.writer(chain, reader, read) == writer && value.reads == 1 &&
      !flow.escapes(value);
}

} // namespace

bool QuantizedEmbedding::run(Context& c) const {
  const auto& indices = c.in(w_.index()->tid());
  const gpu::Matrix table(c.in(w_.x()), c.in(scales_.x()), c.in(biases_.x()), numbers_.group_size(), numbers_.bits());
  if (table.scales->dtype() != dtype_of(result_.scalar_type())) {
    return false;
  }
  if (is_on_host(indices)) {
    bounded_indices(indices, table.w.shape(0), c);
  }
  const auto y = gpu::embedding(table, indices, c.stream);
  if (y) {
    c.set(result_.out(), *y);
  }
  return y.has_value();
}

void find_quantized_embeddings(MlxProgram& program, const Dataflow& flow) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    auto& instructions = program.chains[chain].instructions;
    for (size_t i = 0; i + QuantizedEmbedding::kLength <= instructions.size(); ++i) {
      const auto source = [&](size_t j) -> const fb::Instruction& { return *instructions[i + j].source; };
      const auto* w = row_of_constant(program, source(0));
      const auto* scales = row_of_constant(program, source(1));
      const auto* biases = row_of_constant(program, source(2));
      const auto* wide_scales = source(3).op_as_AsTypeNode();
      const auto* wide_biases = source(4).op_as_AsTypeNode();
      const auto* numbers = source(5).op_as_DequantizeNode();
      const auto* result = source(6).op_as_AsTypeNode();
      if (w == nullptr || scales == nullptr || biases == nullptr || wide_scales == nullptr || wide_biases == nullptr ||
          numbers == nullptr || result == nullptr || numbers->biases() == nullptr ||
          numbers->mode()->string_view() != "affine" || numbers->global_scale() != nullptr) {
        continue;
      }
      const auto passes = [&](size_t writer, const fb::Tid* written, size_t reader, const fb::Tid* read) {
        return is_passed(flow, chain, i + writer, written, i + reader, read);
      };
      const auto index = [](const fb::TakeParams* n) { return n->index()->tid()->idx(); };
      const auto is_float32 = [](int8_t type) { return dtype_of(type) == mx::float32; };
      if (index(scales) == index(w) && index(biases) == index(w) && is_float32(wide_scales->scalar_type()) &&
          is_float32(wide_biases->scalar_type()) && passes(0, w->out(), 5, numbers->w()) &&
          passes(1, scales->out(), 3, wide_scales->x()) && passes(2, biases->out(), 4, wide_biases->x()) &&
          passes(3, wide_scales->out(), 5, numbers->scales()) && passes(4, wide_biases->out(), 5, numbers->biases()) &&
          passes(5, numbers->out(), 6, result->x())) {
        instructions[i].fused = std::make_unique<QuantizedEmbedding>(*w, *scales, *biases, *numbers, *result);
      }
    }
  }
}

} // namespace executorch_mlx
