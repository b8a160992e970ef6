// Rows of a table of embeddings, as the first kernel of a sequence.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../error.h"
#include "fused.h"
#include "lazy.h"
#include "sequence_kernel.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

constexpr int kMaxIndices = 64; // of one token for each row of a batch
constexpr int kUnit = 8; // numbers of a quantized row that a thread makes
constexpr int kBytesOfCopy = 16; // that a thread copies

// Thread `at` computes unit `column` of the row of index `at / kUnits`. As bounded_indices() has it, an index counts
// from the end if it is negative, and is limited to the table.
constexpr char kRow[] = R"(
  const uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  wait_for_inputs();
  if (at >= kCount * kUnits) {
    return;
  }
  const int64_t index = indices[at / kUnits];
  const int64_t bounded = max(min(index, int64_t(rows - 1)), -int64_t(rows));
  const uint64_t unit = uint64_t(bounded < 0 ? bounded + rows : bounded) * kUnits + at % kUnits;
)";

const SequenceKernel& copying_kernel() {
  static const SequenceKernel kernel("embedding", {"indices"}, {"table"}, {"y"}, {"rows"},
      str(kRow, "  reinterpret_cast<uint4*>(y)[at] = reinterpret_cast<const uint4*>(table)[unit];\n"));
  return kernel;
}

const SequenceKernel& quantized_kernel() {
  static const SequenceKernel kernel("quantized_embedding", {"indices"}, {"w", "scales", "biases"}, {"y"}, {"rows"},
      str(kRow, R"(
  const float scale = static_cast<float>(scales[unit * kUnit / kGroupSize]);
  const float bias = static_cast<float>(biases[unit * kUnit / kGroupSize]);
  for (int j = 0; j < kUnit; ++j) {
    const uint32_t word = w[unit * (kUnit * kBits / 32) + j * kBits / 32];
    const uint32_t integer = word >> j * kBits % 32 & ((1 << kBits) - 1);
    set(y[at * kUnit + j], scale * static_cast<float>(integer) + bias);
  }
)"),
      /*attributes=*/"", R"(
template <typename Y>
__device__ inline void set(Y& y, float number) {
  y = static_cast<Y>(number);
}
)");
  return kernel;
}

bool is_table(const mx::array& x) {
  return x.is_available() && x.ndim() == 2 && x.size() > 0 && x.flags().row_contiguous && x.offset() % 16 == 0;
}

} // namespace

std::optional<mx::array> embedding(const Matrix& table, const mx::array& indices, mx::Stream stream) {
  const auto& [w, scales, biases, group_size, bits] = table;
  const bool is_index = indices.dtype() == mx::int64 || indices.dtype() == mx::int32;
  if (!is_used(Kernel::embedding, stream) || !is_index || indices.size() == 0 || indices.size() > kMaxIndices ||
      !is_table(w)) {
    return std::nullopt;
  }
  const auto count = static_cast<int>(indices.size());
  SequenceKernel::Call call{{indices}, {w}, {indices.shape()}, w.dtype(), {w.shape(0)}, 0, kThreads};
  Constants constants{{"kThreads", kThreads}, {"kCount", count}};
  int units;
  if (scales) {
    const bool fits = (bits == 4 || bits == 8) && group_size % kUnit == 0 && w.dtype() == mx::uint32 &&
        is_table(*scales) && is_table(*biases) && scales->shape() == biases->shape() && is_half(scales->dtype()) &&
        biases->dtype() == scales->dtype() && scales->shape(0) == w.shape(0) &&
        int64_t{w.shape(1)} * 32 == int64_t{scales->shape(1)} * group_size * bits;
    if (!fits) {
      return std::nullopt;
    }
    units = scales->shape(1) * group_size / kUnit;
    call.weights.insert(call.weights.end(), {*scales, *biases});
    call.shapes[0].push_back(units * kUnit);
    call.dtype = scales->dtype();
    constants.insert(constants.end(), {{"kUnit", kUnit}, {"kBits", bits}, {"kGroupSize", group_size}});
  } else {
    const int64_t bytes = int64_t{w.shape(1)} * static_cast<int64_t>(w.itemsize());
    if (bytes % kBytesOfCopy != 0 || !is_float(w.dtype())) {
      return std::nullopt;
    }
    units = static_cast<int>(bytes / kBytesOfCopy);
    call.shapes[0].push_back(w.shape(1));
  }
  constants.push_back({"kUnits", units});
  call.blocks = blocks_of(size_t(count) * units, kThreads);
  return (scales ? quantized_kernel() : copying_kernel())(std::move(call), std::move(constants), stream)[0];
}

} // namespace executorch_mlx::gpu
