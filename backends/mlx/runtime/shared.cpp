#include "shared.h"

namespace executorch_mlx {

namespace {

// Never destroyed: methods may go at the very end of the process.
struct Registry {
  std::mutex mutex;
  std::map<const void*, std::weak_ptr<SharedData>> programs;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

} // namespace

std::shared_ptr<SharedData> SharedData::of(const executorch::runtime::NamedDataMap* data) {
  if (data == nullptr) {
    return std::shared_ptr<SharedData>(new SharedData(nullptr));
  }
  std::lock_guard lock(registry().mutex);
  auto& place = registry().programs[data];
  auto found = place.lock();
  if (found == nullptr) {
    found.reset(new SharedData(data));
    place = found;
  }
  return found;
}

SharedData::~SharedData() {
  std::lock_guard lock(registry().mutex);
  const auto place = registry().programs.find(key_);
  // Another program may have come to this address by now.
  if (place != registry().programs.end() && place->second.expired()) {
    registry().programs.erase(place);
  }
}

std::shared_ptr<Session> SharedData::join(const std::string& member, const std::shared_ptr<void>& token) {
  std::erase_if(sessions_, [](const auto& session) { return session.expired(); });
  for (const auto& place : sessions_) {
    const auto session = place.lock();
    if (session != nullptr && session->members.find(member) == nullptr) {
      session->members.put(member, token);
      return session;
    }
  }
  auto session = std::make_shared<Session>();
  session->members.put(member, token);
  sessions_.push_back(session);
  return session;
}

} // namespace executorch_mlx
