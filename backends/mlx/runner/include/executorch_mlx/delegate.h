// The C API of libmlx_delegate.
#pragma once

extern "C" {

const char* executorch_mlx_version();

// Registers the backend MLXBackend with the ExecuTorch runtime of this process.
// 0: it is registered, now or by an earlier call. 1: the process has another
// MLXBackend, which stays. Otherwise the number of an ExecuTorch Error.
int executorch_mlx_register();

// Sets a default that programs are loaded with from now on: "device", "cpu" or "gpu";
// "metal_kernels", "true" or "false"; "kv_windows", such as "512,512,0". The same names
// are ExecuTorch's load options of one load. 0, or the number of an ExecuTorch Error,
// of which the log says more.
int executorch_mlx_set_option(const char* key, const char* value);

} // extern "C"
