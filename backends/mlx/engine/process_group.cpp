#include "process_group.h"

#include <executorch_mlx/delegate.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <optional>
#include <random>

#include "check.h"
#include "connections.h"

namespace executorch_mlx::engine {

namespace {

constexpr size_t kMaxAddresses = 32;
constexpr double kAnswerSeconds = 10; // for a connection, and for a handshake
constexpr auto kStartTime = std::chrono::seconds(60); // for all processes to connect
// How long a process waits for the others after a call has failed in one of them. Without a limit, a process that is
// still in the call would wait forever for data of the failed process.
constexpr auto kFailureTime = std::chrono::seconds(10);
constexpr uint64_t kMaxMessage = 1 << 30;

// Whether this process has a ProcessGroup. There can be only one: the collective operations of two models would get
// mixed up.
std::atomic<bool> has_process_group = false;

// A random value that identifies the group: process 0 refuses connections of other programs.
using GroupKey = std::array<char, 16>;

// How the other processes reach process 0.
struct Address {
  GroupKey key;
  uint16_t port;
  uint16_t count;
  uint32_t addresses[kMaxAddresses];
};

// What a process says about itself.
struct Hello {
  GroupKey key;
  int64_t process; // its rank in the group
  TensorParallel part; // the part of the model that its file has
};

// Sends the length of a message, then its bytes. Returns false if the connection has ended.
bool send_message(int socket, std::span<const char> message) {
  const uint64_t length = message.size();
  return send_all(socket, &length, sizeof(length)) && send_all(socket, message.data(), message.size());
}

// Returns nullopt if the connection has ended.
std::optional<ProcessGroup::Message> receive_message(int socket) {
  uint64_t length = 0;
  if (!receive_all(socket, &length, sizeof(length)) || length >= kMaxMessage) {
    return std::nullopt;
  }
  ProcessGroup::Message message(length);
  return receive_all(socket, message.data(), length) ? std::optional(std::move(message)) : std::nullopt;
}

GroupKey random_key() {
  std::random_device device;
  GroupKey key;
  std::generate(key.begin(), key.end(), [&] { return static_cast<char>(device()); });
  return key;
}

// Returns what is wrong with the file of the process that sent `hello`, or "".
std::string fault(const Hello& hello, const TensorParallel& leader, int size) {
  const TensorParallel& part = hello.part;
  if (part.size != size) {
    return str(
        "process ", hello.process, " has a part of a model for ", part.size, " processes, expected a model for ", size,
        " processes, as many as the group has");
  }
  if (part.rank != hello.process) {
    return str("process ", hello.process, " has part ", part.rank, " of the model, expected part ", hello.process);
  }
  if (part.export_id != leader.export_id) {
    return str("process ", hello.process, " has a part of another export than process 0");
  }
  return "";
}

int connect_to_leader(const Address& address, const Hello& hello) {
  // Some of the addresses may be unreachable from this machine. A short time is enough for most of the others.
  for (const double seconds : {0.5, 2.0, kAnswerSeconds}) {
    for (size_t i = 0; i < std::min<size_t>(address.count, kMaxAddresses); ++i) {
      const int socket = connect_to(address.addresses[i], address.port, seconds);
      char is_leader = 0;
      if (socket >= 0) {
        set_timeout(socket, kAnswerSeconds);
        if (send_all(socket, &hello, sizeof(hello)) && receive_all(socket, &is_leader, 1)) {
          return socket;
        }
        close(socket);
      }
    }
  }
  return -1;
}

} // namespace

ProcessGroup::ProcessGroup(const TensorParallel& part, const std::string& path) {
  check(
      executorch_mlx_group(&rank_, &size_) == 0, EXECUTORCH_MLX_FAILED, path,
      ": cannot join the group of processes, see the log for details");
  // Other errors need more than one process: connect() reports them to all.
  check_argument(
      size_ > 1, path, ": part ", part.rank, " of a model for ", part.size,
      " processes, but this process is alone: start ",
      part.size, " processes, for instance with executorch-mlx run --hosts");
  check_argument(
      !has_process_group.exchange(true), path, ": this process already has a model for a group of processes");
  try {
    connect(part, path);
  } catch (...) {
    has_process_group = false;
    throw;
  }
  thread_ = std::thread([this] { is_leader() ? watch_followers() : read_messages(); });
}

ProcessGroup::~ProcessGroup() {
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  // Wakes the thread of this process, and tells the others that the group has ended.
  for (const int socket : sockets_) {
    if (socket >= 0) {
      if (is_leader()) {
        send_message(socket, {});
      }
      shutdown(socket, SHUT_RDWR);
    }
  }
  thread_.join();
  has_process_group = false;
  for (const int socket : sockets_) {
    if (socket >= 0) {
      close(socket);
    }
  }
}

// Sets `sockets_`.
void ProcessGroup::connect(const TensorParallel& part, const std::string& path) {
  Address address = {};
  int listener = -1;
  if (is_leader()) {
    address.key = random_key();
    listener = listen_on_any_port(address.port);
    const auto addresses = own_addresses();
    address.count = static_cast<uint16_t>(std::min(addresses.size(), kMaxAddresses));
    std::copy_n(addresses.end() - address.count, address.count, address.addresses);
  }
  check(
      executorch_mlx_group_share(&address, sizeof(address)) == 0, EXECUTORCH_MLX_FAILED, path,
      ": cannot reach the other processes, see the log for details");
  std::string refusal;
  if (is_leader()) {
    refusal = admit(listener, part, address.key);
    close(listener);
  } else {
    const int socket = connect_to_leader(address, {address.key, rank_, part});
    check(socket >= 0, EXECUTORCH_MLX_FAILED, path, ": cannot connect to process 0");
    sockets_ = {socket};
    set_timeout(socket, std::chrono::duration<double>(kStartTime).count());
    const auto message = receive_message(socket);
    refusal = message ? std::string(message->begin(), message->end()) : "process 0 has ended";
  }
  for (const int socket : sockets_) {
    if (socket >= 0) {
      configure(socket);
      set_timeout(socket, 0);
    }
  }
  if (!refusal.empty()) {
    for (const int socket : sockets_) {
      close(socket);
    }
    check_argument(false, path, ": ", refusal);
  }
}

// Accepts the connections of all other processes. Sends each the reason why the group cannot start, or "", and returns
// the reason.
std::string ProcessGroup::admit(int listener, const TensorParallel& part, const GroupKey& key) {
  sockets_.assign(size_, -1);
  results_.resize(size_);
  std::string refusal = fault({key, 0, part}, part, size_);
  const auto deadline = std::chrono::steady_clock::now() + kStartTime;
  for (int missing = size_ - 1; missing > 0;) {
    const std::chrono::duration<double> left = deadline - std::chrono::steady_clock::now();
    const int socket = accept_within(listener, std::max(0.0, left.count()));
    if (socket < 0) {
      refusal = str(missing, " of ", size_, " processes did not connect to process 0");
      break;
    }
    set_timeout(socket, kAnswerSeconds);
    Hello hello;
    const char welcome = 1;
    const bool is_member = receive_all(socket, &hello, sizeof(hello)) && hello.key == key && 0 < hello.process &&
        hello.process < size_ && sockets_[hello.process] < 0 && send_all(socket, &welcome, 1);
    if (!is_member) { // not of this group
      close(socket);
      continue;
    }
    sockets_[hello.process] = socket;
    --missing;
    refusal = refusal.empty() ? fault(hello, part, size_) : refusal;
  }
  for (const int socket : sockets_) {
    if (socket >= 0) {
      send_message(socket, refusal);
    }
  }
  return refusal;
}

bool ProcessGroup::lead(const Message& message, const Call& call) {
  for (int rank = 1; rank < size_; ++rank) {
    if (!send_message(sockets_[rank], message)) {
      die(str("process ", rank, " has ended"));
    }
  }
  const bool result = call();
  wait_for_results(result);
  return result;
}

// Waits until all other processes have made the call that ended in this process with `result`. Ends this process if one
// of them has another result.
void ProcessGroup::wait_for_results(bool result) {
  std::unique_lock lock(mutex_);
  const auto is_complete = [this] {
    return std::all_of(results_.begin() + 1, results_.end(), [](const auto& each) { return !each.empty(); });
  };
  if (result) {
    changed_.wait(lock, is_complete);
  } else if (!changed_.wait_for(lock, kFailureTime, is_complete)) {
    die("a call failed in this process, and another process has not ended the call");
  }
  for (int rank = 1; rank < size_; ++rank) {
    if (results_[rank].front() != result) {
      die(str("a call failed in process ", result ? rank : 0, " and not in process ", result ? 0 : rank));
    }
    results_[rank].pop_front();
  }
}

// In process 0: collects the results of the others, and ends the process if one of them has ended. If a call has failed
// in another process, this process may wait for that process forever. It therefore ends after kFailureTime.
void ProcessGroup::watch_followers() {
  using Clock = std::chrono::steady_clock;
  std::vector<pollfd> connections;
  for (int rank = 1; rank < size_; ++rank) {
    connections.push_back({sockets_[rank], POLLIN, 0});
  }
  std::optional<Clock::time_point> deadline;
  while (true) {
    if (poll(connections.data(), connections.size(), deadline ? 100 : -1) < 0) {
      continue; // interrupted by a signal
    }
    std::lock_guard lock(mutex_);
    if (is_closing_) {
      return;
    }
    bool has_failed = false;
    for (int rank = 1; rank < size_; ++rank) {
      char result = 0;
      if (connections[rank - 1].revents != 0) {
        if (!receive_all(sockets_[rank], &result, 1)) {
          die(str("process ", rank, " has ended"));
        }
        results_[rank].push_back(result != 0);
      }
      has_failed |= !results_[rank].empty() && !results_[rank].front();
    }
    changed_.notify_all();
    deadline = !has_failed ? std::nullopt : deadline ? deadline : std::optional(Clock::now() + kFailureTime);
    if (deadline && Clock::now() > *deadline) {
      die("a call failed in another process");
    }
  }
}

// In the other processes: reads the messages of process 0. Reads also while a call runs, to find out that process 0 has
// ended.
void ProcessGroup::read_messages() {
  while (true) {
    auto message = receive_message(sockets_[0]);
    std::lock_guard lock(mutex_);
    if (!message && !is_closing_) {
      die("process 0 has ended");
    }
    is_closing_ |= !message || message->empty();
    messages_.push_back(message ? std::move(*message) : Message());
    changed_.notify_all();
    if (is_closing_) {
      return;
    }
  }
}

void ProcessGroup::follow(const std::function<bool(std::span<const char>)>& call) {
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !messages_.empty(); });
    const Message message = std::move(messages_.front());
    messages_.pop_front();
    lock.unlock();
    if (message.empty()) {
      return;
    }
    const char result = call(message) ? 1 : 0;
    if (!send_all(sockets_[0], &result, 1)) {
      lock.lock();
      if (!is_closing_) {
        die("process 0 has ended");
      }
    }
  }
}

void ProcessGroup::die(const std::string& reason) const {
  std::fprintf(stderr, "executorch-mlx: process %d of %d: %s\n", rank_, size_, reason.c_str());
  std::fflush(stderr);
  _exit(EXIT_FAILURE);
}

} // namespace executorch_mlx::engine
