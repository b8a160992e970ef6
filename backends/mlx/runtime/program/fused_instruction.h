// What computes several instructions together.
#pragma once

#include <cstdint>

namespace executorch_mlx {

class Context;

// A field of the first of the instructions that it computes: see fuse.h. A call that is profiled runs none.
class FusedInstruction {
 public:
  // Computes `length` consecutive instructions, with at most `list_elements` elements in the lists of their nodes
  // besides those of the first one.
  explicit FusedInstruction(uint32_t length = 1, uint32_t list_elements = 0)
      : length(length), list_elements(list_elements) {}
  virtual ~FusedInstruction() = default;
  FusedInstruction(const FusedInstruction&) = delete;
  FusedInstruction& operator=(const FusedInstruction&) = delete;

  // Returns whether the instructions are computed. Otherwise they run one by one. Some of them may then find their
  // result computed: see Context::hold().
  virtual bool run(Context& c) const = 0;

  const uint32_t length;
  const uint32_t list_elements;
};

} // namespace executorch_mlx
