// Products of one row vector, or of a few, with matrices. For a single vector, each block computes its RMSNorm itself,
// because this takes less time than another kernel. Several vectors get a kernel for their norms.
#include <algorithm>
#include <bit>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../error.h"
#include "mlx_internals/cuda.h"
#include "cuda_kernel.h"
#include "fused.h"
#include "lazy.h"
#include "metal.h"
#include "metal_products.h"
#include "product_text.h"
#include "sequence_kernel.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

constexpr size_t kMaxMatrices = 4;
constexpr const char* kRowNames[kMaxMatrices] = {"kRows0", "kRows1", "kRows2", "kRows3"};
constexpr int64_t kMaxRowsOfProduct = 1 << 25; // a launch counts its threads in 31 bits
constexpr size_t kMaxRowBytes = 40 << 10; // of shared memory, of which a block has 48 KiB
constexpr int kNormWeight = 1; // the number of this input
constexpr int64_t kRowsForPairs = 2048; // two warps for each sub-processor of an H100 or H200, approximately
constexpr int kVersionOfTensorCores = 80; // of the architecture, from which on they multiply bfloat16

// How many loads of each row a thread issues before the row vector is ready. If the threads do not all fit on the GPU
// at once, those that start late find it ready, and should not queue its loads behind those of the weights.
constexpr int kEarlyLoads = 6;
constexpr int kFewEarlyLoads = 3;
constexpr int kManyThreads = 132 * 2048; // of an H100 or H200

// The blocks that multiply one vector. If a matrix has more rows than these have warps, a warp goes on with other rows.
constexpr int kMaxBlocksOfRow = kManyThreads / kThreads;

// The kernels of an operation, one for each method.
class Kernels {
 public:
  explicit Kernels(const std::function<SequenceKernel(ProductMethod)>& make)
      : kernels_{make(ProductMethod::single), make(ProductMethod::few), make(ProductMethod::in_tiles)} {}

  const SequenceKernel& operator()(ProductMethod method) const { return kernels_[static_cast<int>(method)]; }

 private:
  SequenceKernel kernels_[3];
};

// A block normalizes a vector of x.
const SequenceKernel& norms_kernel() {
  static const SequenceKernel kernel("rms_norms", {"x", "norm"}, {}, {"y"}, {}, norm_text());
  return kernel;
}

// silu(x . gate[row]) * (x . up[row])
const Kernels& gated_products_kernels() {
  static const Kernels kernels([](ProductMethod method) {
    return SequenceKernel("gated_products", {"x", "norm"}, {"gate", "up"}, {"y"}, {}, product_text(method, R"(
  constexpr int kCount = 2;
  const auto summand_of = [](uint32_t, int) { return 0.0f; };
  const auto rows_of = [&](uint32_t row, const T* (&w)[kCount]) {
    const uint64_t begin = uint64_t(min(row, uint32_t(kRows0 - 1))) * kDepth;
    w[0] = gate + begin;
    w[1] = up + begin;
  };
  const auto finish = [&](uint32_t row, int v, const float (&products)[kCount], float) {
    const float silu = static_cast<float>(static_cast<T>(products[0] / (1.0f + expf(-products[0]))));
    if (row < kRows0) {
      y[v * kRows0 + row] = static_cast<T>(silu * products[1]);
    }
  };
)"),
        product_attributes(method));
  });
  return kernels;
}

// x . matrix[row] + added[row]
const Kernels& product_and_sum_kernels() {
  static const Kernels kernels([](ProductMethod method) {
    return SequenceKernel("product_and_sum", {"x", "norm", "added"}, {"matrix"}, {"y"}, {}, product_text(method, R"(
  constexpr int kCount = 1;
  const auto rows_of = [&](uint32_t row, const T* (&w)[kCount]) {
    w[0] = matrix + uint64_t(min(row, uint32_t(kRows0 - 1))) * kDepth;
  };
  const auto summand_of = [&](uint32_t row, int v) {
    return row < kRows0 ? static_cast<float>(added[v * kRows0 + row]) : 0.0f;
  };
  const auto finish = [&](uint32_t row, int v, const float (&products)[kCount], float summand) {
    if (row < kRows0) {
      y[v * kRows0 + row] = static_cast<T>(products[0] + summand);
    }
  };
)"),
        product_attributes(method));
  });
  return kernels;
}

// x . w[row] for the matrices w0 [kRows0, kDepth], w1, ...: the rows are counted over all matrices. `find` returns
// whether there is a row, because NVIDIA's compiler removes a comparison of its address with null.
const Kernels& products_kernels(size_t matrices) {
  const auto make = [](size_t count) {
    return Kernels([count](ProductMethod method) {
      std::vector<std::string> weights, outputs;
      std::string find = R"(
  constexpr int kCount = 1;
  const auto summand_of = [](uint32_t, int) { return 0.0f; };
  const auto find = [&](uint32_t row, const T*& w, T*& y, int& rows) {
)";
      for (size_t i = 0; i < count; ++i) {
        weights.push_back(str("w", i));
        outputs.push_back(str("y", i));
        find += str("    if (row < kRows", i, ") { w = w", i, " + uint64_t(row) * kDepth; y = y", i,
            " + row; rows = kRows", i, "; return true; }\n    row -= kRows", i, ";\n");
      }
      find += R"(    return false;
  };
  const auto rows_of = [&](uint32_t row, const T* (&w)[kCount]) {
    T* y;
    int rows;
    w[0] = w0;
    find(row, w[0], y, rows);
  };
  const auto finish = [&](uint32_t row, int v, const float (&products)[kCount], float) {
    const T* w;
    T* y;
    int rows;
    if (find(row, w, y, rows)) {
      y[v * rows] = static_cast<T>(products[0]);
    }
  };
)";
      return SequenceKernel(str("products_of_row_", count), {"x", "norm"}, weights, outputs, {},
          product_text(method, find), product_attributes(method));
    });
  };
  static const Kernels kernels[kMaxMatrices] = {make(1), make(2), make(3), make(4)};
  return kernels[matrices - 1];
}

// The number of vectors on the last axis of x, which is not empty.
size_t vectors_of(const mx::array& x) { return x.size() / x.shape(-1); }

// How to multiply the vectors x by matrices, if a kernel can.
std::optional<ProductMethod> method_for(const mx::array& x, mx::Stream stream) {
  if (x.ndim() == 0 || x.size() == 0 || !is_float(x.dtype()) || x.shape(-1) * x.itemsize() % 16 != 0) {
    return std::nullopt;
  }
  const size_t vectors = vectors_of(x);
  if (vectors == 1) {
    return x.nbytes() <= kMaxRowBytes ? std::optional(ProductMethod::single) : std::nullopt;
  }
  if (vectors <= kMostOfFew) {
    return ProductMethod::few;
  }
  const bool fits_tensor_cores = x.dtype() != mx::float32 && architecture(stream) >= kVersionOfTensorCores;
  return fits_tensor_cores && vectors <= kMostInTiles ? std::optional(ProductMethod::in_tiles) : std::nullopt;
}

// Whether w is a matrix [n, depth] that a kernel can multiply by the valid vectors x.
bool is_valid_matrix(const Matrix& matrix, const mx::array& x) {
  const auto& w = matrix.w;
  return !matrix.scales && w.dtype() == x.dtype() && w.ndim() == 2 && w.size() > 0 && w.shape(1) == x.shape(-1) &&
      w.is_available() && w.offset() == 0 && w.flags().row_contiguous;
}

} // namespace

bool can_multiply(const Vectors& vectors, const std::vector<Matrix>& matrices, mx::Stream stream) {
  if (is_metal(stream)) {
    return can_multiply_on_metal(vectors, matrices, stream);
  }
  const auto& x = vectors.x;
  if (!is_used(Kernel::products, stream) || !method_for(x, stream) ||
      (vectors.norm && vectors.norm->dtype() != x.dtype())) {
    return false;
  }
  int64_t rows = 0;
  for (const auto& w : matrices) {
    if (!is_valid_matrix(w, x)) {
      return false;
    }
    rows += w.w.shape(0);
  }
  return rows <= kMaxRowsOfProduct;
}

namespace {

// The shape of the products of x with the rows of a matrix.
mx::Shape shape_of_product(const mx::array& x, const Matrix& matrix) {
  mx::Shape shape = x.shape();
  shape.back() = matrix.w.shape(0);
  return shape;
}

// Runs a kernel of an operation, if can_multiply(). The results have a row for each row of the first `count` matrices.
// The kernel computes the norm of the vectors, or another one of the sequence does.
std::vector<mx::array> run(const Kernels& kernels, const Vectors& vectors_and_norm,
    const std::vector<mx::array>& matrices, size_t count, const std::optional<mx::array>& added,
    std::vector<mx::Shape> shapes, mx::Stream stream) {
  const auto& [x, norm, norm_eps] = vectors_and_norm;
  const ProductMethod method = *method_for(x, stream);
  const int depth = matrices[0].shape(1), vectors = static_cast<int>(vectors_of(x));
  const int eps = std::bit_cast<int>(norm_eps);
  mx::array operand = x;
  const mx::array weight = norm.value_or(x);
  const bool is_aligned = weight.is_available() && weight.offset() % 16 == 0;
  if (norm && vectors > 1) {
    operand = norms_kernel()({.inputs = {operand, weight},
                                 .weights = {},
                                 .shapes = {operand.shape()},
                                 .dtype = x.dtype(),
                                 .numbers = {},
                                 .blocks = vectors,
                                 .threads = kThreads,
                                 .early = {kNormWeight}},
        {{"kThreads", kThreads}, {"kDepth", depth}, {"kNorm", 1}, {"kHasAlignedNorm", is_aligned}, {"kEps", eps}},
        stream)[0];
  }
  SequenceKernel::Call call{
      {operand, vectors > 1 ? operand : weight}, matrices, std::move(shapes), x.dtype(), {}, 0, kThreads};
  if (added) {
    call.inputs.push_back(*added);
  }
  int64_t rows = 0;
  for (size_t i = 0; i < count; ++i) {
    rows += matrices[i].shape(0);
  }
  // Few vectors share the loads of each row. Two rows of a warp share those of the vectors, if there are enough warps.
  const bool has_pairs = method == ProductMethod::few && matrices.size() == count && rows >= kRowsForPairs;
  const int rows_per_warp = has_pairs ? 2 : 1;
  const int rows_per_block = method == ProductMethod::in_tiles ? kTileRows : kThreads / kWarp * rows_per_warp;
  call.blocks = blocks_of(rows, rows_per_block);
  if (method == ProductMethod::single) {
    call.blocks = std::min(call.blocks, kMaxBlocksOfRow);
    if (norm) {
      call.early.push_back(kNormWeight);
    }
  }
  Constants constants{{"kThreads", kThreads}, {"kDepth", depth}, {"kVectors", vectors}, {"kNorm", norm.has_value()},
      {"kHasAlignedNorm", is_aligned}, {"kEps", eps}, {"kRowsPerWarp", rows_per_warp}, {"kRows", rows},
      {"kIsBfloat16", x.dtype() == mx::bfloat16},
      {"kMaxEarly", int64_t{call.blocks} * kThreads > kManyThreads ? kFewEarlyLoads : kEarlyLoads}};
  for (size_t i = 0; i < count; ++i) {
    constants.push_back({kRowNames[i], matrices[i].shape(0)});
  }
  return kernels(method)(std::move(call), std::move(constants), stream);
}

} // namespace

std::optional<std::vector<mx::array>> products_of_row(
    const Vectors& vectors, const std::vector<Matrix>& matrices, mx::Stream stream) {
  if (matrices.empty() || matrices.size() > kMaxMatrices || !can_multiply(vectors, matrices, stream)) {
    return std::nullopt;
  }
  if (is_metal(stream)) {
    std::vector<mx::array> results;
    for (const auto& w : matrices) {
      results.push_back(product_on_metal(vectors, w, shape_of_product(vectors.x, w), stream));
    }
    return results;
  }
  std::vector<mx::Shape> shapes;
  std::vector<mx::array> arrays;
  for (const auto& w : matrices) {
    shapes.push_back(shape_of_product(vectors.x, w));
    arrays.push_back(w.w);
  }
  const size_t count = matrices.size();
  return run(products_kernels(count), vectors, arrays, count, std::nullopt, std::move(shapes), stream);
}

std::optional<mx::array> gated_products(
    const Vectors& vectors, const Matrix& gate, const Matrix& up, mx::Stream stream) {
  if (gate.w.shape() != up.w.shape() || !can_multiply(vectors, {gate, up}, stream)) {
    return std::nullopt;
  }
  const auto shape = shape_of_product(vectors.x, gate);
  if (is_metal(stream)) {
    return gated_products_on_metal(vectors, gate, up, shape, stream);
  }
  return run(gated_products_kernels(), vectors, {gate.w, up.w}, 1, std::nullopt, {shape}, stream)[0];
}

std::optional<mx::array> product_and_sum(
    const Vectors& vectors, const Matrix& w, const mx::array& added, mx::Stream stream) {
  if (!can_multiply(vectors, {w}, stream) || added.dtype() != vectors.x.dtype() ||
      added.shape() != shape_of_product(vectors.x, w)) {
    return std::nullopt;
  }
  if (is_metal(stream)) {
    return product_and_sum_on_metal(vectors, w, added, added.shape(), stream);
  }
  return run(product_and_sum_kernels(), vectors, {w.w}, 1, added, {added.shape()}, stream)[0];
}

} // namespace executorch_mlx::gpu
