// Stands in for cuda_api.cpp on systems without CUDA.
#include <stdexcept>

#include "cuda_api.h"

namespace executorch_mlx::gpu {

namespace {

[[noreturn]] void fail_without_cuda() { throw std::runtime_error("this system has no CUDA"); }

} // namespace

int architecture(mx::Stream) { fail_without_cuda(); }

bool is_cuda(mx::Stream) { return false; }

std::string compile(const std::string&, const std::string&, mx::Stream) { fail_without_cuda(); }

CUfunc_st* load(const std::string&, const std::string&, mx::Stream) { fail_without_cuda(); }

void* address_on_gpu(const mx::array&) { fail_without_cuda(); }

std::unique_ptr<KernelGraph> KernelGraph::make(mx::Stream) { fail_without_cuda(); }

} // namespace executorch_mlx::gpu
