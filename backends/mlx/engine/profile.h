// Writes the profile of a run for ExecuTorch's Inspector.
#pragma once

#include <executorch/devtools/etdump/etdump_flatcc.h>

#include <string>

namespace executorch_mlx {

// Writes what `tracer` recorded to the file `path`, in the ETDump format. The tracer cannot be used afterwards. Throws
// std::runtime_error if nothing was recorded or the file cannot be written.
void write_profile(executorch::etdump::ETDumpGen& tracer, const std::string& path);

} // namespace executorch_mlx
