#include "packed_weights.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cpu/accelerate.h"
#include "error.h"
#include "host_memory.h"
#include "mapped_files.h"
#include "memory_limit.h"
#include "ops/quant.h"

namespace executorch_mlx {

namespace {

constexpr size_t kCacheLine = 64;

struct Weights {
  cpu::PackedMatrix matrix;
  int group_size;
  int bits;
  size_t size;  // of the packed copy, a multiple of kCacheLine
};

// Returns the weights of a node if they can be packed.
template <typename Node>
std::optional<Weights> weights_of(const Node& n, const Program& program, const State& state, mx::Stream stream) {
  for (const auto* slot : {n.w(), n.scales(), n.biases()}) {
    if (slot == nullptr || slot->idx() >= program.layout.constants) {
      return std::nullopt;
    }
  }
  const auto constant = [&](const fb::Tid* slot) { return *state.tensors[slot->idx()]; };
  try {
    auto q = checked_weights(n, {constant(n.w()), constant(n.scales()), constant(n.biases())});
    Weights result{{std::move(q.w), std::move(q.scales), std::move(*q.biases)}, n.group_size(), n.bits(), 0};
    const auto size = cpu::integer_panels_size(result.matrix, n.group_size(), n.bits(), stream);
    if (!size) {
      return std::nullopt;
    }
    result.size = (*size + kCacheLine - 1) / kCacheLine * kCacheLine;
    return result;
  } catch (const Failure&) {
    return std::nullopt;  // the instruction will fail
  }
}

// A product whose kernel reads packed weights.
struct PackedNode {
  const void* node;
  Weights weights;
};

std::optional<PackedNode> packed_node(
    const fb::Instruction& instruction, const Program& program, const State& state, mx::Stream stream) {
  std::optional<Weights> weights;
  if (const auto* n = instruction.op_as_Int8QuantizedMatmulNode()) {
    weights = weights_of(*n, program, state, stream);
  } else if (const auto* n = instruction.op_as_QuantizedMatmulNode()) {
    if (n->transpose() && n->mode()->string_view() == "affine") {
      weights = weights_of(*n, program, state, stream);
    }
    const int k = weights ? weights->matrix.w.shape(-1) * 32 / n->bits() : 0;
    if (weights && !cpu::has_fast_integers(n->bits(), n->group_size(), k)) {
      return std::nullopt;
    }
  }
  return weights ? std::optional(PackedNode{instruction.op(), std::move(*weights)}) : std::nullopt;
}

// Identifies the weights of a node among those of all methods of the program, which share constants.
std::string key_of(const Weights& weights) {
  const auto& m = weights.matrix;
  const auto address = [](const mx::array& x) { return reinterpret_cast<uintptr_t>(x.data<void>()); };
  return str(
      address(m.w), " ", address(m.scales), " ", address(m.biases), " ", weights.group_size, " ", weights.bits);
}

// One block of memory for all copies, on large pages: with small pages, the processor reads it more slowly.
mx::array allocate_block(size_t bytes) {
  auto block = allocate({static_cast<int>((bytes + kCacheLine) / kCacheLine), kCacheLine}, mx::uint8);
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(block.data<void>());
  const auto first = (begin + kPage - 1) / kPage * kPage;
  const auto last = (begin + block.nbytes()) / kPage * kPage;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // may be refused
  }
#endif
  return block;
}

// The array of `size` bytes at `offset` of a block, in the same memory.
mx::array part_of(const mx::array& block, size_t offset, size_t size) {
  const mx::Shape shape{static_cast<int>(size / kCacheLine), kCacheLine};
  mx::array part(mx::allocator::Data(mx::allocator::Buffer(nullptr), nullptr), shape, mx::uint8);
  part.copy_shared_buffer(block, {kCacheLine, 1}, block.flags(), size, static_cast<int64_t>(offset));
  return part;
}

} // namespace

void pack_weights(const Program& program, SharedData& shared, State& state, mx::Stream stream) {
  if (!cpu::computes_at_once(stream) || program.graph->init_chain_idx() >= 0) {
    return;
  }
  std::map<std::string, Weights> new_weights;
  std::vector<std::pair<const void*, std::string>> nodes;
  size_t bytes = 0;
  for (const auto& chain : program.chains) {
    for (const auto& instruction : chain.instructions) {
      auto product = packed_node(*instruction.source, program, state, stream);
      if (!product) {
        continue;
      }
      const auto key = key_of(product->weights);
      if (auto packed = shared.packed_weights.find(key)) {
        state.packed_weights.emplace(product->node, std::move(packed));
        continue;
      }
      nodes.emplace_back(product->node, key);
      const size_t size = product->weights.size;
      bytes += new_weights.emplace(key, std::move(product->weights)).second ? size : 0;
    }
  }
  const bool has_room = !has_memory_limit() || active_memory() + bytes + kCacheLine <= memory_limit();
  if (bytes == 0 || !has_room) {
    return;
  }
  const MappedFiles files;
  const auto block = allocate_block(bytes);
  const auto begin = reinterpret_cast<uintptr_t>(block.data<void>());
  size_t offset = (begin + kCacheLine - 1) / kCacheLine * kCacheLine - begin;
  std::map<std::string, std::shared_ptr<const mx::array>> packed;
  for (const auto& [key, weights] : new_weights) {
    auto part = part_of(block, offset, weights.size);
    const auto& m = weights.matrix;
    cpu::pack_integer_panels(m, weights.group_size, weights.bits, part);
    for (const auto& x : {m.w, m.scales, m.biases}) {
      files.release(x.data<void>(), x.nbytes());
    }
    offset += weights.size;
    packed[key] = std::make_shared<const mx::array>(std::move(part));
    shared.packed_weights.put(key, packed[key]);
  }
  for (const auto& [node, key] : nodes) {
    state.packed_weights.emplace(node, packed[key]);
  }
}

} // namespace executorch_mlx
