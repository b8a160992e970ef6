// The mutable buffers of a loaded program, such as its KV caches. Part of the C API of libmlx_delegate; thread-safe.
// The functions size, copy, read and write wait until no method of the program runs. The functions count and describe
// return at once, because what they return never changes.
//
// The functions copy, read and write are for buffers of rank 3 or more, and work on ranges of axis 2. Except where it
// says otherwise, a function that returns an int returns 0, or the number of an ExecuTorch Error; the log then has the
// details. Arguments may be null: a function without an error then does nothing, or returns 0 or "".
//
// A call that fails may leave the mutable buffers and the KV caches of its program undefined: the log says so.
// Calls of all methods of the program are then refused, with the Error InvalidState, until the buffers are reset.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct executorch_mlx_buffers executorch_mlx_buffers;

// Resets the mutable buffers and the KV caches of the program whose method this thread calls next, before the method
// runs: they get the contents that they had when the program was loaded. If a method was loaded several times, only the
// buffers of the called instance are reset, and those of the methods that share buffers with it. If there is no room
// for the contents, the call fails with the Error MemoryAllocationFailed, and the buffers stay undefined.
void executorch_mlx_reset(void);

// Returns 1 if the last call on this thread, or executorch_mlx_deferred_finish() if that was later, has failed and the
// mutable buffers of its program are undefined now, else 0.
int executorch_mlx_is_undefined(void);

// Finds the mutable buffers that have a name in the program, of all methods that are loaded, sorted by name. Buffers
// without a name are left out. If a method was loaded several times, the buffers are those of its first instance.
// `named_data_map` identifies the program: it is what Program::get_named_data_map() of ExecuTorch returns. The buffers
// stay in memory until executorch_mlx_buffers_close(). Returns Error::NotSupported, and logs nothing, if the program
// also has KV caches of UpdateAndAttendNode, which are in no buffer.
int executorch_mlx_buffers_open(const void* named_data_map, executorch_mlx_buffers** buffers);

// Returns 1 if the program has a KV cache of UpdateAndAttendNode that keeps only the last positions, because of the
// load option kv_windows, else 0.
int executorch_mlx_has_ring_buffers(const void* named_data_map);

// Does the same as executorch_mlx_reset(), at once.
int executorch_mlx_buffers_reset(executorch_mlx_buffers* buffers);

// Frees what executorch_mlx_buffers_open() stored. `buffers` may be null.
void executorch_mlx_buffers_close(executorch_mlx_buffers* buffers);

// Returns the number of buffers. The functions below take an index in [0, count) as `buffer`.
size_t executorch_mlx_buffers_count(const executorch_mlx_buffers* buffers);

// Returns a description of a buffer: dtype, shape and name. Valid until the buffers are closed.
const char* executorch_mlx_buffers_describe(const executorch_mlx_buffers* buffers, size_t buffer);

// Stores the size of axis 2 of a buffer in `length`, and the number of bytes for each index of axis 2 in `index_bytes`.
// Both are 0 if the rank is less than 3.
void executorch_mlx_buffers_size(
    const executorch_mlx_buffers* buffers, size_t buffer, int64_t* length, size_t* index_bytes);

// Copies indices [from, from + count) of axis 2 to [to, to + count). The ranges may overlap.
int executorch_mlx_buffers_copy(
    executorch_mlx_buffers* buffers, size_t buffer, int64_t from, int64_t to, int64_t count);

// Reads or writes indices [begin, begin + count) of axis 2. `data` is a row-major array of the buffer's shape, except
// that axis 2 has size `count`.
int executorch_mlx_buffers_read(
    executorch_mlx_buffers* buffers, size_t buffer, int64_t begin, int64_t count, void* data);
int executorch_mlx_buffers_write(
    executorch_mlx_buffers* buffers, size_t buffer, int64_t begin, int64_t count, const void* data);

#ifdef __cplusplus
} // extern "C"
#endif
