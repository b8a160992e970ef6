// Speech models: their metadata, the samples that they take, and the tokens that may follow an answer so far.
// docs/speech.md specifies them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace executorch_mlx::engine {

class MetadataReader;

// The properties of a speech program. max_samples is 0 if the program is a language model.
struct SpeechMetadata {
  int64_t sample_rate = 0;
  int64_t min_samples = 0; // a shorter sound is padded with zeros
  int64_t max_samples = 0;
  int64_t sample_multiple = 1; // a sound is split into parts of this size; an incomplete last part becomes zeros
  int64_t timestamp_begin = -1; // the timestamp tokens are those from this one to the end of the vocabulary; -1: none
  int64_t max_initial_timestamp = -1; // the latest timestamp that may begin an answer, from 0; -1: any
  std::vector<int64_t> suppressed; // tokens that are never drawn
  std::vector<int64_t> suppressed_first; // tokens that do not begin an answer

  bool is_speech() const { return max_samples > 0; }
};

// Throws EngineError if values are invalid.
SpeechMetadata read_speech_metadata(const MetadataReader& reader, int64_t vocab_size, const std::string& path);

// Checks the sound of a request. Throws EngineError.
void check_samples(const SpeechMetadata& metadata, std::span<const float> samples);

// Returns the samples for a call of the program: `samples`, padded with zeros to a length that the program takes. If
// the last part of sample_multiple samples is incomplete, it becomes zeros.
std::vector<float> padded_samples(const SpeechMetadata& metadata, std::span<const float> samples);

// Clears the bits of the tokens that may not follow `answer`. The mask has a bit for each token, as that of
// executorch_mlx_allowed_tokens. If `timestamps` is true, the tokens must follow Whisper's rules for timestamps:
// timestamps come in pairs and do not decrease. `stop_id` is the first token that is not text, or -1.
void mask_speech_tokens(const SpeechMetadata& metadata, std::span<const int64_t> answer, bool timestamps,
    int64_t stop_id, int64_t vocab_size, std::span<int32_t> mask);

} // namespace executorch_mlx::engine
