#include "call/shared.h"

#include <executorch/runtime/platform/log.h>

#include <cstring>

namespace executorch_mlx {

namespace {

// Never destroyed, because methods may be unloaded at the very end of the process.
struct Registry {
  std::mutex mutex;
  std::map<const void*, std::weak_ptr<SharedData>> programs;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

// Returns an address that identifies the program of `named_data`. If the program reads a data file (`.ptd`), ExecuTorch
// gives each method a map of its own, or gives several programs the map of the file. The address is then that of the
// key kProgramMark in the `.pte`.
const void* identity(const executorch::runtime::NamedDataMap& named_data) {
  const auto keys = named_data.get_num_keys();
  for (uint32_t i = 0; keys.ok() && i < *keys; ++i) {
    const auto key = named_data.get_key(i);
    if (key.ok() && std::strcmp(*key, kProgramMark) == 0) {
      return *key;
    }
  }
  return &named_data;
}

} // namespace

std::shared_ptr<SharedData> SharedData::of(const executorch::runtime::NamedDataMap* named_data) {
  if (named_data == nullptr) {
    return std::shared_ptr<SharedData>(new SharedData(nullptr));
  }
  std::lock_guard lock(registry().mutex);
  const void* const key = identity(*named_data);
  auto& entry = registry().programs[key];
  auto found = entry.lock();
  if (found == nullptr) {
    found.reset(new SharedData(key));
    entry = found;
  }
  return found;
}

SharedData::~SharedData() {
  std::lock_guard lock(registry().mutex);
  const auto entry = registry().programs.find(key_);
  // By now, the entry may belong to another program that was loaded at the same address. Such an entry is not expired.
  if (entry != registry().programs.end() && entry->second.expired()) {
    registry().programs.erase(entry);
  }
}

std::shared_ptr<Session> SharedData::join(const std::string& method, const std::shared_ptr<void>& membership) {
  std::erase_if(sessions_, [](const auto& session) { return session.expired(); });
  for (const auto& entry : sessions_) {
    const auto session = entry.lock();
    if (session != nullptr && session->methods.find(method) == nullptr) {
      session->methods.put(method, membership);
      return session;
    }
  }
  auto session = std::make_shared<Session>();
  session->methods.put(method, membership);
  sessions_.push_back(session);
  return session;
}

void Session::make_undefined() noexcept {
  for (auto* member : members) {
    is_undefined = member->drop_contents() || is_undefined;
  }
  if (is_undefined) {
    ET_LOG(Error, "MLX: the mutable buffers of the program are undefined now: see executorch_mlx_reset()");
  }
}

void Session::check_defined() {
  if (owner->has_lost_work.exchange(false)) {
    make_undefined();
  }
  if (is_undefined) {
    fail(Error::InvalidState,
        "the mutable buffers are undefined since a call failed: reset them with executorch_mlx_reset(), or load the "
        "program again");
  }
}

void Session::reset() {
  for (const auto& [kind, used] : streams) {
    settle(used.stream);
  }
  for (auto* member : members) { // so that the memory is free
    is_undefined = member->drop_contents() || is_undefined;
  }
  ++resets;
  owner->has_lost_work = false;
  std::set<const Buffer*> done;
  for (auto* member : members) {
    member->reset(done);
  }
  is_undefined = false;
}

std::shared_ptr<Session> SharedData::first_session() const {
  for (const auto& entry : sessions_) {
    if (auto session = entry.lock()) {
      return session;
    }
  }
  return nullptr;
}

} // namespace executorch_mlx
