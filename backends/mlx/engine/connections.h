// TCP connections between the processes of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace executorch_mlx::engine {

// Returns a socket that listens on a free port, which is stored in `port`. It listens on all addresses of this machine
// or, if the environment variable EXECUTORCH_MLX_GROUP_HOST is set, on that address. Throws EngineError if it fails.
int listen_on_any_port(uint16_t& port);

// Returns the IPv4 addresses of this machine in network byte order, the loopback address last.
std::vector<uint32_t> own_addresses();

// Connects to an address within `seconds`, and returns the socket. Returns -1 if that fails.
int connect_to(uint32_t address, uint16_t port, double seconds);

// Waits for a connection, and returns its socket. Returns -1 if none comes within `seconds`.
int accept_within(int listener, double seconds);

// Configures a connection: keepalive probes detect that the other machine is gone, and small messages are sent at once.
void configure(int socket);

// Limits the time of each later send and receive; 0: no limit.
void set_timeout(int socket, double seconds);

// Return whether all bytes were sent or received: false if the connection has ended.
bool send_all(int socket, const void* data, size_t size);
bool receive_all(int socket, void* data, size_t size);

} // namespace executorch_mlx::engine
