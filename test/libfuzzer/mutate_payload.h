// Changes fields of a payload in place. The result is a valid FlatBuffer, so that most mutations reach the checks that
// follow the verification of the FlatBuffer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuzz {

// Changes a few fields of the payload at `data`. Returns false if the bytes at `data` are not a valid payload.
bool mutate_fields(uint8_t* data, size_t size, unsigned seed);

} // namespace fuzz
