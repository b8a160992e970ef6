// The LoRA adapters that requests name, and the slots of the program that hold them.
//
// A request keeps the adapter that its name stood for when it was submitted. A slot is in use as long as its adapter
// has a name, or a request that has not ended. An adapter that takes the name of another one gets a slot of its own.
#pragma once

#include <executorch_mlx/executorch_mlx.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "llm_program.h"

namespace executorch_mlx::engine {

struct Adapter {
  std::string name;
  uint64_t id = 0; // another one for each load; never 0
  int64_t slot = 0;
  // As LlmProgram::write_adapter() takes them, to write them again after a reset of the program.
  std::vector<std::vector<float>> weights = {};
};

class Adapters {
 public:
  explicit Adapters(LlmProgram& program);

  // -- for any thread

  // Returns the adapter of this name; null for "". Throws EngineError if there is none.
  std::shared_ptr<const Adapter> find(const std::string& name) const;
  std::vector<std::string> names() const;
  // Returns an adapter with a name for which `matches(adapter)` is true, or null.
  std::shared_ptr<const Adapter> find_if(const std::function<bool(const Adapter&)>& matches) const;
  // Takes the name away from an adapter. Throws EngineError if there is no such adapter.
  void unload(const std::string& name);
  // Returns the weights of an adapter as Adapter::weights. Layers without weights get zeros, and so do the ranks that
  // are missing. Throws EngineError if they do not fit the program.
  std::vector<std::vector<float>> read(std::span<const executorch_mlx_adapter_weights> layers) const;

  // -- for the thread of the engine, between two steps

  // Writes an adapter to a free slot, and gives it a name. Throws EngineError: with BUSY if no slot is free.
  void load(std::string name, std::vector<std::vector<float>> weights);
  // The program was reset, so its slots are empty.
  void forget() { is_written_ = false; }
  // Whether the slots hold the adapters. If not, no request with an adapter can run.
  bool is_written() const { return is_written_; }
  // After forget(): writes all adapters again. Throws EngineError if there is no memory; a later call may succeed.
  void restore();

 private:
  int64_t take_slot(const std::string& name);
  std::string describe_names() const;

  LlmProgram& program_;
  bool is_written_ = true; // used only on the thread of the engine
  mutable std::mutex mutex_; // guards the members below
  std::map<std::string, std::shared_ptr<Adapter>> by_name_;
  std::vector<std::weak_ptr<Adapter>> slots_; // slot i + 1 holds the adapter i, if it exists
  uint64_t last_id_ = 0;
};

} // namespace executorch_mlx::engine
