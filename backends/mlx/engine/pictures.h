// Pictures in the prompts of vision-language models. The method vision_encoder computes embeddings of a picture, which
// take the place of those of the tokens at its positions. docs/llm-program.md specifies the methods.
#pragma once

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace executorch_mlx::engine {

class LlmProgram;
class MetadataReader;
struct LlmMetadata;
struct RequestOptions;
struct RowTask;

// The properties of a program that takes pictures.
struct PictureMetadata {
  std::string encoder; // the method that computes the embeddings
  bool is_taken = false; // if false, the program takes no pictures
  bool is_whole = false; // whether the tokens of a picture attend to each other, so that one call has to take them all
  bool has_rope_offset = false; // whether rotary positions differ from those in the cache
};
PictureMetadata read_picture_metadata(const MetadataReader& reader);

// A picture, or a part of one that the encoder takes by itself. Offsets are in its tokens.
struct Picture {
  struct Input { // of the encoder
    executorch::aten::ScalarType type;
    std::vector<executorch::aten::SizesType> sizes;
    std::vector<char> data;
  };
  std::vector<Input> inputs;
  int64_t position = 0; // of its first token in the prompt
  std::vector<int64_t> rows; // of the encoder's result: one for each token; -1: the token's own embedding
  uint64_t hash = 0; // of the content
  std::vector<int64_t> rope_positions; // [3, tokens] from the first one, or empty: consecutive
  int64_t rope_length = 0; // how many rotary positions it takes

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
  int64_t end() const { return position + size(); }
};

// Throws EngineError unless the pictures lie one behind the other in the prompt, and the program takes them.
void check_pictures(const LlmMetadata& metadata, const RequestOptions& options);

// Returns the ids by which the engine knows the tokens of a prompt. The tokens of pictures have ids outside of the
// vocabulary that depend on the content, so that equal ids stand for equal embeddings.
std::vector<int64_t> content_ids(const RequestOptions& options);

// The pictures of one request, for the calls that read its prompt. Used by the thread of the engine.
class PromptPictures {
 public:
  static constexpr int64_t kRopeAxes = 3; // time, height and width

  // `options` must outlive the object.
  explicit PromptPictures(const RequestOptions& options);

  // Whether a picture has tokens in the `size` positions from `position` on.
  bool overlap(int64_t position, int64_t size) const;

  // The largest number of tokens, at most `size`, that one call may take from `position` on. A call that has tokens of
  // a whole picture has these only.
  int64_t chunk_size(const LlmMetadata& metadata, int64_t position, int64_t size) const;

  // The number of tokens at the beginning of a prompt of `length` tokens that need not be in one call with the last.
  int64_t reusable(const LlmMetadata& metadata, int64_t length) const;

  // What to add to the position of a token of text to get its rotary position.
  int64_t rope_offset(int64_t position) const;

  // Completes the task of a call that reads ids of the row: sets the offset and, if there are tokens of pictures, the
  // tokens and embeddings, which are valid until the next call of this function. Throws EngineError.
  void prepare(LlmProgram& program, RowTask& task);

  // Frees the embeddings: the prompt is read.
  void forget() { encoded_.assign(encoded_.size(), {}); }

  // Replaces the ids of pictures in the beginning of `ids`, which are those of the request, by tokens of the
  // vocabulary.
  void show_tokens(std::span<int64_t> ids, int64_t position = 0) const;

 private:
  std::span<const float> embeddings_of(LlmProgram& program, size_t picture);

  const RequestOptions& options_;
  std::vector<std::vector<float>> encoded_; // by picture; empty: not computed
  std::vector<int64_t> tokens_, rope_positions_;
  std::vector<float> embeddings_;
};

} // namespace executorch_mlx::engine
