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
constexpr int kMinGroupSize = 32; // of quantized matrices: a thread loads integers of one group at a time

// How many loads of each row a thread issues before the row vector is ready. If the threads do not all fit on the GPU
// at once, those that start late find it ready, and should not queue its loads behind those of the weights.
constexpr int kEarlyLoads = 6;
constexpr int kFewEarlyLoads = 3;
constexpr int kManyThreads = 132 * 2048; // of an H100 or H200

// The blocks that multiply one vector. If a matrix has more rows than these have warps, a warp goes on with other rows.
constexpr int kMaxBlocksOfRow = kManyThreads / kThreads;

// The blocks that multiply quantized matrices: as many as run at once on an H100 or H200.
constexpr int kMaxBlocksOfTiles = 2 * 132;

// A kernel is one of an operation for a method, and for quantized matrices or others.
struct Form {
  ProductMethod method;
  bool is_quantized;

  // The expression for a row of a matrix.
  std::string row(const std::string& matrix) const { return row_text(matrix, is_quantized); }

  std::string text(const std::string& definitions) const {
    return is_quantized ? quantized_product_text(method, definitions) : product_text(method, definitions);
  }

  // The parameters of matrices.
  std::vector<std::string> parameters(const std::vector<std::string>& matrices) const {
    std::vector<std::string> result;
    for (const auto& w : matrices) {
      result.push_back(w);
      if (is_quantized) {
        result.insert(result.end(), {w + "_scales", w + "_biases"});
      }
    }
    return result;
  }

  SequenceKernel kernel(const std::string& name, const std::vector<std::string>& inputs,
      const std::vector<std::string>& matrices, const std::vector<std::string>& outputs,
      const std::string& definitions) const {
    return {is_quantized ? "quantized_" + name : name, inputs, parameters(matrices), outputs, {}, text(definitions),
        product_attributes(is_quantized ? ProductMethod::in_tiles : method)};
  }
};

// The kernels of an operation, one for each form.
class Kernels {
 public:
  explicit Kernels(const std::function<SequenceKernel(const Form&)>& make)
      : kernels_{make({ProductMethod::single, false}), make({ProductMethod::few, false}),
            make({ProductMethod::in_tiles, false})},
        quantized_{make({ProductMethod::single, true}), make({ProductMethod::in_tiles, true})} {}

  const SequenceKernel& operator()(const Form& form) const {
    return form.is_quantized ? quantized_[form.method != ProductMethod::single]
                             : kernels_[static_cast<int>(form.method)];
  }

 private:
  SequenceKernel kernels_[3], quantized_[2];
};

// A block normalizes a vector of x.
const SequenceKernel& norms_kernel() {
  static const SequenceKernel kernel("rms_norms", {"x", "norm"}, {}, {"y"}, {}, norm_text());
  return kernel;
}

// silu(x . gate[row]) * (x . up[row])
const Kernels& gated_products_kernels() {
  static const Kernels kernels([](const Form& form) {
    return form.kernel("gated_products", {"x", "norm"}, {"gate", "up"}, {"y"},
        str(R"(
  constexpr int kCount = 2;
  const auto summand_of = [](uint32_t, int) { return 0.0f; };
  const auto rows_of = [&](uint32_t row, Row (&w)[kCount]) {
    const uint64_t begin = uint64_t(min(row, uint32_t(kRows0 - 1))) * kDepth;
    w[0] = )",
            form.row("gate"), R"(;
    w[1] = )",
            form.row("up"), R"(;
  };
  const auto finish = [&](uint32_t row, int v, const float (&products)[kCount], float) {
    const float silu = static_cast<float>(static_cast<T>(products[0] / (1.0f + expf(-products[0]))));
    if (row < kRows0) {
      y[v * kRows0 + row] = static_cast<T>(silu * products[1]);
    }
  };
)"));
  });
  return kernels;
}

// x . matrix[row] + added[row]
const Kernels& product_and_sum_kernels() {
  static const Kernels kernels([](const Form& form) {
    return form.kernel("product_and_sum", {"x", "norm", "added"}, {"matrix"}, {"y"},
        str(R"(
  constexpr int kCount = 1;
  const auto rows_of = [&](uint32_t row, Row (&w)[kCount]) {
    const uint64_t begin = uint64_t(min(row, uint32_t(kRows0 - 1))) * kDepth;
    w[0] = )",
            form.row("matrix"), R"(;
  };
  const auto summand_of = [&](uint32_t row, int v) {
    return row < kRows0 ? static_cast<float>(added[v * kRows0 + row]) : 0.0f;
  };
  const auto finish = [&](uint32_t row, int v, const float (&products)[kCount], float summand) {
    if (row < kRows0) {
      y[v * kRows0 + row] = static_cast<T>(products[0] + summand);
    }
  };
)"));
  });
  return kernels;
}

// x . w[row] for the matrices w0 [kRows0, kDepth], w1, ...: the rows are counted over all matrices. `find` returns
// whether there is a row, because NVIDIA's compiler removes a comparison of its address with null.
const Kernels& products_kernels(size_t matrices) {
  const auto make = [](size_t count) {
    return Kernels([count](const Form& form) {
      std::vector<std::string> weights, outputs;
      std::string find = R"(
  constexpr int kCount = 1;
  const auto summand_of = [](uint32_t, int) { return 0.0f; };
  const auto find = [&](uint32_t row, Row& w, T*& y, int& rows) {
    uint64_t begin;
)";
      for (size_t i = 0; i < count; ++i) {
        weights.push_back(str("w", i));
        outputs.push_back(str("y", i));
        find += str("    begin = uint64_t(row) * kDepth;\n    if (row < kRows", i, ") { w = ", form.row(str("w", i)),
            "; y = y", i, " + row; rows = kRows", i, "; return true; }\n    row -= kRows", i, ";\n");
      }
      find += R"(    return false;
  };
  const auto rows_of = [&](uint32_t row, Row (&w)[kCount]) {
    T* y;
    int rows;
    find(min(row, uint32_t(kRows - 1)), w[0], y, rows);
  };
  const auto finish = [&](uint32_t row, int v, const float (&products)[kCount], float) {
    Row w;
    T* y;
    int rows;
    if (find(row, w, y, rows)) {
      y[v * rows] = static_cast<T>(products[0]);
    }
  };
)";
      return form.kernel(str("products_of_row_", count), {"x", "norm"}, weights, outputs, find);
    });
  };
  static const Kernels kernels[kMaxMatrices] = {make(1), make(2), make(3), make(4)};
  return kernels[matrices - 1];
}

// The number of vectors on the last axis of x, which is not empty.
size_t vectors_of(const mx::array& x) { return x.size() / x.shape(-1); }

// How to multiply the vectors x by matrices, if a kernel can.
std::optional<Form> form_for(const mx::array& x, bool is_quantized, mx::Stream stream) {
  if (x.ndim() == 0 || x.size() == 0 || !is_float(x.dtype()) || x.shape(-1) * x.itemsize() % 16 != 0) {
    return std::nullopt;
  }
  const size_t vectors = vectors_of(x);
  const bool fits_tensor_cores = x.dtype() != mx::float32 && architecture(stream) >= kVersionOfTensorCores;
  if ((is_quantized && !fits_tensor_cores) || (vectors == 1 && x.nbytes() > kMaxRowBytes)) {
    return std::nullopt;
  }
  if (vectors == 1) {
    return Form{ProductMethod::single, is_quantized};
  }
  if (vectors <= kMostOfFew && !is_quantized) {
    return Form{ProductMethod::few, is_quantized};
  }
  return fits_tensor_cores && vectors <= kMostInTiles ? std::optional(Form{ProductMethod::in_tiles, is_quantized})
                                                      : std::nullopt;
}

// Whether an array is a matrix [rows, columns] that a kernel can read.
bool is_valid_array(const mx::array& x, int rows, int columns, mx::Dtype dtype) {
  return x.dtype() == dtype && x.shape() == mx::Shape{rows, columns} && x.size() > 0 && x.is_available() &&
      x.flags().row_contiguous;
}

// Whether w is a matrix [n, depth] that a kernel can multiply by the valid vectors x.
bool is_valid_matrix(const Matrix& matrix, const mx::array& x) {
  const auto& [w, scales, biases, group_size, bits] = matrix;
  const int depth = x.shape(-1);
  if (w.ndim() != 2 || w.offset() != 0) {
    return false;
  }
  const int rows = w.shape(0);
  if (!scales) {
    return is_valid_array(w, rows, depth, x.dtype());
  }
  return (bits == 4 || bits == 8) && group_size % kMinGroupSize == 0 && depth % group_size == 0 &&
      is_valid_array(w, rows, depth / 32 * bits, mx::uint32) &&
      is_valid_array(*scales, rows, depth / group_size, x.dtype()) &&
      is_valid_array(*biases, rows, depth / group_size, x.dtype());
}

} // namespace

bool can_multiply(const Vectors& vectors, const std::vector<Matrix>& matrices, mx::Stream stream) {
  if (is_metal(stream)) {
    return can_multiply_on_metal(vectors, matrices, stream);
  }
  const auto& x = vectors.x;
  const auto& first = matrices[0];
  const bool is_quantized = first.scales.has_value();
  if (!is_used(is_quantized ? Kernel::quantized_products : Kernel::products, stream) ||
      !form_for(x, is_quantized, stream) || (vectors.norm && vectors.norm->dtype() != x.dtype())) {
    return false;
  }
  int64_t rows = 0;
  for (const auto& matrix : matrices) {
    if (matrix.bits != first.bits || matrix.group_size != first.group_size || !is_valid_matrix(matrix, x)) {
      return false;
    }
    rows += matrix.w.shape(0);
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
std::vector<mx::array> run(const Kernels& kernels, const Vectors& vectors_and_norm, const std::vector<Matrix>& matrices,
    size_t count, const std::optional<mx::array>& added, std::vector<mx::Shape> shapes, mx::Stream stream) {
  const auto& [x, norm, norm_eps] = vectors_and_norm;
  const Form form = *form_for(x, matrices[0].scales.has_value(), stream);
  const ProductMethod method = form.method;
  const int depth = x.shape(-1), vectors = static_cast<int>(vectors_of(x));
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
      {operand, vectors > 1 ? operand : weight}, {}, std::move(shapes), x.dtype(), {}, 0, kThreads};
  for (const auto& matrix : matrices) {
    call.weights.push_back(matrix.w);
    if (form.is_quantized) {
      call.weights.insert(call.weights.end(), {*matrix.scales, *matrix.biases});
    }
  }
  if (added) {
    call.inputs.push_back(*added);
  }
  int64_t rows = 0;
  for (size_t i = 0; i < count; ++i) {
    rows += matrices[i].w.shape(0);
  }
  // Few vectors share the loads of each row. Two rows of a warp share those of the vectors, if there are enough warps.
  const bool has_pairs = method == ProductMethod::few && matrices.size() == count && rows >= kRowsForPairs;
  const int rows_per_warp = has_pairs ? 2 : 1;
  const int rows_per_block = form.is_quantized ? kTileRows * static_cast<int>(count) / static_cast<int>(matrices.size())
      : method == ProductMethod::in_tiles      ? kTileRows
                                               : kThreads / kWarp * rows_per_warp;
  call.blocks = blocks_of(rows, rows_per_block);
  if (form.is_quantized) {
    call.blocks = std::min(call.blocks, kMaxBlocksOfTiles);
  } else if (method == ProductMethod::single) {
    call.blocks = std::min(call.blocks, kMaxBlocksOfRow);
  }
  if (norm && method == ProductMethod::single) {
    call.early.push_back(kNormWeight);
  }
  Constants constants{{"kThreads", kThreads}, {"kDepth", depth}, {"kVectors", vectors}, {"kNorm", norm.has_value()},
      {"kHasAlignedNorm", is_aligned}, {"kEps", eps}, {"kRowsPerWarp", rows_per_warp}, {"kRows", rows},
      {"kIsBfloat16", x.dtype() == mx::bfloat16},
      {"kMaxEarly", int64_t{call.blocks} * kThreads > kManyThreads ? kFewEarlyLoads : kEarlyLoads}};
  if (form.is_quantized) {
    constants.insert(constants.end(), {{"kBits", matrices[0].bits}, {"kGroupSize", matrices[0].group_size}});
  }
  for (size_t i = 0; i < count; ++i) {
    constants.push_back({kRowNames[i], matrices[i].w.shape(0)});
  }
  return kernels(form)(std::move(call), std::move(constants), stream);
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
  for (const auto& w : matrices) {
    shapes.push_back(shape_of_product(vectors.x, w));
  }
  const size_t count = matrices.size();
  return run(products_kernels(count), vectors, matrices, count, std::nullopt, std::move(shapes), stream);
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
  return run(gated_products_kernels(), vectors, {gate, up}, 1, std::nullopt, {shape}, stream)[0];
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
  return run(product_and_sum_kernels(), vectors, {w}, 1, added, {added.shape()}, stream)[0];
}

} // namespace executorch_mlx::gpu
