// The trials of the kernels that multiply vectors by matrices, or read quantized matrices.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fused.h"
#include "mlx_internals/cuda.h"
#include "trial_inputs.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

// x @ matrix.T. If it `is_exact`, quantized weights and sums are float32, which they are not everywhere.
mx::array product(const mx::array& x, const Matrix& matrix, mx::Stream stream, bool is_exact = false) {
  const auto& [w, scales, biases, group_size, bits] = matrix;
  if (scales && is_exact) {
    const auto to_float = [&](const mx::array& a) { return mx::astype(a, mx::float32, stream); };
    const auto y = product(to_float(x), {w, to_float(*scales), to_float(*biases), group_size, bits}, stream);
    return mx::astype(y, x.dtype(), stream);
  }
  return scales ? mx::quantized_matmul(x, w, *scales, biases, /*transpose=*/true, group_size, bits, "affine", stream)
                : mx::matmul(x, mx::transpose(w, stream), stream);
}

// Returns the matrix, with integers of `bits` bits unless it is 0.
Matrix quantized(const mx::array& w, int group_size, int bits, mx::Stream stream) {
  if (bits == 0) {
    return w;
  }
  const auto parts = mx::quantize(w, group_size, bits, "affine", std::nullopt, stream);
  evaluate({parts[0], parts[1], parts[2]}, stream);
  return {parts[0], parts[1], parts[2], group_size, bits};
}

// The feed-forward part of a layer: norm, gate and up with SiLU, down, and the sum with the residual.
struct FeedForward {
  mx::array norm;
  Matrix gate, up, down;

  FeedForward(int depth, int hidden, const std::function<mx::array(const mx::Shape&)>& make,
      const std::function<Matrix(const mx::array&)>& to_matrix)
      : norm(make({depth})),
        gate(to_matrix(make({hidden, depth}))),
        up(to_matrix(make({hidden, depth}))),
        down(to_matrix(make({depth, hidden}))) {}

  // The gated products and the sum.
  std::vector<mx::array> with_kernel(const mx::array& x, mx::Stream stream) const {
    const auto y = expect(gated_products({x, norm, kEps}, gate, up, stream), "gated_products");
    return {y, expect(product_and_sum({y}, down, x, stream), "product_and_sum")};
  }

  std::vector<mx::array> without_kernel(const mx::array& x, mx::Stream stream) const {
    return reference(x, stream, /*is_exact=*/false);
  }

  std::vector<mx::array> reference(const mx::array& x, mx::Stream stream, bool is_exact) const {
    const auto h = mx::fast::rms_norm(x, norm, kEps, stream);
    const auto g = product(h, gate, stream, is_exact);
    const auto y = mx::multiply(silu(g, stream), product(h, up, stream, is_exact), stream);
    return {y, mx::add(product(y, down, stream, is_exact), x, stream)};
  }
};

// What a trial of products multiplies: matrices [hidden, depth], with integers of `bits` bits unless it is 0.
struct ProductCase {
  int vectors;
  mx::Dtype dtype;
  int group_size = 0, bits = 0;
  int depth = 512, hidden = 384;
};

Comparison compare_products(const ProductCase& c, mx::Stream stream) {
  const auto& [vectors, dtype, group_size, bits, depth, hidden] = c;
  Numbers numbers;
  const auto make = [&](const mx::Shape& shape) {
    const bool is_norm = shape.size() == 1;
    return numbers.array(shape, c.dtype, stream, is_norm ? 1.0f : 0.1f);
  };
  const FeedForward layer(
      depth, hidden, make, [&](const mx::array& w) { return quantized(w, c.group_size, c.bits, stream); });
  const auto x = numbers.array({1, vectors, depth}, dtype, stream);
  Comparison comparison{layer.with_kernel(x, stream), layer.reference(x, stream, /*is_exact=*/true)};
  const auto add = [&](std::vector<mx::array> results, const mx::array& operand) {
    for (auto& y : results) {
      comparison.results.push_back(std::move(y));
    }
    comparison.expected.push_back(product(operand, layer.gate, stream, /*is_exact=*/true));
    comparison.expected.push_back(product(operand, layer.up, stream, /*is_exact=*/true));
  };
  add(expect(products_of_row({x}, {layer.gate, layer.up}, stream), "products_of_row"), x);
  add(expect(products_of_row({x, layer.norm, kEps}, {layer.gate, layer.up}, stream), "products_of_row"),
      mx::fast::rms_norm(x, layer.norm, kEps, stream));
  return comparison;
}

Race race_of_products(int bits, mx::Stream stream) {
  constexpr int kDepth = 1024, kHidden = 512;
  const auto make = [&](const mx::Shape& shape) { return filled(shape, mx::bfloat16, stream); };
  const FeedForward layer(
      kDepth, kHidden, make, [&](const mx::array& w) { return quantized(w, /*group_size=*/64, bits, stream); });
  const auto x = make({1, 1, kDepth});
  const auto repeat = [=](auto method) {
    auto y = x;
    for (int i = 0; i < kRepetitions; ++i) {
      y = (layer.*method)(y, stream).back();
    }
    return std::vector{y};
  };
  return {[=] { return repeat(&FeedForward::with_kernel); }, [=] { return repeat(&FeedForward::without_kernel); }};
}

} // namespace

Trial products_trial() {
  const auto compare = [](mx::Stream stream) {
    std::vector<Comparison> comparisons;
    for (const int vectors : is_cuda(stream) ? std::vector{1, 4, 20} : std::vector{1}) {
      comparisons.push_back(compare_products({vectors, mx::bfloat16}, stream));
    }
    return comparisons;
  };
  return {kToleranceOfHalf, compare, [](mx::Stream stream) { return race_of_products(0, stream); }};
}

Trial quantized_products_trial() {
  const auto compare = [](mx::Stream stream) {
    std::vector<ProductCase> cases{{1, mx::bfloat16, /*group_size=*/64, /*bits=*/4}};
    if (is_cuda(stream)) {
      // More tiles than blocks, and more steps than loads under way; several vectors; the other bits and group sizes.
      cases.push_back({1, mx::bfloat16, /*group_size=*/64, /*bits=*/4, /*depth=*/64, /*hidden=*/4352});
      cases.push_back({4, mx::float16, /*group_size=*/128, /*bits=*/8});
      cases.push_back({20, mx::bfloat16, /*group_size=*/32, /*bits=*/4, /*depth=*/2304, /*hidden=*/128});
    } else {
      cases.push_back({1, mx::float32, /*group_size=*/32, /*bits=*/8});
    }
    std::vector<Comparison> comparisons;
    for (const auto& c : cases) {
      comparisons.push_back(compare_products(c, stream));
    }
    return comparisons;
  };
  return {kToleranceOfHalf, compare, [](mx::Stream stream) { return race_of_products(4, stream); }};
}

Trial dequantize_trial() {
  constexpr int kRows = 4096, kDepth = 1024;
  const auto matrix = [](int rows, int depth, int group_size, int bits, mx::Dtype dtype, mx::Stream stream) {
    return quantized(Numbers().array({rows, depth}, dtype, stream), group_size, bits, stream);
  };
  const auto without = [](const Matrix& m, mx::Stream stream) {
    return mx::dequantize(m.w, *m.scales, m.biases, m.group_size, m.bits, "affine", std::nullopt, std::nullopt, stream);
  };
  const auto compare = [=](mx::Stream stream) {
    std::vector<Comparison> comparisons;
    for (const auto& m : {matrix(96, 288, /*group_size=*/32, /*bits=*/4, mx::bfloat16, stream),
             matrix(33, 128, /*group_size=*/128, /*bits=*/8, mx::float16, stream)}) {
      comparisons.push_back({{expect(dequantize(m, stream), "dequantize")}, {without(m, stream)}});
    }
    return comparisons;
  };
  const auto race = [=](mx::Stream stream) {
    const auto m = quantized(filled({kRows, kDepth}, mx::bfloat16, stream), /*group_size=*/64, /*bits=*/4, stream);
    const auto repeat = [](const auto& compute) {
      std::vector<mx::array> results;
      for (int i = 0; i < kRepetitions; ++i) {
        results.push_back(compute());
      }
      return results;
    };
    return Race{[=] { return repeat([&] { return expect(dequantize(m, stream), "dequantize"); }); },
        [=] { return repeat([&] { return without(m, stream); }); }};
  };
  return {kToleranceOfHalf, compare, race};
}

Trial embedding_trial() {
  constexpr int kRows = 50, kDepth = 128, kLargeDepth = 1024;
  const mx::array indices({int64_t{7}, int64_t{-3}, int64_t{49}, int64_t{-50}, int64_t{0}}, {5, 1});
  const auto without = [](const Matrix& m, const mx::array& indices, mx::Stream stream) {
    const auto rows = [&](const mx::array& x) { return mx::take(x, indices, 0, stream); };
    if (!m.scales) {
      return rows(m.w);
    }
    return mx::dequantize(rows(m.w), rows(*m.scales), rows(*m.biases), m.group_size, m.bits, "affine", std::nullopt,
        std::nullopt, stream);
  };
  const auto compare = [=](mx::Stream stream) {
    std::vector<Comparison> comparisons;
    for (const auto dtype : {mx::bfloat16, mx::float16, mx::float32}) {
      const Matrix numbers(Numbers().array({kRows, kDepth}, dtype, stream));
      comparisons.push_back(
          {{expect(embedding(numbers, indices, stream), "embedding")}, {without(numbers, indices, stream)}});
    }
    for (const int bits : {4, 8}) {
      const auto m = quantized(Numbers().array({kRows, kDepth}, mx::bfloat16, stream), 32, bits, stream);
      comparisons.push_back({{expect(embedding(m, indices, stream), "embedding")}, {without(m, indices, stream)}});
    }
    return comparisons;
  };
  const auto race = [=](mx::Stream stream) {
    const auto m = quantized(Numbers().array({kRows, kLargeDepth}, mx::bfloat16, stream), 32, 8, stream);
    const auto repeat = [](const auto& compute) {
      std::vector<mx::array> results;
      for (int i = 0; i < kRepetitions; ++i) {
        results.push_back(compute());
      }
      return results;
    };
    return Race{[=] { return repeat([&] { return expect(embedding(m, indices, stream), "embedding"); }); },
        [=] { return repeat([&] { return without(m, indices, stream); }); }};
  };
  return {kToleranceOfHalf, compare, race};
}

} // namespace executorch_mlx::gpu
