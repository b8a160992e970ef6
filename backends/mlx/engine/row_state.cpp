#include "row_state.h"

#include <executorch_mlx/buffers.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <thread>

#include "check.h"
#include "option_checks.h"

namespace executorch_mlx::engine {

namespace {

// Joins the thread at the end of its scope. The C++ library of older Xcodes has no std::jthread.
struct JoiningThread {
  std::thread thread;
  ~JoiningThread() {
    if (thread.joinable()) thread.join();
  }
};

// The header of a file. The file consists of this header, the token ids of the row, and the contents of
// LlmProgram::prompt_buffers() in the order of executorch_mlx/buffers.h. The sizes of these contents follow from the
// program and the header.
struct Header {
  char magic[8] = {'E', 'X', 'M', 'L', 'X', 'P', 'F', 'X'};
  uint64_t version = 1;
  uint64_t program = 0; // hash of the .pte file, and of the weights of the adapter if there is one
  uint64_t num_ids = 0;
  int64_t written = 0; // Row::written
  uint64_t num_bytes = 0; // of the contents of the buffers
  uint64_t checksum = 0; // of the file, with 0 in place of the checksum
};

// Computes a 64-bit hash that depends on all bytes and on `seed`. Eight independent lanes make it as fast as the
// memory.
class Hash {
 public:
  static constexpr size_t kBlock = 64;

  explicit Hash(uint64_t seed) {
    for (uint64_t i = 0; i < 8; ++i) {
      lanes_[i] = (seed + i + 1) * kFactor;
    }
  }

  // Adds bytes. Only the last addition may have a size that is not a multiple of kBlock.
  void add(std::span<const char> bytes) {
    size_ += bytes.size();
    while (bytes.size() >= kBlock) {
      add_block(bytes.data());
      bytes = bytes.subspan(kBlock);
    }
    std::copy(bytes.begin(), bytes.end(), rest_);
  }

  // Returns the hash, after the last addition.
  uint64_t value() {
    add_block(rest_);
    uint64_t result = size_;
    for (const uint64_t lane : lanes_) {
      result = (result ^ lane ^ (lane >> 31)) * kFactor;
      result ^= result >> 29;
    }
    return result;
  }

 private:
  static constexpr uint64_t kFactor = 0x9FB21C651E98DF25; // odd, with irregular bits

  void add_block(const char* block) {
    for (size_t i = 0; i < 8; ++i) {
      uint64_t word;
      std::memcpy(&word, block + 8 * i, sizeof(word));
      lanes_[i] = std::rotl((lanes_[i] ^ word) * kFactor, 29);
    }
  }

  uint64_t lanes_[8];
  char rest_[kBlock] = {};
  uint64_t size_ = 0;
};

uint64_t hash(std::span<const char> bytes, uint64_t seed) {
  Hash result(seed);
  result.add(bytes);
  return result.value();
}

std::span<const char> as_bytes(std::span<const int64_t> ids) {
  return {reinterpret_cast<const char*>(ids.data()), ids.size_bytes()};
}

std::span<const char> as_bytes(const Header& header) {
  return {reinterpret_cast<const char*>(&header), sizeof(header)};
}

uint64_t hash_of(const Header& header) { return hash(as_bytes(header), 0); }

} // namespace

// A regular file, which is read from its beginning. It is not mapped: a read of a map is a fatal signal if another
// process has truncated the file.
class InputFile {
 public:
  explicit InputFile(const std::string& path) : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    check(file_ >= 0, EXECUTORCH_MLX_NOT_FOUND, path, ": cannot read the file");
    struct stat status = {};
    if (fstat(file_, &status) == 0 && S_ISREG(status.st_mode)) {
      size_ = static_cast<size_t>(status.st_size);
    }
    if (size_ == 0) {
      close(file_);
      check_argument(false, path, ": the file is empty, or not a regular file");
    }
  }
  InputFile(const InputFile&) = delete;
  ~InputFile() { close(file_); }

  // The size that the file had when it was opened.
  size_t size() const { return size_; }

  // Reads bytes into `target`, and returns how many: fewer than asked for at the end of the file or after an error.
  size_t read(std::span<char> target) {
    size_t done = 0;
    while (done < target.size()) {
      const ssize_t count = ::read(file_, target.data() + done, target.size() - done);
      if (count > 0) {
        done += static_cast<size_t>(count);
      } else if (count == 0 || errno != EINTR) {
        break;
      }
    }
    return done;
  }

 private:
  const int file_;
  size_t size_ = 0;
};

// Buffers of a program, and the range of each that a row uses.
class RowBuffers {
 public:
  RowBuffers(const LlmProgram& program, std::shared_ptr<executorch_mlx_buffers> buffers)
      : program_(program), buffers_(std::move(buffers)) {
    check_argument(buffers_ != nullptr, "prefix: the program keeps its cache outside of MLX");
    for (size_t i = 0; i < executorch_mlx_buffers_count(buffers_.get()); ++i) {
      if (!is_of_adapters(i)) {
        indices_.push_back(i);
      }
    }
  }

  size_t count() const { return indices_.size(); }

  struct Range {
    int64_t begin; // index on axis 2 at which the row begins
    int64_t count; // number of indices from there on
    size_t bytes; // size of their contents
  };
  // Returns the range of a buffer that holds the first `length` positions of a row. If later positions overwrite
  // earlier ones, the range is all that was written.
  Range range(size_t buffer, int64_t row, int64_t length, int64_t written) const {
    const auto [capacity, index_bytes] = size_of_row(buffer);
    const int64_t count = std::min(capacity, is_overwritten(buffer) ? written : length);
    return {row * capacity, count, static_cast<size_t>(count) * index_bytes};
  }

  // The range that holds all tokens of a row.
  Range range_of(size_t buffer, const Row& row) const {
    return range(buffer, row.index, static_cast<int64_t>(row.ids.size()), row.written);
  }

  // Whether later positions overwrite earlier ones. This is so if the rows of the buffer are shorter than the context:
  // they are ring buffers or states.
  bool is_overwritten(size_t buffer) const {
    return size_of_row(buffer).capacity < program_.metadata().max_context_len;
  }

  void copy(size_t buffer, int64_t from, int64_t to, int64_t count) {
    check_call(executorch_mlx_buffers_copy(buffers_.get(), indices_[buffer], from, to, count), buffer);
  }
  void read(size_t buffer, const Range& range, char* data) {
    check_call(executorch_mlx_buffers_read(buffers_.get(), indices_[buffer], range.begin, range.count, data), buffer);
  }
  void write(size_t buffer, const Range& range, const char* data) {
    check_call(executorch_mlx_buffers_write(buffers_.get(), indices_[buffer], range.begin, range.count, data), buffer);
  }

 private:
  struct Size {
    int64_t capacity; // number of indices on axis 2 of a row
    size_t index_bytes; // size of the contents of each
  };
  Size size_of_row(size_t buffer) const {
    int64_t size = 0;
    size_t index_bytes = 0;
    executorch_mlx_buffers_size(buffers_.get(), indices_[buffer], &size, &index_bytes);
    const int64_t rows = program_.metadata().rows;
    check(size > 0 && size % rows == 0, EXECUTORCH_MLX_FAILED, "prefix: the buffer ", describe(buffer), " has no rows");
    return {size / rows, index_bytes};
  }

  void check_call(int error, size_t buffer) const {
    check_ok(static_cast<executorch::runtime::Error>(error), "prefix: buffer ", describe(buffer), ": ");
  }

  const char* describe(size_t buffer) const {
    return executorch_mlx_buffers_describe(buffers_.get(), indices_[buffer]);
  }

  // Whether a buffer has the slots of adapters, and no rows.
  bool is_of_adapters(size_t index) const {
    constexpr std::string_view kModule = "adapters.";
    return program_.metadata().adapter_slots > 0 &&
        std::string_view(executorch_mlx_buffers_describe(buffers_.get(), index)).find(kModule) !=
        std::string_view::npos;
  }

  const LlmProgram& program_;
  const std::shared_ptr<executorch_mlx_buffers> buffers_;
  std::vector<size_t> indices_; // of the buffers with rows
};

namespace {

// The buffers that a file holds. Throws EngineError unless the model has one part: a file would hold only the part of
// the row that this process has.
std::unique_ptr<RowBuffers> checked_buffers(const LlmProgram& program) {
  return std::make_unique<RowBuffers>(program, program.prompt_buffers());
}

uint64_t program_hash(const LlmProgram& program) {
  return program.hash([&] {
    InputFile file(program.path());
    std::vector<char> part(size_t{1} << 20);
    Hash result(0);
    while (const size_t count = file.read(part)) {
      result.add(std::span(part).first(count));
    }
    return result.value();
  });
}

// Returns 0 for no adapter.
uint64_t hash_of(const Adapter* adapter) {
  uint64_t result = 0;
  if (adapter != nullptr) {
    for (const auto& matrix : adapter->weights) {
      result = hash({reinterpret_cast<const char*>(matrix.data()), matrix.size() * sizeof(float)}, result);
    }
  }
  return result;
}

// Copies what the buffers hold for the first `length` positions of the row `from` to the row `to`. `written` is
// Row::written of the row `from`. Returns false if that is not possible.
bool copy_buffers(const LlmProgram& program, int64_t from, int64_t to, int64_t length, int64_t written) {
  try {
    RowBuffers buffers(program, program.open_buffers());
    for (size_t i = 0; i < buffers.count(); ++i) {
      const auto source = buffers.range(i, from, length, written);
      const auto target = buffers.range(i, to, length, written);
      buffers.copy(i, source.begin, target.begin, source.count);
    }
    return true;
  } catch (const EngineError&) { // the log has the details
    return false;
  }
}

} // namespace

RowContents::RowContents(const LlmProgram& program, int64_t row, int64_t length) : program_(program), length_(length) {
  RowBuffers buffers(program, program.prompt_buffers());
  for (size_t i = 0; i < buffers.count(); ++i) {
    auto& contents = overwritten_.emplace_back();
    if (buffers.is_overwritten(i)) {
      const auto range = buffers.range(i, row, length, length);
      contents.resize(range.bytes);
      buffers.read(i, range, contents.data());
    }
  }
}

void RowContents::restore(Row& row) const {
  RowBuffers buffers(program_, program_.prompt_buffers());
  for (size_t i = 0; i < buffers.count(); ++i) {
    if (buffers.is_overwritten(i)) {
      buffers.write(i, buffers.range(i, row.index, length_, length_), overwritten_[i].data());
    }
  }
  row.truncate(length_);
  row.written = length_;
}

bool copy_row(const LlmProgram& program, const Row& from, Row& to, int64_t length) {
  if (!program.has_only_mlx_state()) {
    return false;
  }
  if (!copy_buffers(program, from.index, to.index, length, from.written)) {
    to.truncate(0);
    return false;
  }
  to.ids.assign(from.ids.begin(), from.ids.begin() + length);
  to.written = from.written;
  to.mtp_length = from.mtp_length;
  to.truncate(length);
  return true;
}

RowWriter::RowWriter(const LlmProgram& program, const std::string& path, const Adapter* adapter)
    : path_(path), buffers_(checked_buffers(program)), program_hash_(program_hash(program) ^ hash_of(adapter)) {
  // The file replaces what has its name. That must not be a device, such as /dev/null.
  std::error_code error;
  const bool is_other = std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error);
  check_argument(!is_other, path, ": expected a regular file, or a path where nothing is");
}

RowWriter::~RowWriter() {
  if (!temporary_.empty()) {
    std::remove(temporary_.c_str()); // has no effect after the file was renamed
  }
}

void RowWriter::begin(const Row& row) {
  // The file has a temporary name until it is complete. The name is random, because other engines may save to the path
  // at the same time.
  std::random_device random;
  temporary_ = str(path_, ".", random(), random(), ".tmp");
  file_.emplace(temporary_, std::ios::binary);
  check_written(file_->is_open());
  Header header;
  header.program = program_hash_;
  header.num_ids = row.ids.size();
  header.written = row.written;
  for (size_t i = 0; i < buffers_->count(); ++i) {
    header.num_bytes += buffers_->range_of(i, row).bytes;
  }
  checksum_ = hash(as_bytes(row.ids), hash_of(header));
  write(as_bytes(header));
  write(as_bytes(row.ids));
}

bool RowWriter::write_next(const Row& row) {
  if (next_ == 0) {
    begin(row);
  }
  if (next_ < buffers_->count()) {
    const auto range = buffers_->range_of(next_, row);
    std::vector<char> bytes(range.bytes);
    buffers_->read(next_, range, bytes.data());
    checksum_ = hash(bytes, checksum_);
    write(bytes);
    ++next_;
  }
  if (next_ < buffers_->count()) {
    return true;
  }
  file_->seekp(offsetof(Header, checksum));
  write({reinterpret_cast<const char*>(&checksum_), sizeof(checksum_)});
  file_->close();
  check_written(*file_ && std::rename(temporary_.c_str(), path_.c_str()) == 0);
  return false;
}

void RowWriter::check_written(bool is_written) const {
  check(is_written, EXECUTORCH_MLX_FAILED, path_, ": cannot write the file");
}

void RowWriter::write(std::span<const char> bytes) {
  file_->write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

RowReader::RowReader(const LlmProgram& program, const std::string& path, const Adapters& adapters)
    : path_(path), buffers_(checked_buffers(program)), file_(std::make_unique<InputFile>(path)) {
  Header header;
  const std::span<char> bytes(reinterpret_cast<char*>(&header), sizeof(header));
  const bool has_header =
      file_->read(bytes) == bytes.size() && std::memcmp(header.magic, Header().magic, sizeof(header.magic)) == 0;
  check_argument(has_header, path, ": not a prompt cache");
  check_argument(header.version == Header().version, path, ": got format version ", header.version, ", expected ",
      Header().version);
  const uint64_t of_adapter = header.program ^ program_hash(program);
  if (of_adapter != 0) {
    adapter_ = adapters.find_if([&](const Adapter& adapter) { return hash_of(&adapter) == of_adapter; });
    check_argument(adapter_ != nullptr, path, ": the prompt cache of another program",
        program.metadata().adapter_slots > 0 ? ", or of an adapter that is not loaded" : "");
  }
  rest_ = file_->size() - bytes.size();
  const bool is_complete =
      header.num_ids <= rest_ / sizeof(int64_t) && header.num_bytes == rest_ - header.num_ids * sizeof(int64_t);
  check_argument(is_complete, path, ": the file is incomplete");
  ids_.resize(header.num_ids);
  read({reinterpret_cast<char*>(ids_.data()), ids_.size() * sizeof(int64_t)});
  check_prompt(program.metadata(), ids_, "prefix");
  written_ = header.written;
  const bool is_possible = std::ssize(ids_) <= written_ && written_ <= program.metadata().max_context_len;
  check_argument(is_possible, path, ": the file is damaged");
  expected_ = std::exchange(header.checksum, 0);
  checksum_ = hash(as_bytes(ids_), hash_of(header));
}

RowReader::~RowReader() = default;

void RowReader::read(std::span<char> target) {
  check_argument(target.size() <= rest_ && file_->read(target) == target.size(), path_, ": the file is damaged");
  rest_ -= target.size();
}

bool RowReader::read_next(Row& row) {
  row.truncate(0);
  // The row is written before the checksum is known, so that the file is read once.
  if (next_ < buffers_->count()) {
    const auto range = buffers_->range(next_, row.index, std::ssize(ids_), written_);
    std::vector<char> bytes(range.bytes);
    read(bytes);
    // The checksum is computed while the buffer is written.
    JoiningThread sum{std::thread([&] { checksum_ = hash(bytes, checksum_); })};
    buffers_->write(next_, range, bytes.data());
    sum.thread.join();
    ++next_;
  }
  if (next_ < buffers_->count()) {
    return true;
  }
  check_argument(rest_ == 0 && checksum_ == expected_, path_, ": the file is damaged");
  row.append(ids_);
  row.written = std::max(row.written, written_);
  return false;
}

} // namespace executorch_mlx::engine
