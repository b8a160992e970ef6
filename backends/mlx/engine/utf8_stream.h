// Converts a stream of bytes to valid UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace executorch_mlx::engine {

// Decodes bytes that may end in the middle of a character. An incomplete character is held back until its remaining
// bytes arrive. Invalid bytes become U+FFFD, as in Python's bytes.decode("utf-8", errors="replace").
class Utf8Stream {
 public:
  // Appends the characters that `bytes` completes to `text`.
  void feed(std::string_view bytes, std::string& text);

  // Ends the stream: appends U+FFFD to `text` if a character is incomplete. The next call of feed() begins a new
  // stream.
  void finish(std::string& text);

  // Drops an incomplete character and begins a new stream.
  void reset();

 private:
  void start_character(uint8_t byte, std::string& text);

  std::string held_; // the bytes of the incomplete character
  int missing_ = 0; // number of continuation bytes still to come
  uint8_t lowest_ = 0x80; // valid range of the next continuation byte
  uint8_t highest_ = 0xBF;
};

} // namespace executorch_mlx::engine
