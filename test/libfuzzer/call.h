// Runs payloads through the backend as ExecuTorch does. The inputs and constants have the types that a payload
// declares.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuzz {

// Loads the payload. If it verifies, calls it twice. `data` is aligned to 8 bytes.
void load_and_call(const uint8_t* data, size_t size);

} // namespace fuzz
