#include "utf8_stream.h"

namespace executorch_mlx::engine {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

} // namespace

void Utf8Stream::reset() {
  held_.clear();
  missing_ = 0;
  lowest_ = 0x80;
  highest_ = 0xBF;
}

// Handles the lead byte of a character, according to table 3-7 of the Unicode standard. After the lead bytes E0, ED, F0
// and F4, the range of the second byte is narrower, to exclude overlong forms, surrogates and code points beyond
// U+10FFFF.
void Utf8Stream::start_character(uint8_t byte, std::string& text) {
  if (byte < 0x80) {
    text.push_back(static_cast<char>(byte));
    return;
  }
  if (byte < 0xC2 || byte > 0xF4) {
    text += kReplacement;
    return;
  }
  missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  lowest_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  highest_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
  held_.push_back(static_cast<char>(byte));
}

void Utf8Stream::feed(std::string_view bytes, std::string& text) {
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    if (missing_ > 0 && (byte < lowest_ || byte > highest_)) {
      finish(text);
    }
    if (missing_ == 0) {
      start_character(byte, text);
      continue;
    }
    held_.push_back(c);
    lowest_ = 0x80;
    highest_ = 0xBF;
    if (--missing_ == 0) {
      text += held_;
      reset();
    }
  }
}

void Utf8Stream::finish(std::string& text) {
  if (missing_ > 0) {
    text += kReplacement;
  }
  reset();
}

} // namespace executorch_mlx::engine
