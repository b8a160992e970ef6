// Lets products of matrices wait. To be preloaded: it replaces cblas_sgemm, which MLX calls while it evaluates.
#include <dlfcn.h>

#include <atomic>
#include <semaphore>

namespace {

std::atomic<bool> are_blocked = false;
std::counting_semaphore<> started(0), permitted(0);

} // namespace

// From now on, products wait.
extern "C" void block_products() { are_blocked = true; }

// Returns when a product has started. It waits for a call of permit_product().
extern "C" void wait_for_product() { started.acquire(); }

extern "C" void permit_product() { permitted.release(); }

extern "C" void cblas_sgemm(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
    int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  if (are_blocked) {
    started.release();
    permitted.acquire();
  }
  reinterpret_cast<decltype(&cblas_sgemm)>(dlsym(RTLD_NEXT, "cblas_sgemm"))(
      layout, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
