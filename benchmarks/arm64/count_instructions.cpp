// For count_instructions.py: computes a product with random integers a number of times, on one thread.
//
// count_instructions ISA KERNEL BITS TYPE ROWS CALLS
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "instruction_set.h"
#include "matmul.h"

namespace kernel = executorch_mlx::kernel;
using executorch_mlx::FloatType;

int main(int, char** argv) {
  constexpr int n = 64, k = 1024, group_size = 64;
  const std::string name = argv[2];
  const int bits = std::atoi(argv[3]), rows = std::atoi(argv[5]), calls = std::atoi(argv[6]);
  const auto type = static_cast<FloatType>(std::atoi(argv[4]));
  if (!kernel::use_instruction_set(argv[1])) {
    return 1;
  }
  std::vector<uint32_t> w(n * k, 0x3c1e78f0);
  std::vector<float> scales(n * k / group_size, 0.25f), x(rows * k, 0.5f), y(rows * n);
  if (type != FloatType::float32) {
    std::vector<uint16_t> halves(x.size(), 0x3e00);
    std::memcpy(x.data(), halves.data(), 2 * halves.size());
    std::memcpy(w.data(), std::vector<uint16_t>(n * k, 0x3e00).data(), 2 * n * k);
  }
  kernel::QuantizedMatmul p{.x = x.data(),
      .w = w.data(),
      .scales = scales.data(),
      .biases = scales.data(),
      .scale_type = FloatType::float32,
      .bits = bits,
      .group_size = group_size,
      .m = rows,
      .n = n,
      .k = k,
      .y = y.data(),
      .type = type};
  std::vector<float> panels(bits == 16 ? kernel::panels_size(type, n, k) / 4 : kernel::integer_panels_size(p) / 4);
  if (bits != 16) {
    kernel::pack_integer_panels(p, panels.data());
    p.integer_panels = panels.data();
  } else if (!panels.empty()) {
    kernel::pack_panels(w.data(), type, n, k, panels.data());
  }
  const kernel::HalfMatmul half{x.data(), reinterpret_cast<const uint16_t*>(w.data()), type, k, 1, rows, n, k, y.data(),
      type, FloatType::float32, panels.empty() ? nullptr : panels.data()};
  for (int i = 0; i < calls; ++i) {
    if (name == "halves") {
      kernel::half_matmul(&half, 1);
    } else {
      (name == "int8"              ? kernel::int8_matmul
              : name == "integers" ? kernel::integer_matmul
                                   : kernel::quantized_matmul)(&p, 1);
    }
  }
}
