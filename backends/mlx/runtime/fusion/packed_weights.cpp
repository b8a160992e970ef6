#include "fusion/packed_weights.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
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
#include "mlx_internals/arrays.h"
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
struct Product {
  DecodedInstruction* instruction;
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

std::vector<Product> products_with_panels(
    MlxProgram& program, const State& state, const MappedFiles& files, mx::Stream stream) {
  std::vector<Product> products;
  const auto add = [&](DecodedInstruction& instruction, std::optional<Weights> weights) {
    if (weights) {
      auto key = key_of(*weights);
      products.push_back({&instruction, std::move(*weights), std::move(key)});
    }
  };
  if (program.init_chain >= 0) {
    return products;
  }
  for (auto& chain : program.chains) {
    for (auto& instruction : chain.instructions) {
      add(instruction, weights_of(*instruction.source, program, state, stream));
      if (instruction.matrix != nullptr) {
        add(instruction, float_weights(instruction.matrix, program, state, files, stream));
      }
    }
  }
  return products;
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

// Calls visit(instruction, slot) with each instruction that reads some rows of a constant.
template <typename Program, typename Visit>
void for_each_read_of_rows(Program& program, Visit&& visit) {
  for (auto& chain : program.chains) {
    for (auto& instruction : chain.instructions) {
      const auto* n = instruction.source->op_as_TakeNode();
      if (n != nullptr && n->x()->idx() < program.layout.constants && n->axis() == 0) {
        visit(instruction, n->x()->idx());
      }
    }
  }
}

// By slot, the constants that packed weights replace in products, and of which other instructions read some rows, as of
// an embedding. The pages of these rows are released at once, so that they do not add up to the whole constant.
using PartlyRead = std::map<uint32_t, std::shared_ptr<const FilePages>>;

// Calls read_in_place() for all constants that instructions other than `products` use. Returns those that `products`
// use, too, and of which the other instructions read some rows only.
PartlyRead read_other_constants(const std::vector<Product>& products, const MlxProgram& program,
    const MappedFiles& files, SharedData& shared, const State& state) {
  PartlyRead partly_read;
  auto uses = program.constant_uses;
  for (const auto& product : products) {
    for (const uint32_t slot : product.weights.slots) {
      uses[slot] = program.only_in_products[slot] ? 0 : uses[slot] - 1;
    }
  }
  std::vector<uint32_t> rows(uses.size(), 0);
  for_each_read_of_rows(program, [&](const DecodedInstruction&, uint32_t slot) { ++rows[slot]; });
  for (uint32_t slot = 0; slot < uses.size(); ++slot) {
    if (uses[slot] == 0) {
      continue;
    }
    const mx::array& x = *state.tensors[slot];
    read_in_place(x, shared);
    const bool is_packed = uses[slot] < program.constant_uses[slot];
    const auto pages = is_packed && uses[slot] == rows[slot] ? files.pages(x.data<void>(), x.nbytes()) : std::nullopt;
    if (pages) {
      partly_read.emplace(slot, std::make_shared<const FilePages>(*pages));
    }
  }
  return partly_read;
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
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(block.data<void>());
  const auto first = (begin + page - 1) / page * page;
  const auto last = (begin + block.nbytes()) / page * page;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE); // may be refused
  }
#endif
  return block;
}

// The array of `size` bytes at `offset` of a block, in the same memory.
mx::array part_of(const mx::array& block, size_t offset, size_t size) {
  const mx::Shape shape{static_cast<int>(size / kCacheLine), kCacheLine};
  return internals::view(block, shape, {kCacheLine, 1}, static_cast<int64_t>(offset));
}

// The active memory up to which weights are packed: a quarter of the free memory is left for calls.
size_t limit_of_packing() {
  const size_t active = active_memory(), limit = memory_limit();
  return has_memory_limit() && active < limit ? limit - (limit - active) / 4 : limit;
}

} // namespace

void pack_weights(
    MlxProgram& program, const MappedFiles& files, SharedData& shared, const State& state, mx::Stream stream) {
  if (!cpu::computes_at_once(stream)) {
    return;
  }
  const auto products = products_with_panels(program, state, files, stream);
  auto partly_read = read_other_constants(products, program, files, shared, state);
  if (products.empty()) {
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
  for (const auto& product : products) {
    if (chosen.count(product.key) > 0 || shared.packed_weights.find(product.key) != nullptr) {
      continue;
    }
    auto released = release(product.weights, files, shared);
    const size_t needed = bytes + product.weights.size;
    const bool has_room = !has_memory_limit() || active_memory() + needed + kCacheLine <= limit;
    chosen[product.key] =
        has_room ? std::optional(NewWeights{&product.weights, bytes, std::move(released)}) : std::nullopt;
    bytes = has_room ? needed : bytes;
  }
  std::map<std::string, std::shared_ptr<const PackedWeights>> packed; // keeps new copies until the program has them
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
  for (const auto& product : products) {
    product.instruction->packed_weights = shared.packed_weights.find(product.key);
    if (product.instruction->packed_weights != nullptr) {
      continue;
    }
    for (const uint32_t slot : product.weights.slots) {
      read_in_place(*state.tensors[slot], shared);
      partly_read.erase(slot);
    }
  }
  for_each_read_of_rows(program, [&](DecodedInstruction& instruction, uint32_t slot) {
    const auto found = partly_read.find(slot);
    instruction.partly_read = found == partly_read.end() ? nullptr : found->second;
  });
}

} // namespace executorch_mlx
