// What the methods of one loaded ExecuTorch program have in common.
//
// A method is loaded by itself and knows its program by the address of the named
// data that it reads, which stays where it is for as long as a method of the program
// lives. Constants of one key are one array in all of them. Mutable buffers of one
// name, dtype and shape, and the caches of UpdateAndAttendNode, are one state of a
// session: one instance of each method. Who loads a method of the program a second
// time begins a second session, as ExecuTorch has it for what it keeps itself.
#pragma once

#include <executorch/runtime/core/named_data_map.h>
#include <mlx/mlx.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kv_cache.h"

namespace executorch_mlx {

// A mutable buffer. A call takes its cells away and brings them back: who holds a
// second reference keeps MLX from updating them in place.
struct Buffer {
  std::optional<mx::array> cells;  // empty between calls: lost in a failed one
};

struct Caches {
  std::map<int, KvLayer> layers;
  std::vector<int> windows;  // as Options::kv_windows
  bool is_lost = false;
};

// Things by name that live for as long as somebody outside holds them.
template <typename T>
class Pool {
 public:
  // The one of this name, or null.
  std::shared_ptr<T> find(const std::string& name) const {
    const auto found = things_.find(name);
    return found == things_.end() ? nullptr : found->second.lock();
  }
  void put(const std::string& name, const std::shared_ptr<T>& thing) {
    things_[name] = thing;
  }

 private:
  std::map<std::string, std::weak_ptr<T>> things_;
};

struct Session {
  // Held by the one call that runs.
  std::mutex mutex;

  // For loading, under SharedData::loading.
  Pool<Buffer> buffers;
  Pool<Caches> caches;
  Pool<void> members;
};

class SharedData {
 public:
  // Of the program that `data` belongs to; without one, of nobody else.
  static std::shared_ptr<SharedData> of(const executorch::runtime::NamedDataMap* data);

  ~SharedData();

  // Held while a method is loaded.
  std::mutex loading;
  Pool<const mx::array> constants;

  // The first session without a living `member`, which lives as long as `token`.
  std::shared_ptr<Session> join(const std::string& member, const std::shared_ptr<void>& token);

 private:
  explicit SharedData(const void* key) : key_(key) {}

  const void* key_;
  std::vector<std::weak_ptr<Session>> sessions_;
};

} // namespace executorch_mlx
