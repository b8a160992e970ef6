// What the methods of one loaded ExecuTorch program share.
//
// ExecuTorch loads each method on its own. Methods of the same program have the same named data map. The map keeps its
// address while any of these methods exists, so the address identifies the program. These methods share:
// - constants with the same name, dtype and shape, and the packed copies of weights;
// - within a session, mutable buffers with the same name, dtype and shape, and the KV caches of
//   UpdateAndAttendNode.
// A session contains at most one instance of each method. Loading a method a second time starts another
// session with buffers of its own, just as ExecuTorch gives every loaded instance of a method separate
// state.
#pragma once

#include <executorch/runtime/core/named_data_map.h>
#include <mlx/mlx.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "call/evaluation.h"
#include "call/kv_cache.h"
#include "device.h"
#include "memory/limit.h"

namespace executorch_mlx {

// A mutable buffer. A call moves the contents into its slot and moves them back at its end, because MLX
// updates an array in place only if there is no other reference to it.
struct Buffer {
  std::optional<mx::array> contents; // empty while a call runs, and possibly if the session is undefined
  std::optional<mx::array> written; // an array without elements, available once the contents are written
};

// The KV caches of UpdateAndAttendNode. A call moves the layers out and back, as it does with the contents
// of a Buffer.
struct Caches {
  std::map<int, KvLayer> layers;
  std::vector<int> windows; // Options::kv_windows
};

// Finds objects by name. It does not keep the objects alive: an object can be found only while another reference to it
// exists.
template <typename T>
class WeakMap {
 public:
  // Returns null if there is no object of this name.
  std::shared_ptr<T> find(const std::string& name) const {
    const auto found = objects_.find(name);
    return found == objects_.end() ? nullptr : found->second.lock();
  }
  void put(const std::string& name, const std::shared_ptr<T>& object) { objects_[name] = object; }
  // All objects that exist, sorted by name.
  std::vector<std::pair<std::string, std::shared_ptr<T>>> all() const {
    std::vector<std::pair<std::string, std::shared_ptr<T>>> result;
    for (const auto& [name, object] : objects_) {
      if (auto found = object.lock()) {
        result.emplace_back(name, std::move(found));
      }
    }
    return result;
  }

 private:
  std::map<std::string, std::weak_ptr<T>> objects_;
};

// A constant that instructions read only as a packed copy. While it exists, the active memory does not count the pages
// of the constant, unless `bytes` is empty.
struct ReleasedConstant {
  explicit ReleasedConstant(mx::array constant) : constant(std::move(constant)) {}

  mx::array constant; // declared first: it must outlive `bytes`
  std::optional<ReleasedBytes> bytes;
};

// Weights of a product in the order in which the kernel reads them, and the constants that they replace.
struct PackedWeights {
  mx::array panels;
  std::vector<std::shared_ptr<ReleasedConstant>> released;
};

// A loaded method, as its session sees it.
class Member {
 public:
  // Gives the mutable buffers and KV caches their initial contents. Skips the buffers in `done`, and adds the others.
  virtual void reset(std::set<const Buffer*>& done) = 0;
  // Frees the contents of the mutable buffers and KV caches. Returns whether the method has any.
  virtual bool drop_contents() noexcept = 0;

 protected:
  ~Member() = default;
};

// The methods that share mutable buffers and KV caches.
struct Session {
  // Locked during a call, so that the calls of all methods of the session take turns.
  std::mutex mutex;

  // Of the evaluations of all methods, and the streams on which they run.
  const std::shared_ptr<Owner> owner = std::make_shared<Owner>();
  std::map<std::pair<mx::Device, bool>, ProgramStream> streams; // by the arguments of stream()

  // The stream for methods that are loaded for `device`, to run on threads of low priority or not.
  mx::Stream stream(mx::Device device, bool has_low_priority) {
    const auto key = std::pair(device, has_low_priority);
    return streams.try_emplace(key, device, has_low_priority).first->second.stream;
  }

  // Whether a failed call has left the mutable buffers and KV caches undefined. Calls are refused until a reset.
  std::atomic<bool> is_undefined = false;
  uint64_t resets = 0; // so far
  std::vector<Member*> members; // in the order in which they were loaded

  // Marks the buffers and caches as undefined, logs it, and frees them. Does nothing if there are none.
  void make_undefined() noexcept;

  // Does the same if work on the device has failed that no call has waited for. Throws Failure if they are undefined.
  void check_defined();

  // Gives the buffers and caches of all methods the contents that they had after the methods were loaded.
  void reset();

  // Used only with SharedData::loading locked.
  WeakMap<Buffer> buffers;
  std::weak_ptr<Caches> caches;
  WeakMap<void> methods; // the memberships passed to SharedData::join()
};

// The key of an entry in the named data of a `.pte` whose constants are in data files.
inline constexpr char kProgramMark[] = "mlx:program";

// What all methods of one program share, in any session.
class SharedData {
 public:
  // Returns the shared data of the program that `named_data` belongs to. A null pointer does not identify
  // a program; for null, returns new data that no other method shares.
  static std::shared_ptr<SharedData> of(const executorch::runtime::NamedDataMap* named_data);

  ~SharedData();

  // Locked when a method is being loaded, or its session is looked up.
  std::mutex loading;
  WeakMap<const mx::array> constants;
  WeakMap<const PackedWeights> packed_weights;
  WeakMap<ReleasedConstant> released_constants; // by address
  std::set<const void*> read_in_place; // the addresses of constants that instructions read as they are

  // Adds a method to the first session that does not contain it yet, or else to a new session, and
  // returns the session. The method belongs to the session while `membership` exists.
  std::shared_ptr<Session> join(const std::string& method, const std::shared_ptr<void>& membership);

  // The first session that exists, or null.
  std::shared_ptr<Session> first_session() const;

 private:
  explicit SharedData(const void* key) : key_(key) {}

  const void* key_;
  std::vector<std::weak_ptr<Session>> sessions_;
};

} // namespace executorch_mlx
