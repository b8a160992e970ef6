// Text out of tokens whose bytes may end in the middle of a character.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace executorch_mlx {

// Takes bytes as they come and gives valid UTF-8 back: the start of a character
// is held until the rest of it is there, and what cannot be part of any becomes
// U+FFFD, as in Python's bytes.decode("utf-8", errors="replace").
class Utf8Stream {
 public:
  // Appends to `text` the characters that `bytes` completes.
  void feed(std::string_view bytes, std::string& text);

  // Nothing more comes: a character that was begun becomes U+FFFD.
  void finish(std::string& text);

  void reset();

 private:
  void start(uint8_t byte, std::string& text);

  std::string held_;
  int missing_ = 0; // continuation bytes still to come
  uint8_t lowest_ = 0x80; // what the next of them may be
  uint8_t highest_ = 0xBF;
};

} // namespace executorch_mlx
