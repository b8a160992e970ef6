#include "program/packed_weights.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/cpu_kernels.h"
#include "error.h"
#include "memory/host_memory.h"
#include "memory/limit.h"
#include "memory/mapped_files.h"
#include "ops/quant.h"

namespace executorch_mlx {

namespace {

constexpr size_t kCacheLine = 64;

uintptr_t address_of(const mx::array& x) { return reinterpret_cast<uintptr_t>(x.data<void>()); }

// The constant weights of a product, which a packed copy can replace.
struct Weights {
  std::vector<mx::array> constants;
  std::vector<uint32_t> slots; // of the constants
  std::string format; // equal for weights whose copies are equal
  size_t size; // of the copy, a multiple of kCacheLine
  std::function<void(mx::array&)> pack; // writes the copy
};

size_t whole_lines(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

// Returns the weights of a node if they can be packed.
template <typename Node>
std::optional<Weights> quantized_weights(
    const Node& n, const MlxProgram& program, const State& state, mx::Stream stream) {
  for (const auto* slot : {n.w(), n.scales(), n.biases()}) {
    if (slot == nullptr || slot->idx() >= program.layout.constants) {
      return std::nullopt;
    }
  }
  const auto constant = [&](const fb::Tid* slot) { return *state.tensors[slot->idx()]; };
  const int group_size = n.group_size(), bits = n.bits();
  try {
    auto q = checked_weights(n, {constant(n.w()), constant(n.scales()), constant(n.biases())});
    cpu::PackedMatrix matrix{std::move(q.w), std::move(q.scales), std::move(*q.biases)};
    auto panels = cpu::integer_panels(matrix, group_size, bits, stream);
    if (!panels) {
      return std::nullopt;
    }
    return Weights{{matrix.w, matrix.scales, matrix.biases}, {n.w()->idx(), n.scales()->idx(), n.biases()->idx()},
        str(group_size, " ", bits), whole_lines(panels->size), std::move(panels->pack)};
  } catch (const Failure&) {
    return std::nullopt; // the instruction will fail
  }
}

// The same for a matrix of floats. It is packed only if the copy can take its place: no other instruction reads the
// matrix, and it is in a mapped file.
std::optional<Weights> float_weights(
    const fb::Tid* matrix, const MlxProgram& program, const State& state, const MappedFiles& files, mx::Stream stream) {
  const auto& w = *state.tensors[matrix->idx()];
  auto panels = program.only_in_products[matrix->idx()] ? cpu::panels(w, stream) : std::nullopt;
  if (!panels || files.release(w.data<void>(), w.nbytes()) == 0) {
    return std::nullopt;
  }
  return Weights{{w}, {matrix->idx()}, "floats", whole_lines(panels->size), std::move(panels->pack)};
}

// A product whose kernel reads packed weights.
struct PackedNode {
  const void* node;
  Weights weights;
  std::string key;
};

// Identifies weights among those of all methods of the program, which share constants. Constants of different shapes or
// dtypes may have the same address, because a file stores equal bytes once.
std::string key_of(const Weights& weights) {
  std::string key = weights.format;
  for (const auto& x : weights.constants) {
    key += str(" ", address_of(x), " ", describe(x));
  }
  return key;
}

std::optional<Weights> weights_of(
    const fb::Instruction& instruction, const MlxProgram& program, const State& state, mx::Stream stream) {
  if (const auto* n = instruction.op_as_Int8QuantizedMatmulNode()) {
    return quantized_weights(*n, program, state, stream);
  }
  const auto* n = instruction.op_as_QuantizedMatmulNode();
  if (n == nullptr || !n->transpose() || n->mode()->string_view() != "affine") {
    return std::nullopt;
  }
  auto weights = quantized_weights(*n, program, state, stream);
  const int k = weights ? weights->constants[0].shape(-1) * 32 / n->bits() : 0;
  return weights && cpu::has_fast_integers(n->bits(), n->group_size(), k) ? std::move(weights) : std::nullopt;
}

std::vector<PackedNode> packed_nodes(
    const MlxProgram& program, const State& state, const MappedFiles& files, mx::Stream stream) {
  std::vector<PackedNode> nodes;
  const auto add = [&](const void* node, std::optional<Weights> weights) {
    if (weights) {
      auto key = key_of(*weights);
      nodes.push_back({node, std::move(*weights), std::move(key)});
    }
  };
  if (program.init_chain >= 0) {
    return nodes;
  }
  for (const auto& chain : program.chains) {
    for (const auto& instruction : chain.instructions) {
      add(instruction.node, weights_of(*instruction.source, program, state, stream));
    }
    for (const auto& group : chain.product_groups) {
      for (const auto& member : group.members) {
        if (group.op == fb::OpNode::AddmmNode) {
          add(member.node, float_weights(member.matrix, program, state, files, stream));
        }
      }
    }
  }
  return nodes;
}

// Notes that an instruction reads a constant as it is. If the constant was released, it counts as active memory again.
void read_in_place(const mx::array& constant, SharedData& shared) {
  shared.read_in_place.insert(constant.data<void>());
  const auto released = shared.released_constants.find(str(address_of(constant)));
  if (released != nullptr && released->bytes) {
    check_memory([] { return "constants"; }, constant.nbytes());
    released->bytes.reset();
  }
}

// How often instructions read some rows of each constant.
std::vector<uint32_t> reads_of_rows(const MlxProgram& program) {
  std::vector<uint32_t> reads(program.layout.constants, 0);
  for (const auto& chain : program.chains) {
    for (const auto& instruction : chain.instructions) {
      const auto* n = instruction.source->op_as_TakeNode();
      if (n != nullptr && n->x()->idx() < reads.size() && n->axis() == 0) {
        ++reads[n->x()->idx()];
      }
    }
  }
  return reads;
}

// Calls read_in_place() for all constants that instructions other than `nodes` use. Adds those to State::partly_read
// that `nodes` use, too, and of which the other instructions read some rows only.
void read_other_constants(const std::vector<PackedNode>& nodes, const MlxProgram& program, const MappedFiles& files,
    SharedData& shared, State& state) {
  auto uses = program.constant_uses;
  for (const auto& node : nodes) {
    for (const uint32_t slot : node.weights.slots) {
      uses[slot] = program.only_in_products[slot] ? 0 : uses[slot] - 1;
    }
  }
  const auto rows = reads_of_rows(program);
  for (uint32_t slot = 0; slot < uses.size(); ++slot) {
    if (uses[slot] == 0) {
      continue;
    }
    const mx::array& x = *state.tensors[slot];
    read_in_place(x, shared);
    const bool is_packed = uses[slot] < program.constant_uses[slot];
    const auto pages = is_packed && uses[slot] == rows[slot] ? files.pages(x.data<void>(), x.nbytes()) : std::nullopt;
    if (pages) {
      state.partly_read.emplace(slot, *pages);
    }
  }
}

// Releases the pages of the constants that only packed copies like that of `weights` replace.
std::vector<std::shared_ptr<ReleasedConstant>> release(
    const Weights& weights, const MappedFiles& files, SharedData& shared) {
  std::vector<std::shared_ptr<ReleasedConstant>> result;
  for (const auto& x : weights.constants) {
    if (shared.read_in_place.count(x.data<void>()) > 0) {
      continue;
    }
    auto released = shared.released_constants.find(str(address_of(x)));
    if (released == nullptr) {
      released = std::make_shared<ReleasedConstant>(x);
      released->bytes.emplace(files.release(x.data<void>(), x.nbytes()));
      shared.released_constants.put(str(address_of(x)), released);
    }
    result.push_back(std::move(released));
  }
  return result;
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
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE); // may be refused
  }
#endif
  return block;
}

// The array of `size` bytes at `offset` of a block, in the same memory.
mx::array part_of(const mx::array& block, size_t offset, size_t size) {
  mx::array part = without_memory({static_cast<int>(size / kCacheLine), kCacheLine}, mx::uint8);
  part.copy_shared_buffer(block, {kCacheLine, 1}, block.flags(), size, static_cast<int64_t>(offset));
  return part;
}

// The active memory up to which weights are packed: a quarter of the free memory is left for calls.
size_t limit_of_packing() {
  const size_t active = active_memory(), limit = memory_limit();
  return has_memory_limit() && active < limit ? limit - (limit - active) / 4 : limit;
}

} // namespace

void pack_weights(
    const MlxProgram& program, const MappedFiles& files, SharedData& shared, State& state, mx::Stream stream) {
  if (!cpu::computes_at_once(stream)) {
    return;
  }
  const auto nodes = packed_nodes(program, state, files, stream);
  read_other_constants(nodes, program, files, shared, state);
  if (nodes.empty()) {
    return;
  }
  struct NewWeights {
    const Weights* weights;
    size_t offset;
    std::vector<std::shared_ptr<ReleasedConstant>> released;
  };
  std::map<std::string, std::optional<NewWeights>> chosen; // empty if there is no room for the copy
  const size_t limit = limit_of_packing();
  size_t bytes = 0;
  for (const auto& node : nodes) {
    if (chosen.count(node.key) > 0 || shared.packed_weights.find(node.key) != nullptr) {
      continue;
    }
    auto released = release(node.weights, files, shared);
    const size_t needed = bytes + node.weights.size;
    const bool has_room = !has_memory_limit() || active_memory() + needed + kCacheLine <= limit;
    chosen[node.key] = has_room ? std::optional(NewWeights{&node.weights, bytes, std::move(released)}) : std::nullopt;
    bytes = has_room ? needed : bytes;
  }
  std::map<std::string, std::shared_ptr<const PackedWeights>> packed; // keeps new copies until `state` has them
  if (bytes > 0) {
    const auto block = allocate_block(bytes);
    const auto begin = address_of(block);
    const size_t first = (begin + kCacheLine - 1) / kCacheLine * kCacheLine - begin;
    for (auto& [key, added] : chosen) {
      if (!added) {
        continue;
      }
      auto panels = part_of(block, first + added->offset, added->weights->size);
      added->weights->pack(panels);
      for (const auto& x : added->weights->constants) {
        files.release(x.data<void>(), x.nbytes());
      }
      packed[key] = std::make_shared<const PackedWeights>(PackedWeights{std::move(panels), std::move(added->released)});
      shared.packed_weights.put(key, packed[key]);
    }
  }
  for (const auto& node : nodes) {
    if (auto found = shared.packed_weights.find(node.key)) {
      state.packed_weights.emplace(node.node, std::move(found));
      continue;
    }
    for (const uint32_t slot : node.weights.slots) {
      read_in_place(*state.tensors[slot], shared);
      state.partly_read.erase(slot);
    }
  }
}

} // namespace executorch_mlx
