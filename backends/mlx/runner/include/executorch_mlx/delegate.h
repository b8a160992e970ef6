// The C API of libmlx_delegate.
#pragma once

extern "C" {

const char* executorch_mlx_version();

// Registers the backend MLXBackend with the ExecuTorch runtime of this process.
// 0: it is registered, now or by an earlier call. 1: the process has another
// MLXBackend, which stays. Otherwise the number of an ExecuTorch Error.
int executorch_mlx_register();

} // extern "C"
