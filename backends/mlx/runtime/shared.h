// What the methods of one loaded ExecuTorch program share.
//
// ExecuTorch loads each method on its own. Methods of the same program read the same named data map,
// whose address stays the same while one of them is loaded. They share:
// - constants with the same name, dtype and shape;
// - within a session, mutable buffers with the same name, dtype and shape, and the KV caches of
//   UpdateAndAttendNode.
// A session has one instance of each method. Loading a method a second time starts another session,
// as it does for the state that ExecuTorch keeps itself.
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

// A mutable buffer. A call takes the contents and returns them at its end, because MLX updates an
// array in place only if nobody else holds it.
struct Buffer {
  std::optional<mx::array> contents;  // empty between calls if a failed call lost them
};

struct Caches {
  std::map<int, KvLayer> layers;
  std::vector<int> windows;  // Options::kv_windows
  bool is_lost = false;
};

// Finds objects by name for as long as someone else holds them.
template <typename T>
class Pool {
 public:
  // Returns null if there is no object of this name.
  std::shared_ptr<T> find(const std::string& name) const {
    const auto found = objects_.find(name);
    return found == objects_.end() ? nullptr : found->second.lock();
  }
  void put(const std::string& name, const std::shared_ptr<T>& object) {
    objects_[name] = object;
  }

 private:
  std::map<std::string, std::weak_ptr<T>> objects_;
};

struct Session {
  // Held during a call.
  std::mutex mutex;

  // Used while a method is loaded, under SharedData::loading.
  Pool<Buffer> buffers;
  std::weak_ptr<Caches> caches;
  Pool<void> methods;
};

class SharedData {
 public:
  // Returns the data of the program that `named_data` belongs to. A null map belongs to no other
  // method.
  static std::shared_ptr<SharedData> of(const executorch::runtime::NamedDataMap* named_data);

  ~SharedData();

  // Held while a method is loaded.
  std::mutex loading;
  Pool<const mx::array> constants;

  // Adds a method to the first session that lacks it. The method is in the session while `token`
  // lives.
  std::shared_ptr<Session> join(const std::string& method, const std::shared_ptr<void>& token);

 private:
  explicit SharedData(const void* key) : key_(key) {}

  const void* key_;
  std::vector<std::weak_ptr<Session>> sessions_;
};

} // namespace executorch_mlx
