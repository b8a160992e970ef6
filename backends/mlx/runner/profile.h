// A profile of what a program runs, in the format of ExecuTorch's Inspector.
#pragma once

#include <executorch/devtools/etdump/etdump_flatcc.h>

#include <string>

namespace executorch_mlx {

// Throws std::runtime_error if nothing was traced or the file cannot be written.
// The tracer is of no use afterwards.
void write_profile(executorch::etdump::ETDumpGen& tracer, const std::string& path);

} // namespace executorch_mlx
