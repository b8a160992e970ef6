#include "connections.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "check.h"

namespace executorch_mlx::engine {

namespace {

sockaddr_in ipv4(uint32_t address, uint16_t port) {
  sockaddr_in result = {};
  result.sin_family = AF_INET;
  result.sin_addr.s_addr = address;
  result.sin_port = htons(port);
  return result;
}

// Keeps the processes that this one starts from inheriting the socket, and returns the socket. macOS has no
// SOCK_CLOEXEC.
int keep_private(int socket) {
  fcntl(socket, F_SETFD, FD_CLOEXEC);
  return socket;
}

// Waits again after a signal, for the time that is left.
bool is_ready(int socket, short events, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd waiting = {socket, events, 0};
    const int ready = poll(&waiting, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (ready >= 0 || errno != EINTR) {
      return ready == 1;
    }
  }
}

} // namespace

int listen_on_any_port(uint16_t& port) {
  const char* host = std::getenv("EXECUTORCH_MLX_GROUP_HOST");
  in_addr address = {htonl(INADDR_ANY)};
  check(
      host == nullptr || inet_pton(AF_INET, host, &address) == 1, EXECUTORCH_MLX_FAILED,
      "EXECUTORCH_MLX_GROUP_HOST: got ", host == nullptr ? "" : host, ", expected an IPv4 address");
  const int listener = keep_private(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in bound = ipv4(address.s_addr, 0);
  socklen_t size = sizeof(bound);
  const bool listens = listener >= 0 && bind(listener, reinterpret_cast<sockaddr*>(&bound), size) == 0 &&
      listen(listener, SOMAXCONN) == 0 && getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &size) == 0;
  check(listens, EXECUTORCH_MLX_FAILED, "cannot listen for the other processes: ", std::strerror(errno));
  port = ntohs(bound.sin_port);
  return listener;
}

std::vector<uint32_t> own_addresses() {
  std::vector<uint32_t> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr != nullptr && each->ifa_addr->sa_family == AF_INET) {
        addresses.push_back(reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr);
      }
    }
    freeifaddrs(list);
  }
  const uint32_t loopback = htonl(INADDR_LOOPBACK);
  std::erase(addresses, loopback);
  addresses.push_back(loopback);
  return addresses;
}

int connect_to(uint32_t address, uint16_t port, double seconds) {
  const int result = keep_private(socket(AF_INET, SOCK_STREAM, 0));
  const sockaddr_in target = ipv4(address, port);
  fcntl(result, F_SETFL, O_NONBLOCK);
  int error = connect(result, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0 ? 0 : errno;
  if (error == EINPROGRESS && is_ready(result, POLLOUT, seconds)) {
    socklen_t size = sizeof(error);
    getsockopt(result, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) {
    close(result);
    return -1;
  }
  fcntl(result, F_SETFL, 0);
  return result;
}

int accept_within(int listener, double seconds) {
  return is_ready(listener, POLLIN, seconds) ? keep_private(accept(listener, nullptr, nullptr)) : -1;
}

void configure(int socket) {
  const auto set = [socket](int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof(value)); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // Probes start after 10 silent seconds. The connection ends after 4 unanswered probes, one every 5 seconds.
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef SO_NOSIGPIPE
  set(SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
#ifdef TCP_KEEPIDLE
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
#endif
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
}

void set_timeout(int socket, double seconds) {
  const auto microseconds = static_cast<int64_t>(std::ceil(seconds * 1e6));
  timeval limit = {};
  limit.tv_sec = static_cast<time_t>(microseconds / 1'000'000);
  limit.tv_usec = static_cast<suseconds_t>(microseconds % 1'000'000);
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

bool send_all(int socket, const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = send(socket, next, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) {
      continue;
    }
    if (sent <= 0) {
      return false;
    }
    next += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int socket, void* data, size_t size) {
  char* next = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t received = recv(socket, next, size, 0);
    if (received < 0 && errno == EINTR) {
      continue;
    }
    if (received <= 0) {
      return false;
    }
    next += received;
    size -= static_cast<size_t>(received);
  }
  return true;
}

} // namespace executorch_mlx::engine
