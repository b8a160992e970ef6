// A program that has been verified: from here on its ids, chains and required
// fields can be trusted, and its nodes are read where they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "error.h"
#include "reflect.h"

namespace executorch_mlx {

class Context;
using Handler = void (*)(const void* payload, Context& context);

// Tensor slots are numbered space after space in this order.
struct Layout {
  uint32_t constants = 0;
  uint32_t inputs = 0;
  uint32_t outputs = 0;
  uint32_t buffers = 0;
  uint32_t temps = 0;
  uint32_t values = 0;

  uint32_t inputs_begin() const {
    return constants;
  }
  uint32_t outputs_begin() const {
    return inputs_begin() + inputs;
  }
  uint32_t buffers_begin() const {
    return outputs_begin() + outputs;
  }
  uint32_t temps_begin() const {
    return buffers_begin() + buffers;
  }
  uint32_t num_tensors() const {
    return temps_begin() + temps;
  }
};

// What the interpreter needs of an instruction without going through tables.
struct Step {
  Handler handler;
  const void* payload;
};

struct Chain {
  std::vector<Step> steps;
  const fb::InstructionChain* source;
};

struct Program {
  const fb::MLXGraph* graph = nullptr;
  Layout layout;
  std::vector<Chain> chains;
  std::vector<const char*> tensor_names;  // by slot; null where there is none
  bool has_caches = false;  // of UpdateAndAttendNode

  const fb::TensorMeta& meta(uint32_t tensor) const {
    return *graph->tensor_meta()->Get(tensor);
  }
};

// Checks all that can be checked of a payload before it runs. `data` has to
// outlive the program and be aligned to 8 bytes. `no_metal_kernels` says why Metal
// source inside the program is refused; null: it is not. Throws Failure.
Program load_program(const void* data, size_t size, const char* no_metal_kernels);

} // namespace executorch_mlx
