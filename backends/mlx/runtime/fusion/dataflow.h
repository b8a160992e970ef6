// Which instruction of a chain writes what another one reads.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace executorch_mlx {

// What a tensor slot holds from one write to the next. A chain that runs other chains, with a control instruction,
// knows nothing about the slots after it: these chains may have written them.
struct SlotValue {
  static constexpr uint32_t kNoWriter = UINT32_MAX;

  uint32_t slot;
  uint32_t writer; // an instruction of the chain, or kNoWriter: what the chain finds in the slot
  uint32_t reads = 0; // how many fields of instructions of the chain read the value
  uint32_t last_read = 0; // the last one of these instructions
  // The instruction of the chain that overwrites it, before the chain runs another one.
  uint32_t next_writer = kNoWriter;

  bool is_overwritten() const { return next_writer != kNoWriter; }
};

class Dataflow {
 public:
  static constexpr size_t kNone = SIZE_MAX;

  explicit Dataflow(const MlxProgram& program);

  // The number of the value that an instruction reads from a slot, one of its operands.
  uint32_t read(size_t chain, size_t instruction, const fb::Tid* slot) const {
    return find(chain, instruction, slot, /*is_write=*/false);
  }

  // The number of the value that an instruction writes to a slot, one of its results.
  uint32_t written(size_t chain, size_t instruction, const fb::Tid* slot) const {
    return find(chain, instruction, slot, /*is_write=*/true);
  }

  // The instruction of the chain that writes what an instruction reads from a slot, or kNone.
  size_t writer(size_t chain, size_t instruction, const fb::Tid* slot) const {
    const uint32_t writer = values_[read(chain, instruction, slot)].writer;
    return writer == SlotValue::kNoWriter ? kNone : writer;
  }

  // By number.
  const SlotValue& value(uint32_t number) const { return values_[number]; }
  size_t size() const { return values_.size(); }

  // Whether anything but the instructions that SlotValue::reads counts may read a value: another chain, a later run of
  // the same one, or the caller.
  bool escapes(const SlotValue& value) const {
    return value.slot < layout_.temps_begin() || (shared_[value.slot] && !value.is_overwritten());
  }

 private:
  struct Entry {
    uint32_t slot;
    uint32_t value;
    bool is_write;
  };

  void add_chain(const Chain& chain, bool runs);
  uint32_t find(size_t chain, size_t instruction, const fb::Tid* slot, bool is_write) const;

  const Layout& layout_;
  std::vector<SlotValue> values_;
  std::vector<Entry> entries_; // of all instructions, in order
  std::vector<std::vector<size_t>> begins_; // by chain: where the entries of each instruction begin
  // Slots with a value that not only its chain reads. A chain that reads a slot before it has written it reads what
  // another chain, or an earlier run of the same one, has written.
  std::vector<bool> shared_;
  // By slot, the value that the present chain finds there, if the first number is `epoch_`.
  std::vector<std::pair<uint32_t, uint32_t>> present_;
  uint32_t epoch_ = 0;
};

} // namespace executorch_mlx
