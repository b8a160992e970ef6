// The payload of a delegate: a 24-byte header, then a FlatBuffer.
#pragma once

#include <cstddef>

#include "program/reflect.h"

namespace executorch_mlx {

// Verifies the header and the structure of the FlatBuffer, and returns its root, which lies in `data`. `data` must be
// aligned to 8 bytes and outlive the result. Does not check slots and chains. Throws Failure if the header or the
// structure is invalid.
const fb::MLXGraph* open_payload(const void* data, size_t size);

} // namespace executorch_mlx
