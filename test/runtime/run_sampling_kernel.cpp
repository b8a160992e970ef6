// For test_sample_kernel.py: runs the source code of the GPU sampler on the CPU, with several threads in a group.
//
// Reads requests from stdin and writes the tokens of each, int64 [rows], to stdout. A request is a Header, the logits,
// and five parameters of `rows` elements each: temperature, top_p, min_p (float32), seed, top_k (int64).
#include <barrier>
#include <cstdio>
#include <thread>
#include <vector>

#include "kernels/sampling/host.h"
//
#include "kernels/sampling/definition.inc"
//
#include "gpu/sample_kernel.inc"

namespace kernel = executorch_mlx_sample;

namespace {

struct Header {
  int32_t type; // 0: float32, 1: float16, 2: bfloat16
  int32_t rows;
  int32_t vocabulary;
  // A bit for each parameter, such as kTemperaturePerRow. If the bit is set, each row has an element of its own. If
  // not, all rows use the first element.
  int32_t per_row;
  int32_t threads; // in a group
  int32_t shared_keys; // number of keys that fit in the shared memory of a group
};

struct BFloat16 {
  uint16_t bits;
  operator float() const { return gpu_float(static_cast<uint32_t>(bits) << 16); }
};

template <typename T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != count) {
    std::exit(1);
  }
  return values;
}

class Barrier final : public executorch_mlx::gpu::GroupBarrier {
 public:
  explicit Barrier(uint32_t threads) : barrier_(threads) {}
  void wait() override { barrier_.arrive_and_wait(); }

 private:
  std::barrier<> barrier_;
};

// Starts a group of `threads` threads. Each of them calls run() with its index.
template <typename Run>
void run_group(uint32_t threads, const Run& run) {
  Barrier barrier(threads);
  std::vector<std::jthread> group;
  for (uint32_t thread = 0; thread < threads; ++thread) {
    group.emplace_back([&, thread] {
      executorch_mlx::gpu::group_barrier = &barrier;
      run(thread);
    });
  }
}

template <typename T>
void draw(const Header& h) {
  const auto rows = static_cast<uint32_t>(h.rows), vocabulary = static_cast<uint32_t>(h.vocabulary);
  const auto threads = static_cast<uint32_t>(h.threads);
  const auto logits = read<T>(static_cast<size_t>(rows) * vocabulary);
  const auto temperature = read<float>(rows), top_p = read<float>(rows), min_p = read<float>(rows);
  const auto seed = read<int64_t>(rows), top_k = read<int64_t>(rows);
  const uint32_t parts = rows * kernel::parts_of(vocabulary);
  std::vector<float> maximum(parts), weight(parts), values(threads);
  std::vector<uint32_t> argmax(parts), winner(parts), indices(threads);
  std::vector<uint64_t> keys(h.shared_keys);
  std::vector<uint64_t> all_keys(static_cast<size_t>(rows) * kernel::power_of_two_from(vocabulary));
  std::vector<int64_t> tokens(rows);
  std::atomic<uint32_t> counter[2];
  const auto parameters = [&](uint32_t row) {
    return kernel::read_parameters(
        temperature.data(), top_p.data(), seed.data(), top_k.data(), min_p.data(), h.per_row, row, rows, vocabulary);
  };
  run_group(threads, [&](uint32_t thread) {
    for (uint32_t group = 0; group < parts; ++group) {
      GPU_BARRIER();
      kernel::sample_parts_group(logits.data(), parameters(group / kernel::parts_of(vocabulary)), group, values.data(),
          indices.data(), thread, threads, maximum.data(), argmax.data(), weight.data(), winner.data());
    }
    for (uint32_t row = 0; row < rows; ++row) {
      GPU_BARRIER();
      kernel::sample_rows_group(logits.data(), parameters(row), row, maximum.data(), argmax.data(), weight.data(),
          winner.data(), values.data(), indices.data(), keys.data(), static_cast<uint32_t>(h.shared_keys), counter,
          thread, threads, all_keys.data(), tokens.data());
    }
  });
  std::fwrite(tokens.data(), sizeof(int64_t), tokens.size(), stdout);
}

} // namespace

int main() {
  Header header;
  while (std::fread(&header, sizeof(header), 1, stdin) == 1) {
    header.type == 0 ? draw<float>(header) : header.type == 1 ? draw<_Float16>(header) : draw<BFloat16>(header);
  }
}
