#include "verdict_file.h"

#include <dlfcn.h>
#include <executorch_mlx/delegate.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <locale>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>
#include <variant>

#include "../error.h"

namespace executorch_mlx::gpu {

namespace {

constexpr char kHeader[] = "executorch-mlx kernels 1";
constexpr size_t kMaxBytes = 64 << 10;
constexpr const char* kOutcomes[] = {"used", "wrong", "slow", "failed", "crashed"}; // in the order of Outcome

// FNV-1a. It finds damage, not forgery: only the user can write the file.
uint64_t hash(const std::string& text) {
  uint64_t h = 0xCBF29CE484222325u;
  for (const unsigned char c : text) {
    h = (h ^ c) * 0x100000001B3u;
  }
  return h;
}

std::string hex(uint64_t number) {
  std::ostringstream stream;
  stream << std::hex << number;
  return stream.str();
}

std::string one_line(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

// The contents of a regular file of this user that nobody else can write, or nullopt.
std::optional<std::string> read_own_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) {
    return std::nullopt;
  }
  struct stat status{};
  const bool is_own = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
      (status.st_mode & (S_IWGRP | S_IWOTH)) == 0 && status.st_size <= static_cast<off_t>(kMaxBytes);
  std::string text(is_own ? kMaxBytes : 0, '\0');
  size_t size = 0;
  for (ssize_t count = 1; size < text.size() && count > 0; size += std::max<ssize_t>(count, 0)) {
    count = ::read(file, text.data() + size, text.size() - size);
  }
  close(file);
  text.resize(size);
  return is_own ? std::optional(text) : std::nullopt;
}

// Writes a new file and renames it, so that a reader sees the old contents or the new ones.
void replace_file(const std::string& path, const std::string& text) {
  std::string temporary = path + ".XXXXXX";
  const int file = mkstemp(temporary.data());
  if (file < 0) {
    return;
  }
  const bool is_complete = ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const bool is_closed = close(file) == 0;
  if (!is_complete || !is_closed || rename(temporary.c_str(), path.c_str()) != 0) {
    unlink(temporary.c_str());
  }
}

std::optional<std::pair<std::string, VerdictFile::Entry>> parse_entry(const std::string& line) {
  std::stringstream stream(line);
  stream.imbue(std::locale::classic());
  std::string name, outcome, rest;
  VerdictFile::Entry entry;
  auto& v = entry.verdict;
  stream >> name >> outcome >> v.error >> v.microseconds >> v.microseconds_without >> entry.process >> entry.attempts;
  const auto found = std::find(std::begin(kOutcomes), std::end(kOutcomes), outcome);
  if (!stream || stream >> rest || found == std::end(kOutcomes)) {
    return std::nullopt;
  }
  v.outcome = static_cast<Outcome>(found - std::begin(kOutcomes));
  return std::pair(name, entry);
}

std::string device_name() {
  const auto& info = mx::device_info(mx::Device(mx::Device::gpu));
  std::string result;
  for (const char* property : {"device_name", "architecture"}) {
    const auto found = info.find(property);
    const auto* text = found != info.end() ? std::get_if<std::string>(&found->second) : nullptr;
    result += str(text != nullptr ? *text : "", ", ");
  }
  return result;
}

// The version of the system, and that of NVIDIA's driver if there is one.
std::string system_version() {
  utsname system{};
  uname(&system);
  std::string driver;
  std::ifstream file("/proc/driver/nvidia/version");
  std::getline(file, driver);
  return str(system.sysname, " ", system.release, " ", system.version, ", ", driver);
}

// The version of this library. Builds of one version differ in the size and the time of their file.
std::string library_version() {
  Dl_info info{};
  struct stat status{};
  const bool is_found = dladdr(reinterpret_cast<const void*>(&executorch_mlx_version), &info) != 0 &&
      info.dli_fname != nullptr && stat(info.dli_fname, &status) == 0;
  return str(executorch_mlx_version(), " ", is_found ? status.st_size : 0, " ", is_found ? status.st_mtime : 0);
}

} // namespace

std::string verdict_key() {
  return one_line(
      str(device_name(), system_version(), ", MLX ", mx::version(), ", executorch-mlx ", library_version()));
}

std::string verdict_folder() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return str(cache, "/executorch-mlx");
  }
  const char* home = std::getenv("HOME");
  return home != nullptr && *home != '\0' ? str(home, "/.cache/executorch-mlx") : "";
}

VerdictFile::VerdictFile(const std::string& folder, std::string key)
    : folder_(folder), key_(std::move(key)), path_(str(folder, "/kernels-", hex(hash(key_)), ".txt")) {}

std::map<std::string, VerdictFile::Entry> VerdictFile::read() const {
  const auto text = folder_.empty() ? std::nullopt : read_own_file(path_);
  const size_t end = text ? text->rfind("sum ") : std::string::npos;
  if (end == std::string::npos || text->substr(end) != str("sum ", hex(hash(text->substr(0, end))), "\n")) {
    return {};
  }
  std::stringstream lines(text->substr(0, end));
  std::string header, key;
  std::getline(lines, header);
  std::getline(lines, key);
  if (header != kHeader || key != key_) {
    return {};
  }
  std::map<std::string, Entry> entries;
  for (std::string line; std::getline(lines, line);) {
    auto entry = parse_entry(line);
    if (!entry || !entries.insert(std::move(*entry)).second) {
      return {};
    }
  }
  return entries;
}

void VerdictFile::write(const std::map<std::string, Entry>& entries) const {
  if (folder_.empty()) {
    return;
  }
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << kHeader << "\n" << key_ << "\n";
  for (const auto& [name, entry] : entries) {
    const auto& v = entry.verdict;
    text << name << " " << kOutcomes[static_cast<int>(v.outcome)] << " " << v.error << " " << v.microseconds << " "
         << v.microseconds_without << " " << entry.process << " " << entry.attempts << "\n";
  }
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  replace_file(path_, str(text.str(), "sum ", hex(hash(text.str())), "\n"));
}

} // namespace executorch_mlx::gpu
