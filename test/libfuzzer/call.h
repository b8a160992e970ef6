// Runs payloads through the backend as ExecuTorch does, with inputs and constants made up from what they declare.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fuzz {

// Loads the payload. If it verifies, calls it twice. `data` is aligned to 8 bytes.
void load_and_call(const uint8_t* data, size_t size);

} // namespace fuzz
