#include "program/shared.h"

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

} // namespace

std::shared_ptr<SharedData> SharedData::of(const executorch::runtime::NamedDataMap* named_data) {
  if (named_data == nullptr) {
    return std::shared_ptr<SharedData>(new SharedData(nullptr));
  }
  std::lock_guard lock(registry().mutex);
  auto& entry = registry().programs[named_data];
  auto found = entry.lock();
  if (found == nullptr) {
    found.reset(new SharedData(named_data));
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

std::shared_ptr<Session> SharedData::first_session() const {
  for (const auto& entry : sessions_) {
    if (auto session = entry.lock()) {
      return session;
    }
  }
  return nullptr;
}

} // namespace executorch_mlx
