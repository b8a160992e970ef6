// Copies what a row holds to another row, to a file, or from a file.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "llm_program.h"
#include "rows.h"

namespace executorch_mlx {

// Copies what the buffers hold for the first `length` positions of the row `from` to the row `to`. `written` is
// Row::written of the row `from`. Returns false if that is not possible.
bool copy_buffers(const LlmProgram& program, int64_t from, int64_t to, int64_t length, int64_t written);

// Copies the first `length` positions of a row to another one. Returns false if that is not possible: if not all of the
// program's state is in MLX buffers.
bool copy_row(const LlmProgram& program, const Row& from, Row& to, int64_t length);

// A copy of what a row loses when more tokens are added to it: its states, and the contents of its ring buffers.
class RowContents {
 public:
  // The row holds `length` tokens, and no position behind them was written. The program must outlive the object. Throws
  // EngineError.
  RowContents(const LlmProgram& program, int64_t row, int64_t length);

  // Forgets the tokens that were added to the row since the object was created. Throws EngineError.
  void restore(Row& row) const;

  // The number of tokens that the row held.
  int64_t length() const {
    return length_;
  }

 private:
  const LlmProgram& program_;
  const int64_t length_;
  std::vector<std::vector<char>> overwritten_; // by buffer
};

// Writes a row to a file. Throws EngineError.
void save_row(const LlmProgram& program, const Row& row, const std::string& path);

// Opens a file that save_row() wrote, and returns a function that reads it into a row. Both throw EngineError: with
// INVALID_ARGUMENT for a file that is damaged, or of another program or format version. After an error of the function,
// which only finds damaged contents of buffers, the row holds nothing. The program must outlive the function.
std::function<void(Row&)> open_row(const LlmProgram& program, const std::string& path);

} // namespace executorch_mlx
