// Copies what a row holds to another row, to a file, or from a file.
#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adapters.h"
#include "llm_program.h"
#include "rows.h"

namespace executorch_mlx::engine {

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
  int64_t length() const { return length_; }

 private:
  const LlmProgram& program_;
  const int64_t length_;
  std::vector<std::vector<char>> overwritten_; // by buffer
};

class InputFile;
class RowBuffers;

// Writes a row to a file, one buffer at a time, so that the engine can use other rows in between. The program must
// outlive the object.
class RowWriter {
 public:
  // Reads the file of the program, unless a RowWriter or RowReader has done so before. `adapter` is that of the row, or
  // null. Throws EngineError.
  RowWriter(const LlmProgram& program, const std::string& path, const Adapter* adapter);
  RowWriter(const RowWriter&) = delete;
  ~RowWriter(); // an incomplete file is removed

  // Writes the next buffer of a row, which must not change between the calls. Returns whether more buffers follow; if
  // not, the file is complete. Throws EngineError.
  bool write_next(const Row& row);

 private:
  void begin(const Row& row);
  void write(std::span<const char> bytes);
  void check_written(bool is_written) const;

  const std::string path_;
  const std::unique_ptr<RowBuffers> buffers_;
  const uint64_t program_hash_;
  std::string temporary_; // the name of the file until it is complete
  std::optional<std::ofstream> file_; // none before the first buffer
  uint64_t checksum_ = 0;
  size_t next_ = 0; // buffer
};

// Reads a row from a file that RowWriter wrote, one buffer at a time. The program must outlive the object.
class RowReader {
 public:
  // `adapters` are those that the row of the file may have been computed with. Throws EngineError: with
  // INVALID_ARGUMENT for a file that is damaged, or of another program, adapter or format version.
  RowReader(const LlmProgram& program, const std::string& path, const Adapters& adapters);
  RowReader(const RowReader&) = delete;
  ~RowReader();

  // The adapter that the row must have, or null.
  const std::shared_ptr<const Adapter>& adapter() const { return adapter_; }

  // Reads the next buffer into a row. Returns whether more buffers follow; if not, the row holds the tokens of the
  // file. Until then, and after an error, it holds nothing. Throws EngineError if the contents of the buffers are
  // damaged.
  bool read_next(Row& row);

 private:
  void read(std::span<char> target);

  const std::string path_;
  const std::unique_ptr<RowBuffers> buffers_;
  const std::unique_ptr<InputFile> file_;
  std::shared_ptr<const Adapter> adapter_;
  size_t rest_ = 0; // bytes of the file that are not read yet
  std::vector<int64_t> ids_;
  int64_t written_ = 0; // Row::written
  uint64_t expected_ = 0, checksum_ = 0;
  size_t next_ = 0; // buffer
};

} // namespace executorch_mlx::engine
