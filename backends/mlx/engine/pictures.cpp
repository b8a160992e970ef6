#include "pictures.h"

#include <algorithm>

#include "check.h"
#include "llm_program.h"
#include "metadata.h"
#include "options.h"

namespace executorch_mlx::engine {

namespace {

constexpr int64_t kRopeAxes = PromptPictures::kRopeAxes;
constexpr int64_t kPictureId = int64_t{1} << 62; // the lowest id of a token of a picture

int64_t content_id(uint64_t hash, uint64_t index) {
  uint64_t h = (hash ^ (index * 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93;
  h = (h ^ (h >> 32)) * 0xD6E8FEB86659FD93;
  return kPictureId | static_cast<int64_t>((h ^ (h >> 32)) >> 2);
}

const std::vector<Picture>& pictures_of(const RequestOptions& options) {
  static const std::vector<Picture> kNone;
  return options.pictures == nullptr ? kNone : *options.pictures;
}

} // namespace

PictureMetadata read_picture_metadata(const MetadataReader& reader) {
  const char* const encoder = reader.has_method("audio_encoder") ? "audio_encoder" : "vision_encoder";
  return {.encoder = encoder,
      .is_taken = reader.has_method(encoder),
      .is_whole = reader.boolean("picture_is_whole", false),
      .has_rope_offset = reader.boolean("picture_rope_offset", false)};
}

void check_pictures(const LlmMetadata& metadata, const RequestOptions& options) {
  const auto& pictures = pictures_of(options);
  check_argument(pictures.empty() || metadata.pictures.is_taken, "pictures: the program takes none");
  int64_t end = 0;
  for (const Picture& picture : pictures) {
    check_argument(picture.size() > 0, "pictures: got one without tokens");
    check_argument(end <= picture.position && picture.end() <= std::ssize(options.prompt), "pictures: got one at [",
        picture.position, ", ", picture.end(), "), expected positions from ", end, " to ", options.prompt.size());
    check_argument(std::all_of(picture.rows.begin(), picture.rows.end(), [](int64_t row) { return row >= -1; }),
        "pictures: rows: expected at least -1");
    end = picture.end();
    const bool has_positions = std::ssize(picture.rope_positions) == kRopeAxes * picture.size();
    check_argument(metadata.pictures.has_rope_offset == has_positions, "pictures: rope_positions: got ",
        picture.rope_positions.size(), ", expected ",
        metadata.pictures.has_rope_offset ? kRopeAxes * picture.size() : 0);
    check_argument(!metadata.pictures.is_whole || picture.size() <= metadata.max_seq_len, "pictures: got one of ",
        picture.size(), " tokens, expected at most ", metadata.max_seq_len, " (get_max_seq_len)");
  }
}

std::vector<int64_t> content_ids(const RequestOptions& options) {
  std::vector<int64_t> ids = options.prompt;
  for (const Picture& picture : pictures_of(options)) {
    for (int64_t i = 0; i < picture.size(); ++i) {
      ids[picture.position + i] = content_id(picture.hash, static_cast<uint64_t>(i));
    }
  }
  return ids;
}

PromptPictures::PromptPictures(const RequestOptions& options)
    : options_(options), encoded_(pictures_of(options).size()) {}

bool PromptPictures::overlap(int64_t position, int64_t size) const {
  const auto& all = pictures_of(options_);
  return std::any_of(all.begin(), all.end(),
      [&](const Picture& picture) { return picture.position < position + size && position < picture.end(); });
}

int64_t PromptPictures::chunk_size(const LlmMetadata& metadata, int64_t position, int64_t size) const {
  if (!metadata.pictures.is_whole) {
    return size;
  }
  for (const Picture& picture : pictures_of(options_)) {
    if (picture.position == position) {
      return picture.size();
    }
    if (position < picture.position) {
      return std::min(size, picture.position - position);
    }
  }
  return size;
}

int64_t PromptPictures::reusable(const LlmMetadata& metadata, int64_t length) const {
  const auto& all = pictures_of(options_);
  return metadata.pictures.is_whole && !all.empty() && all.back().end() == length ? all.back().position : length - 1;
}

int64_t PromptPictures::rope_offset(int64_t position) const {
  int64_t offset = 0;
  for (const Picture& picture : pictures_of(options_)) {
    if (!picture.rope_positions.empty() && picture.end() <= position) {
      offset += picture.rope_length - picture.size();
    }
  }
  return offset;
}

void PromptPictures::show_tokens(std::span<int64_t> ids, int64_t position) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= kPictureId) {
      ids[i] = options_.prompt[position + i];
    }
  }
}

std::span<const float> PromptPictures::embeddings_of(LlmProgram& program, size_t picture) {
  if (encoded_[picture].empty()) {
    encoded_[picture] = program.encode_picture(pictures_of(options_)[picture]);
  }
  return encoded_[picture];
}

void PromptPictures::prepare(LlmProgram& program, RowTask& task) {
  const auto size = static_cast<int64_t>(task.tokens.size());
  const int64_t begin = task.position;
  task.rope_offset = rope_offset(begin);
  if (!overlap(begin, size)) {
    return;
  }
  tokens_.assign(task.tokens.begin(), task.tokens.end());
  show_tokens(tokens_, begin);
  embeddings_ = program.embed(tokens_);
  const size_t width = embeddings_.size() / tokens_.size();
  rope_positions_.resize(program.metadata().pictures.has_rope_offset ? kRopeAxes * size : 0);
  const auto set_rope = [&](int64_t axis, int64_t position, int64_t value) {
    if (!rope_positions_.empty()) {
      rope_positions_[axis * size + position - begin] = value;
    }
  };
  for (int64_t position = begin; position < begin + size; ++position) {
    for (int64_t axis = 0; axis < kRopeAxes; ++axis) {
      set_rope(axis, position, position + rope_offset(position));
    }
  }
  const auto& all = pictures_of(options_);
  for (size_t index = 0; index < all.size(); ++index) {
    const Picture& picture = all[index];
    const int64_t first = std::max(begin, picture.position), end = std::min(begin + size, picture.end());
    if (first >= end) {
      continue;
    }
    const std::span<const float> table = embeddings_of(program, index);
    const auto count = static_cast<int64_t>(table.size() / width);
    for (int64_t position = first; position < end; ++position) {
      const int64_t token = position - picture.position;
      const int64_t row = picture.rows[token];
      check_argument(row < count, "pictures: rows: got ", row, ", expected less than ", count);
      if (row >= 0) {
        std::copy_n(table.begin() + row * width, width, embeddings_.begin() + (position - begin) * width);
      }
      for (int64_t axis = 0; !rope_positions_.empty() && axis < kRopeAxes; ++axis) {
        const int64_t relative = picture.rope_positions[axis * picture.size() + token];
        set_rope(axis, position, picture.position + rope_offset(picture.position) + relative);
      }
    }
  }
  task.tokens = tokens_;
  task.embeddings = embeddings_;
  task.rope_positions = rope_positions_;
}

} // namespace executorch_mlx::engine
