// Products of one row vector, or of a few, with matrices. A thread block keeps a single vector in shared memory. If it
// is the lazy result of an RMSNorm, each block computes the norm itself, because this takes less time than another
// kernel. Several vectors get a kernel for their norms, and are read from the cache. A product has the same bits in both
// cases.
#include <bit>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../error.h"
#include "cuda_kernel.h"
#include "fused.h"
#include "lazy.h"
#include "sequence_kernel.h"

namespace executorch_mlx::gpu {

namespace {

constexpr size_t kMaxMatrices = 4;
constexpr const char* kRowNames[kMaxMatrices] = {"kRows0", "kRows1", "kRows2", "kRows3"};
constexpr int kManyColumns = 4096;  // from here on, blocks are larger, because each one reads the whole vector
constexpr int64_t kMaxRowsOfProduct = 1 << 25;  // a launch counts its threads in 31 bits
constexpr size_t kMaxRowBytes = 40 << 10;  // of shared memory, of which a block has 48 KiB
constexpr size_t kMaxVectors = 8;          // whose sums fit in the registers

// How many loads of each row a thread issues before the row vector is ready. If the threads do not all fit on the GPU
// at once, those that start late find it ready, and should not queue its loads behind those of the weights.
constexpr int kEarlyLoads = 6;
constexpr int kFewEarlyLoads = 3;
constexpr int kManyThreads = 132 * 2048;  // of an H100 or H200

// The beginning of a kernel: `index` is the number of the warp.
const std::string kBegin = R"(
  const uint32_t lane = threadIdx.x % 32;
  uint32_t index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
)";

// Starts to load the rows w[0], w[1], ... of matrices. The text before it defines kCount and w. Each thread keeps
// kAhead loads of each row under way. The first kEarly of them are issued before x is ready, so that the block waits for
// the weights and for x at the same time.
const std::string kLoadWeights = R"(
  constexpr int kWide = 16 / sizeof(T);
  constexpr int kSteps = (kDepth + 32 * kWide - 1) / (32 * kWide);
  constexpr int kAhead = kSteps < 6 ? kSteps : 6;
  constexpr int kEarly = kAhead < kMaxEarly ? kAhead : kMaxEarly;
  uint4 weights[kCount][kAhead];
  const auto load = [&](int step) {
    const int i = (step * 32 + lane) * kWide;
    if (i < kDepth) {
      for (int m = 0; m < kCount; ++m) {
        weights[m][step % kAhead] = *reinterpret_cast<const uint4*>(w[m] + i);
      }
    }
  };
  #pragma unroll
  for (int step = 0; step < kEarly; ++step) {
    load(step);
  }
  wait_for_inputs();
)";

const std::string kLoadOtherWeights = R"(
  #pragma unroll
  for (int step = kEarly; step < kAhead; ++step) {
    load(step);
  }
)";

// Reads a vector into the `parts` of the threads of a block.
const std::string kReadVector = R"(
  constexpr int kParts = (kDepth / kWide + kThreads - 1) / kThreads;  // of the vector in each thread
  uint4 parts[kParts];
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = (part * kThreads + threadIdx.x) * kWide;
    parts[part] = i < kDepth ? *reinterpret_cast<const uint4*>(vector + i) : uint4{0, 0, 0, 0};
  }
)";

// Replaces a vector in `parts` by its RMSNorm with the weights `norm`.
const std::string kNormalize = str(R"(
  float squares = 0.0f;
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    for (int j = 0; j < kWide; ++j) {
      const float value = static_cast<float>(reinterpret_cast<const T*>(&parts[part])[j]);
      squares += value * value;
    }
  }
)", kSumSquares, R"(
  const float scale = rsqrtf(squares / kDepth + __int_as_float(kEps));
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = (part * kThreads + threadIdx.x) * kWide;
    for (int j = 0; i < kDepth && j < kWide; ++j) {
      T& value = reinterpret_cast<T*>(&parts[part])[j];
      value = static_cast<T>(static_cast<float>(value) * scale);
      value = static_cast<T>(static_cast<float>(norm[i + j]) * static_cast<float>(value));
    }
  }
)");

// Writes a vector from `parts` to `to`.
const std::string kWriteVector = R"(
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = (part * kThreads + threadIdx.x) * kWide;
    if (i < kDepth) {
      *reinterpret_cast<uint4*>(to + i) = parts[part];
    }
  }
)";

// Adds up the products of kVectors vectors with the rows of the warp. The element i of vector v is at
// vectors[v * kDepth + i]. sums[m][v] is the product with w[m], rounded to T.
const std::string kSums = R"(
  float sums[kCount][kVectors] = {};
  #pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint4 now[kCount];
    for (int m = 0; m < kCount; ++m) {
      now[m] = weights[m][step % kAhead];
    }
    if (step + kAhead < kSteps) {
      load(step + kAhead);
    }
    const int i = (step * 32 + lane) * kWide;
    if (i < kDepth) {
      #pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint4 values = *reinterpret_cast<const uint4*>(vectors + v * kDepth + i);
        for (int m = 0; m < kCount; ++m) {
          for (int j = 0; j < kWide; ++j) {
            sums[m][v] += static_cast<float>(reinterpret_cast<const T*>(&values)[j]) *
                static_cast<float>(reinterpret_cast<const T*>(&now[m])[j]);
          }
        }
      }
    }
  }
  for (int m = 0; m < kCount; ++m) {
    #pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      for (int other = 16; other > 0; other /= 2) {
        sums[m][v] += __shfl_xor_sync(0xFFFFFFFFu, sums[m][v], other);
      }
      sums[m][v] = static_cast<float>(static_cast<T>(sums[m][v]));
    }
  }
)";

// Computes the products of x, or with kNorm of rms_norm(x, norm), with rows of matrices: sums[m][v] for vector v of x.
std::string products_text(bool is_single) {
  if (!is_single) {
    return kLoadWeights + "  const T* const vectors = x;\n" + kLoadOtherWeights + kSums;
  }
  return kLoadWeights + R"(
  __shared__ __align__(16) T vectors[kDepth];
  const T* const vector = x;
  T* const to = vectors;
)" + kReadVector + kLoadOtherWeights + "  if (kNorm) {" + kNormalize + "  }\n" + kWriteVector + "  __syncthreads();\n" +
      kSums;
}

// The kernels for a single vector, and those for several.
struct Kernels {
  explicit Kernels(const std::function<SequenceKernel(bool)>& make) : single(make(true)), several(make(false)) {}

  const SequenceKernel& operator()(size_t vectors) const {
    return vectors == 1 ? single : several;
  }

  SequenceKernel single, several;
};

// A block normalizes a vector of x.
const SequenceKernel& norms_kernel() {
  static const SequenceKernel kernel("rms_norms", {"x", "norm"}, {}, {"y"}, {}, R"(
  constexpr int kWide = 16 / sizeof(T);
  const T* const vector = x + blockIdx.x * kDepth;
  T* const to = y + blockIdx.x * kDepth;
  wait_for_inputs();
)" + kReadVector + kNormalize + kWriteVector);
  return kernel;
}

// Defines `begin`, the offset of the warp's row in a matrix. A warp beyond the last row computes the last row again,
// and does not write the result.
const std::string kRow = "  const uint64_t begin = uint64_t(min(index, uint32_t(kRows0 - 1))) * kDepth;\n";

// Writes results: lane v those of vector v.
const std::string kForVectors = R"(
  #pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (lane == v) {
)";

// A warp computes silu(x . gate[index]) * (x . up[index]).
const SequenceKernel& gated_products_kernel(size_t vectors) {
  static const Kernels kernels([](bool is_single) {
    return SequenceKernel("gated_products", {"x", "norm"}, {"gate", "up"}, {"y"}, {}, kBegin + kRow + R"(
  constexpr int kCount = 2;
  const T* const w[kCount] = {gate + begin, up + begin};
)" + products_text(is_single) + kForVectors + R"(
      const float silu = static_cast<float>(static_cast<T>(sums[0][v] / (1.0f + expf(-sums[0][v]))));
      if (index < kRows0) {
        y[v * kRows0 + index] = static_cast<T>(silu * sums[1][v]);
      }
    }
  }
)");
  });
  return kernels(vectors);
}

// A warp computes x . matrix[index] + added[index].
const SequenceKernel& product_and_sum_kernel(size_t vectors) {
  static const Kernels kernels([](bool is_single) {
    return SequenceKernel("product_and_sum", {"x", "norm", "added"}, {"matrix"}, {"y"}, {}, kBegin + kRow + R"(
  constexpr int kCount = 1;
  const T* const w[kCount] = {matrix + begin};
)" + products_text(is_single) + kForVectors + R"(
      if (index < kRows0) {
        const int at = v * kRows0 + index;
        y[at] = static_cast<T>(sums[0][v] + static_cast<float>(added[at]));
      }
    }
  }
)");
  });
  return kernels(vectors);
}

// A warp computes x . w[index] for one row of the matrices w0 [kRows0, kDepth], w1, ... A warp beyond the last row
// computes the first row again, and does not write the result. `has_row` says so, because NVIDIA's compiler removes a
// comparison of the pointer with null.
const SequenceKernel& products_kernel(size_t matrices, size_t vectors) {
  const auto make = [](size_t count) {
    return Kernels([count](bool is_single) {
      std::vector<std::string> weights, outputs;
      std::string text = kBegin + "  constexpr int kCount = 1;\n  const T* w[kCount] = {w0};\n";
      text += "  T* y = y0;\n  int rows = kRows0;\n  bool has_row = false;\n";
      for (size_t i = 0; i < count; ++i) {
        weights.push_back(str("w", i));
        outputs.push_back(str("y", i));
        text += str(
            "  if (!has_row && index < kRows", i, ") { w[0] = w", i, " + uint64_t(index) * kDepth; y = y", i,
            " + index; rows = kRows", i, "; has_row = true; }\n");
        text += str("  if (!has_row) { index -= kRows", i, "; }\n");
      }
      text += products_text(is_single) + kForVectors + R"(
      if (has_row) {
        y[v * rows] = static_cast<T>(sums[0][v]);
      }
    }
  }
)";
      return SequenceKernel(str("products_of_row_", count), {"x", "norm"}, weights, outputs, {}, text);
    });
  };
  static const Kernels kernels[kMaxMatrices] = {make(1), make(2), make(3), make(4)};
  return kernels[matrices - 1](vectors);
}

// The number of vectors on the last axis of x, which is not empty.
size_t vectors_of(const mx::array& x) {
  return x.size() / x.shape(-1);
}

// Whether a kernel can multiply the vectors x by matrices.
bool are_valid_vectors(const mx::array& x) {
  if (x.ndim() == 0 || x.size() == 0 || !is_float(x.dtype())) {
    return false;
  }
  const size_t bytes = x.shape(-1) * x.itemsize();
  return bytes % 16 == 0 && vectors_of(x) <= kMaxVectors && (vectors_of(x) > 1 || bytes <= kMaxRowBytes);
}

// Whether w is a matrix [n, depth] that a kernel can multiply by the valid vectors x.
bool is_valid_matrix(const mx::array& w, const mx::array& x) {
  return w.dtype() == x.dtype() && w.ndim() == 2 && w.size() > 0 && w.shape(1) == x.shape(-1) && w.is_available() &&
      w.offset() == 0 && w.flags().row_contiguous;
}

// The number of threads of a block for vectors of `depth` elements.
int threads_of(int depth) {
  return depth < kManyColumns ? kThreads : 2 * kThreads;
}

// Runs a kernel with products_text(), for the vectors x. The number of rows of the first `count` matrices is the number
// of warps. If x is the lazy result of an RMSNorm, the kernel computes this, or another one of the sequence.
std::vector<mx::array> run(
    const SequenceKernel& kernel, const mx::array& x, const std::vector<mx::array>& matrices, size_t count,
    const std::optional<mx::array>& added, std::vector<mx::Shape> shapes, mx::Stream stream) {
  const mx::array& normalized = before_reshapes(x);
  const int depth = matrices[0].shape(1), threads = threads_of(depth), vectors = static_cast<int>(vectors_of(x));
  const FusibleNorm* const norm = norm_of(normalized, depth);
  const int eps = std::bit_cast<int>(norm != nullptr ? norm->eps : 0.0f);
  mx::array operand = norm != nullptr ? normalized.inputs()[0] : normalized;
  const mx::array weight = norm != nullptr ? normalized.inputs()[1] : operand;
  if (norm != nullptr && vectors > 1) {
    operand = norms_kernel()(
        {.inputs = {operand, weight}, .weights = {}, .shapes = {operand.shape()}, .dtype = x.dtype(), .numbers = {},
         .blocks = vectors, .threads = threads},
        {{"kThreads", threads}, {"kDepth", depth}, {"kEps", eps}}, stream)[0];
  }
  SequenceKernel::Call call{
      {operand, vectors > 1 ? operand : weight}, matrices, std::move(shapes), x.dtype(), {}, 0, threads};
  if (added) {
    call.inputs.push_back(*added);
  }
  int64_t rows = 0;
  for (size_t i = 0; i < count; ++i) {
    rows += matrices[i].shape(0);
  }
  call.blocks = blocks_of(rows, threads / kWarp);
  Constants constants{
      {"kThreads", threads}, {"kDepth", depth}, {"kVectors", vectors}, {"kNorm", norm != nullptr}, {"kEps", eps},
      {"kMaxEarly", int64_t{call.blocks} * threads > kManyThreads ? kFewEarlyLoads : kEarlyLoads}};
  for (size_t i = 0; i < count; ++i) {
    constants.push_back({kRowNames[i], matrices[i].shape(0)});
  }
  if (matrices.size() == 1 && !added) {
    call.product = std::pair(x, matrices[0]);
  }
  return kernel(std::move(call), std::move(constants), stream);
}

} // namespace

std::optional<std::vector<mx::array>> products_of_row(
    const mx::array& x, const std::vector<mx::array>& matrices, mx::Stream stream) {
  if (!is_cuda(stream) || !are_valid_vectors(x) || matrices.size() > kMaxMatrices || matrices.empty()) {
    return std::nullopt;
  }
  std::vector<mx::Shape> shapes;
  int64_t rows = 0;
  for (const auto& w : matrices) {
    if (!is_valid_matrix(w, x)) {
      return std::nullopt;
    }
    rows += w.shape(0);
    shapes.push_back(x.shape());
    shapes.back().back() = w.shape(0);
  }
  if (rows > kMaxRowsOfProduct) {
    return std::nullopt;
  }
  const size_t count = matrices.size();
  return run(products_kernel(count, vectors_of(x)), x, matrices, count, std::nullopt, std::move(shapes), stream);
}

std::optional<mx::array> gated_products(const mx::array& gate, const mx::array& up, mx::Stream stream) {
  const auto* const of_gate = SequenceKernel::product(gate);
  const auto* const of_up = SequenceKernel::product(up);
  if (!is_cuda(stream) || gate.shape() != up.shape() || of_gate == nullptr || of_up == nullptr ||
      of_gate->first.id() != of_up->first.id()) {
    return std::nullopt;
  }
  const auto& x = of_gate->first;
  return run(
      gated_products_kernel(vectors_of(x)), x, {of_gate->second, of_up->second}, 1, std::nullopt, {gate.shape()},
      stream)[0];
}

std::optional<mx::array> add_product(const mx::array& a, const mx::array& b, mx::Stream stream) {
  if (!is_cuda(stream) || a.shape() != b.shape() || a.dtype() != b.dtype()) {
    return std::nullopt;
  }
  const auto* const of_b = SequenceKernel::product(b);
  const auto* const product = of_b != nullptr ? of_b : SequenceKernel::product(a);
  if (product == nullptr) {
    return std::nullopt;
  }
  const auto& [x, w] = *product;
  return run(
      product_and_sum_kernel(vectors_of(x)), x, {w}, 1, of_b != nullptr ? a : b, {a.shape()}, stream)[0];
}

} // namespace executorch_mlx::gpu
