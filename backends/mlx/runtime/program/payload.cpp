#include "program/payload.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "error.h"

namespace executorch_mlx {

namespace {

struct Header {
  uint8_t zeros[4];
  char magic[4];
  uint64_t data_offset;
  uint64_t data_size;
};
static_assert(sizeof(Header) == 24);

} // namespace

const fb::MLXGraph* open_payload(const void* data, size_t size) {
  check_program(size > sizeof(Header), "payload: got ", size, " bytes, expected more than ", sizeof(Header));
  Header header;
  std::memcpy(&header, data, sizeof(header));
  constexpr uint8_t kZeros[4] = {};
  check_program(std::memcmp(header.zeros, kZeros, 4) == 0 && std::memcmp(header.magic, "MLX0", 4) == 0,
      "payload: expected a header with the magic MLX0");
  // The payload may have `data_size` bytes of data after the FlatBuffer, at `data_offset`, which this runtime does not
  // read. The FlatBuffer ends at `data_offset`, or before it with up to 15 bytes of padding in between. If there is no
  // data, the payload may end without the padding, and both fields of the header may be zero.
  const uint64_t end = header.data_offset == 0 ? size : header.data_offset;
  check_program(end > sizeof(Header) && end - 15 <= size + 0ull && header.data_size <= size, "payload: got ",
      header.data_size, " bytes of data at ", header.data_offset, ", expected both within ", size, " bytes");
  const auto* bytes = static_cast<const uint8_t*>(data) + sizeof(Header);
  const size_t length = std::min<uint64_t>(end, size) - sizeof(Header);
  // The last argument limits the number of tables. Every table takes at least four bytes, unless tables overlap, which
  // no writer produces. With this limit, the time of the verification is proportional to `length`.
  flatbuffers::Verifier verifier(bytes, length, /*max_depth=*/16, static_cast<flatbuffers::uoffset_t>(length / 4 + 1));
  check_program(length >= 8 && verifier.VerifyBuffer<fb::MLXGraph>(nullptr),
      "payload: expected a FlatBuffer with the root MLXGraph, got ", length, " invalid bytes");
  return flatbuffers::GetRoot<fb::MLXGraph>(bytes);
}

} // namespace executorch_mlx
