// TCP connections between the processes of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace executorch_mlx {

// A socket that listens on all addresses of this machine, or on the one in the environment variable
// EXECUTORCH_MLX_GROUP_HOST. Throws EngineError.
int listen_on_any_port(uint16_t& port);

// The IPv4 addresses of this machine, the loopback address last.
std::vector<uint32_t> own_addresses();

// Connects to an address within `seconds`. Returns -1 if that fails.
int connect_to(uint32_t address, uint16_t port, double seconds);

// Waits for a connection. Returns -1 if none comes within `seconds`.
int accept_within(int listener, double seconds);

// Makes a connection find out that the other machine is gone, and send small messages at once.
void configure(int socket);

// Limits the time of each later send and receive; 0: no limit.
void set_timeout(int socket, double seconds);

// Return whether all bytes were sent or received: false if the connection has ended.
bool send_all(int socket, const void* data, size_t size);
bool receive_all(int socket, void* data, size_t size);

} // namespace executorch_mlx
