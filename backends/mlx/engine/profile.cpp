#include "profile.h"

#include <cstdlib>
#include <fstream>
#include <memory>
#include <stdexcept>

namespace executorch_mlx::engine {

void write_profile(executorch::etdump::ETDumpGen& tracer, const std::string& path) {
  const auto dump = tracer.get_etdump_data();
  const std::unique_ptr<void, decltype(&std::free)> buffer(dump.buf, &std::free);
  if (dump.buf == nullptr || dump.size == 0) {
    throw std::runtime_error(path + ": no profile: no method ran");
  }
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(dump.buf), static_cast<std::streamsize>(dump.size));
  if (!file.flush()) {
    throw std::runtime_error(path + ": cannot write the file");
  }
}

void Profile::write(const std::string& path) {
  const auto held = lock();
  // Without a reset, the tracer would abort the process at the next event.
  const auto reset = [](executorch::etdump::ETDumpGen* tracer) { tracer->reset(); };
  const std::unique_ptr<executorch::etdump::ETDumpGen, decltype(reset)> tracer(&tracer_);
  write_profile(*tracer, path);
}

} // namespace executorch_mlx::engine
