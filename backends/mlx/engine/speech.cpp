#include "speech.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "check.h"
#include "metadata.h"
#include "token_mask.h"

namespace executorch_mlx::engine {

namespace {

void forbid_range(std::span<int32_t> mask, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    forbid(mask, token);
  }
}

std::vector<int64_t> read_tokens(
    const MetadataReader& reader, const char* name, int64_t vocab_size, const std::string& path) {
  if (!reader.has_value(name)) {
    return {};
  }
  auto tokens = reader.integers(name);
  for (const int64_t token : tokens) {
    check_program(0 <= token && token < vocab_size, path, ": ", name, ": got ", token, ", expected a token in [0, ",
        vocab_size, ")");
  }
  return tokens;
}

} // namespace

SpeechMetadata read_speech_metadata(const MetadataReader& reader, int64_t vocab_size, const std::string& path) {
  SpeechMetadata m;
  if (!reader.has_method("encode")) {
    return m;
  }
  m.sample_rate = reader.integer("speech_sample_rate");
  m.min_samples = reader.integer("speech_min_samples");
  m.max_samples = reader.integer("speech_max_samples");
  m.sample_multiple = reader.integer("speech_sample_multiple", 1);
  m.timestamp_begin = reader.integer("speech_timestamp_begin", -1);
  m.max_initial_timestamp = reader.integer("speech_max_initial_timestamp", -1);
  m.suppressed = read_tokens(reader, "speech_suppressed", vocab_size, path);
  m.suppressed_first = read_tokens(reader, "speech_suppressed_first", vocab_size, path);
  const bool is_valid = m.sample_rate > 0 && 0 < m.min_samples && m.min_samples <= m.max_samples &&
      m.max_samples <= std::numeric_limits<int32_t>::max() && 0 < m.sample_multiple &&
      m.min_samples % m.sample_multiple == 0 && m.max_samples % m.sample_multiple == 0;
  check_program(is_valid, path, ": speech_max_samples: got ", m.min_samples, " to ", m.max_samples, " samples at ",
      m.sample_rate, " Hz in parts of ", m.sample_multiple, ", expected positive multiples");
  check_program(-1 <= m.timestamp_begin && m.timestamp_begin < vocab_size && m.timestamp_begin != 0, path,
      ": speech_timestamp_begin: got ", m.timestamp_begin, ", expected a token in [1, ", vocab_size, ")");
  check_program(-1 <= m.max_initial_timestamp && m.max_initial_timestamp < vocab_size, path,
      ": speech_max_initial_timestamp: got ", m.max_initial_timestamp, ", expected -1 to ", vocab_size - 1);
  return m;
}

void check_samples(const SpeechMetadata& metadata, std::span<const float> samples) {
  if (!metadata.is_speech()) {
    check_argument(
        samples.empty(), "samples: got ", samples.size(), ", expected none: the program is a language model");
    return;
  }
  check_argument(!samples.empty() && static_cast<int64_t>(samples.size()) <= metadata.max_samples, "samples: got ",
      samples.size(), ", expected 1 to ", metadata.max_samples, " at ", metadata.sample_rate, " Hz");
  const bool is_finite = std::all_of(samples.begin(), samples.end(), [](float x) { return std::isfinite(x); });
  check_argument(is_finite, "samples: got NaN or infinity, expected numbers in [-1, 1]");
}

std::vector<float> padded_samples(const SpeechMetadata& metadata, std::span<const float> samples) {
  const auto multiple = static_cast<size_t>(metadata.sample_multiple);
  const size_t rounded = (samples.size() + multiple - 1) / multiple * multiple;
  std::vector<float> result(std::max(rounded, static_cast<size_t>(metadata.min_samples)));
  const size_t whole = samples.size() / multiple * multiple;
  std::copy_n(samples.begin(), whole, result.begin());
  return result;
}

void mask_speech_tokens(const SpeechMetadata& metadata, std::span<const int64_t> answer, bool timestamps,
    int64_t stop_id, int64_t vocab_size, std::span<int32_t> mask) {
  const bool is_first = answer.empty();
  for (const int64_t token : metadata.suppressed) {
    forbid(mask, token);
  }
  if (is_first) {
    for (const int64_t token : metadata.suppressed_first) {
      forbid(mask, token);
    }
  }
  const int64_t begin = metadata.timestamp_begin;
  if (begin < 0 || !timestamps) {
    return;
  }
  forbid(mask, begin - 1); // the token that asks for an answer without timestamps
  const auto is_timestamp = [begin](int64_t token) { return token >= begin; };
  const size_t count = answer.size();
  const bool last_is_timestamp = count >= 1 && is_timestamp(answer[count - 1]);
  const bool previous_is_timestamp = count < 2 || is_timestamp(answer[count - 2]);
  if (last_is_timestamp && previous_is_timestamp) {
    forbid_range(mask, begin, vocab_size);
  } else if (last_is_timestamp && stop_id >= 0) {
    forbid_range(mask, 0, std::min(stop_id, vocab_size));
  }
  const auto latest = std::find_if(answer.rbegin(), answer.rend(), is_timestamp);
  if (latest != answer.rend()) {
    // A segment may begin at the end of the segment before it. The end of a segment is later than its begin.
    forbid_range(mask, begin, std::min(*latest + !(last_is_timestamp && !previous_is_timestamp), vocab_size));
  }
  if (is_first) {
    forbid_range(mask, 0, begin);
    if (metadata.max_initial_timestamp >= 0) {
      forbid_range(mask, std::min(begin + metadata.max_initial_timestamp + 1, vocab_size), vocab_size);
    }
  }
}

} // namespace executorch_mlx::engine
