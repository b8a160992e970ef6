// Stands in for cuda_api.cpp on systems without CUDA.
#include <stdexcept>

#include "cuda_api.h"

namespace executorch_mlx::gpu {

namespace {

[[noreturn]] void fail_without_cuda() {
  throw std::logic_error("this system has no CUDA");
}

} // namespace

CUfunc_st* compile(const std::string&, const std::string&, mx::Stream) {
  fail_without_cuda();
}

void* address_on_gpu(const mx::array&) {
  fail_without_cuda();
}

KernelGraph::KernelGraph(mx::Stream stream) : stream_(stream), can_start_early_(false) {
  fail_without_cuda();
}

KernelGraph::~KernelGraph() = default;

void KernelGraph::add(CUfunc_st*, int, int, std::vector<void*>&, bool) {}

void KernelGraph::reads(const mx::array&) {}

void KernelGraph::writes(const mx::array&) {}

void KernelGraph::keeps(const mx::array&) {}

void KernelGraph::submit() {}

} // namespace executorch_mlx::gpu
