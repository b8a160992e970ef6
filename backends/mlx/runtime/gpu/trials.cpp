// The trials of the kernels. The inputs have a fixed seed. They are small in the comparisons, and in the races about
// those of a small language model.
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "fused.h"
#include "metal.h"
#include "mlx_internals/cuda.h"
#include "sample.h"
#include "trial_inputs.h"
#include "verdicts.h"

namespace executorch_mlx::gpu {

namespace {

// -- sample ----------------------------------------------------------------------------------------

struct Filters {
  float temperature, top_p;
  int64_t top_k;
  float min_p;
};

constexpr Filters kFilters[] = {{0.0f, 0.5f, 3, 0.1f}, {0.8f, 1.0f, 0, 0.0f}, {0.9f, 0.9f, 0, 0.0f},
    {1.3f, 1.0f, 40, 0.0f}, {1.0f, 1.0f, 0, 0.05f}, {1.0f, 0.95f, 300, 0.0f}, {0.7f, 0.8f, 0, 0.1f},
    {1.0f, 0.9f, 40, 0.05f}};
constexpr int kSeeds = 64;

// Each row has its own parameters: all filters with all seeds. Every eighth seed has ties and special logits.
SampleInputs all_filters_and_seeds(int vocabulary) {
  Numbers numbers;
  std::vector<float> logits, temperature, top_p, min_p;
  std::vector<int64_t> seed, top_k;
  for (int i = 0; i < kSeeds; ++i) {
    for (const auto& filters : kFilters) {
      auto row = numbers.normals(vocabulary);
      for (float& x : row) {
        x = i % 8 == 0 ? std::round(x) : 3 * x;
      }
      row[i] = i % 16 == 8 ? NAN : row[i];
      row[2 * i + 1] = i % 16 == 8 ? -INFINITY : row[2 * i + 1];
      logits.insert(logits.end(), row.begin(), row.end());
      temperature.push_back(filters.temperature);
      top_p.push_back(filters.top_p);
      min_p.push_back(filters.min_p);
      top_k.push_back(filters.top_k);
      seed.push_back(int64_t{i} << (i % 40));
    }
  }
  const int rows = static_cast<int>(seed.size());
  const auto vector = [&](const auto& values, mx::Dtype dtype) { return mx::array(values.data(), {rows}, dtype); };
  return {mx::array(logits.data(), {rows, vocabulary}, mx::float32), vector(temperature, mx::float32),
      vector(top_p, mx::float32), vector(seed, mx::int64), vector(top_k, mx::int64), vector(min_p, mx::float32)};
}

// Rows that share the parameters.
SampleInputs shared_parameters(int vocabulary, int64_t seed, mx::Dtype dtype, mx::Stream stream) {
  Numbers numbers;
  const auto number = [](auto x, mx::Dtype type) { return mx::array(&x, {1}, type); };
  return {numbers.array({2, vocabulary}, dtype, stream, 3.0f), number(0.8f, mx::float32), number(0.95f, mx::float32),
      number(seed, mx::int64), number(int64_t{40}, mx::int64), std::nullopt};
}

// A part of the operations that a draw from a large vocabulary takes without the kernel: the best columns of the
// logits, their tokens in order, the nucleus and the noise. The rest of them, and the two values for which the host
// waits, are left out.
mx::array draw_with_operations(const mx::array& logits, mx::Stream s) {
  constexpr int kHeight = 32, kCandidates = 256;
  const auto columns = mx::reshape(logits, {kHeight, -1}, s);
  const auto best = mx::slice(mx::argsort(mx::negative(mx::max(columns, 0, false, s), s), 0, s), {0}, {kCandidates}, s);
  const auto picked = mx::flatten(mx::take(columns, best, 1, s), s);
  const auto drop = mx::sort(mx::subtract(mx::max(picked, s), picked, s), 0, s);
  const auto weight = mx::exp(mx::negative(drop, s), s);
  const auto is_kept =
      mx::less(mx::cumsum(weight, 0, false, true, s), mx::multiply(mx::sum(weight, s), mx::array(0.95f), s), s);
  const auto noise = mx::random::gumbel(drop.shape(), mx::float32, mx::random::key(7), s);
  const auto cost = mx::where(is_kept, mx::subtract(drop, noise, s), mx::array(INFINITY), s);
  return mx::argmin(cost, 0, false, s);
}

Trial sample_trial() {
  constexpr int kVocabulary = 640, kLargeVocabulary = 32768;
  const auto compare = [](mx::Stream stream) {
    std::vector<Comparison> comparisons;
    for (const auto& inputs :
        {all_filters_and_seeds(kVocabulary), shared_parameters(kVocabulary, 12345, mx::bfloat16, stream)}) {
      comparisons.push_back({{expect(sample(inputs, stream), "sample")}, {sample_on_host(inputs)}});
    }
    return comparisons;
  };
  const auto race = [](mx::Stream stream) {
    const auto inputs = shared_parameters(kLargeVocabulary, 1, mx::float32, stream);
    const auto logits = mx::slice(inputs.logits, {0, 0}, {1, kLargeVocabulary}, stream);
    const auto repeat = [](const auto& draw) {
      std::vector<mx::array> tokens;
      for (int i = 0; i < kRepetitions; ++i) {
        tokens.push_back(draw());
      }
      return tokens;
    };
    return Race{[=] {
                  auto one = inputs;
                  one.logits = logits;
                  return repeat([&] { return expect(sample(one, stream), "sample"); });
                },
        [=] { return repeat([&] { return draw_with_operations(logits, stream); }); }};
  };
  return {/*tolerance=*/0, compare, race};
}

// -- attention -------------------------------------------------------------------------------------

// A step of attention: norm and rotation of query and key, the update of the caches, and attention. The rows are those
// of requests, each with its own span of positions.
class AttentionStep {
 public:
  static constexpr int kHeads = 8, kKeyHeads = 4, kDim = 64;

  AttentionStep(std::vector<Span> spans, int capacity, mx::Dtype dtype, mx::Stream stream)
      : spans_(std::move(spans)),
        stream_(stream),
        x_(numbers_.array({rows(), 1, kHeads, kDim}, dtype, stream)),
        key_(numbers_.array({rows(), 1, kKeyHeads, kDim}, dtype, stream)),
        value_(numbers_.array({1, rows(), kKeyHeads, kDim}, dtype, stream)),
        weight_(numbers_.array({kDim}, dtype, stream)),
        freqs_(mx::exp(mx::arange(0, kDim / 2, mx::float32, stream), stream)),
        positions_(0, mx::int32),
        keys_(numbers_.array({1, kKeyHeads, capacity, kDim}, dtype, stream)),
        values_(numbers_.array({1, kKeyHeads, capacity, kDim}, dtype, stream)) {
    std::vector<int> last;
    for (const auto& span : spans_) {
      last.push_back(span.stop - 1);
    }
    positions_ = mx::array(last.data(), {rows()}, mx::int32);
    evaluate({freqs_}, stream);
  }

  // The result and both caches. Replaces the caches. If spans have the same end, the key and the value of the last one
  // count.
  std::vector<mx::array> with_kernel() {
    const auto normalized = [&](const mx::array& x) { return expect(rms_norm(x, weight_, kEps, stream_), "rms_norm"); };
    const auto rotated =
        expect(norm_rope({by_head(normalized(x_)), by_head(normalized(key_))}, 1.0f, positions_, freqs_, stream_),
            "norm_rope");
    std::vector<int> last;
    for (const auto& span : spans_) {
      last.push_back(span.stop - 1);
    }
    const auto update = [&](mx::array& cache, const mx::array& x) {
      cache = expect(update_positions(cache, x, last, stream_), "update_positions");
    };
    update(keys_, by_row(rotated[1]));
    update(values_, by_head(value_));
    if (rows() == 1) {
      const auto [start, stop] = spans_[0];
      const auto y = attention_of_token(
          rotated[0], positions(keys_, start, stop), positions(values_, start, stop), kScale, stream_);
      return {expect(y, "attention_of_token"), keys_, values_};
    }
    const auto y = attention_of_rows(by_row(rotated[0]), keys_, values_, kScale, spans_, stream_);
    return {expect(y, "attention_of_rows"), keys_, values_};
  }

  // Attention `is_exact` if its products and its softmax are separate operations in float32. In MLX 0.32.4, the fused
  // operation on an NVIDIA GPU has wrong results with some hundred positions of 64 elements.
  std::vector<mx::array> without_kernel(bool is_exact = false) {
    const auto rotated = [&](const mx::array& x) {
      return mx::fast::rope(by_head(mx::fast::rms_norm(x, weight_, kEps, stream_)), kDim, /*traditional=*/false,
          std::nullopt, 1.0f, positions_, freqs_, stream_);
    };
    const auto q = by_row(rotated(x_)), k = by_row(rotated(key_)), v = by_head(value_);
    std::vector<mx::array> results;
    for (int i = 0; i < rows(); ++i) {
      const int stop = spans_[i].stop;
      const auto update = [&](mx::array& cache, const mx::array& x) {
        mx::array before = std::move(cache); // so that MLX updates it in place
        cache = mx::slice_update(std::move(before), positions(x, i, i + 1), mx::Shape{0, 0, stop - 1, 0},
            mx::Shape{1, kKeyHeads, stop, kDim}, stream_);
      };
      update(keys_, k);
      update(values_, v);
    }
    for (int i = 0; i < rows(); ++i) {
      const auto [start, stop] = spans_[i];
      const auto query = positions(q, i, i + 1), key = positions(keys_, start, stop),
                 value = positions(values_, start, stop);
      results.push_back(is_exact
              ? attention(query, key, value)
              : mx::fast::scaled_dot_product_attention(query, key, value, kScale, "", std::nullopt, std::nullopt,
                    /*force_fused=*/false, stream_));
    }
    return {rows() == 1 ? results[0] : mx::concatenate(std::move(results), 2, stream_), keys_, values_};
  }

 private:
  static constexpr float kScale = 0.125f;

  int rows() const { return static_cast<int>(spans_.size()); }

  // [rows, 1, heads, dim] -> [rows, heads, 1, dim]
  mx::array by_head(const mx::array& x) const { return mx::transpose(x, {0, 2, 1, 3}, stream_); }

  // [rows, heads, 1, dim] -> [1, heads, rows, dim]
  mx::array by_row(const mx::array& x) const { return rows() == 1 ? x : mx::transpose(x, {2, 1, 0, 3}, stream_); }

  // Attention of a query for each head, with operations in float32.
  mx::array attention(const mx::array& query, const mx::array& key, const mx::array& value) const {
    const auto to_float = [&](const mx::array& x) { return mx::astype(x, mx::float32, stream_); };
    const auto q = mx::reshape(to_float(query), {1, kKeyHeads, kHeads / kKeyHeads, kDim}, stream_);
    const auto scores = mx::matmul(q, mx::transpose(to_float(key), {0, 1, 3, 2}, stream_), stream_);
    const auto weights = mx::softmax(mx::multiply(scores, mx::array(kScale), stream_), -1, /*precise=*/true, stream_);
    const auto y = mx::matmul(weights, to_float(value), stream_);
    return mx::astype(mx::reshape(y, query.shape(), stream_), query.dtype(), stream_);
  }

  mx::array positions(const mx::array& x, int start, int stop) const {
    return mx::slice(x, {0, 0, start, 0}, {1, x.shape(1), stop, kDim}, stream_);
  }

  std::vector<Span> spans_;
  mx::Stream stream_;
  Numbers numbers_;
  mx::array x_, key_, value_, weight_, freqs_, positions_, keys_, values_;
};

Trial attention_trial() {
  const auto compare = [](mx::Stream stream) {
    std::vector<Comparison> comparisons;
    for (const auto& spans : {std::vector<Span>{{0, 40}}, {{16, 400}}, {{0, 40}, {40, 90}, {100, 500}, {40, 90}}}) {
      AttentionStep with(spans, 512, mx::bfloat16, stream), without(spans, 512, mx::bfloat16, stream);
      comparisons.push_back({with.with_kernel(), without.without_kernel(/*is_exact=*/true)});
    }
    return comparisons;
  };
  const auto race = [](mx::Stream stream) {
    const auto make = [&] {
      return std::make_shared<AttentionStep>(std::vector<Span>{{0, 500}}, 1024, mx::bfloat16, stream);
    };
    const auto with = make(), without = make();
    return Race{[=] { return with->with_kernel(); }, [=] { return without->without_kernel(); }};
  };
  return {kToleranceOfHalf, compare, race};
}

// -- other combinations, on NVIDIA GPUs --------------------------------------------------------------

// A trial of results that depend on arrays alone. The race chains `steps` of them.
Trial trial_of(double tolerance, mx::Dtype dtype, std::function<std::vector<mx::array>(mx::Dtype, mx::Stream)> operands,
    std::function<std::vector<mx::array>(const std::vector<mx::array>&, mx::Stream)> with,
    std::function<std::vector<mx::array>(const std::vector<mx::array>&, mx::Stream)> without) {
  const auto compare = [=](mx::Stream stream) {
    const auto x = operands(dtype, stream);
    return std::vector{Comparison{with(x, stream), without(x, stream)}};
  };
  const auto race = [=](mx::Stream stream) {
    const auto x = operands(mx::bfloat16, stream);
    const auto repeat = [=](const auto& compute) {
      std::vector<mx::array> results;
      for (int i = 0; i < kRepetitions; ++i) {
        for (auto& y : compute(x, stream)) {
          results.push_back(std::move(y));
        }
      }
      return results;
    };
    return Race{[=] { return repeat(with); }, [=] { return repeat(without); }};
  };
  return {tolerance, compare, race};
}

using Arrays = std::vector<mx::array>;

Trial silu_product_trial() {
  return trial_of(
      kToleranceOfHalf, mx::bfloat16,
      [](mx::Dtype dtype, mx::Stream stream) {
        Numbers numbers;
        return Arrays{numbers.array({4, 2048}, dtype, stream), numbers.array({4, 2048}, dtype, stream)};
      },
      [](const Arrays& x, mx::Stream stream) {
        return Arrays{expect(silu_product(x[0], x[1], stream), "silu_product")};
      },
      [](const Arrays& x, mx::Stream stream) { return Arrays{mx::multiply(silu(x[0], stream), x[1], stream)}; });
}

Trial add_rms_norm_trial() {
  return trial_of(
      kToleranceOfHalf, mx::bfloat16,
      [](mx::Dtype dtype, mx::Stream stream) {
        Numbers numbers;
        return Arrays{numbers.array({4, 2048}, dtype, stream), numbers.array({4, 2048}, dtype, stream),
            numbers.array({2048}, dtype, stream)};
      },
      [](const Arrays& x, mx::Stream stream) {
        const auto both = expect(add_rms_norm(x[0], x[1], x[2], kEps, stream), "add_rms_norm");
        return Arrays{both.first, both.second};
      },
      [](const Arrays& x, mx::Stream stream) {
        const auto sum = mx::add(x[0], x[1], stream);
        return Arrays{sum, mx::fast::rms_norm(sum, x[2], kEps, stream)};
      });
}

Trial norm_rope_trial() {
  constexpr int kLength = 5, kDim = 64;
  const auto by_head = [](const mx::array& x, mx::Stream stream) { return mx::transpose(x, {0, 2, 1, 3}, stream); };
  return trial_of(
      kToleranceOfFloat, mx::float32,
      [](mx::Dtype dtype, mx::Stream stream) {
        Numbers numbers;
        return Arrays{numbers.array({2, kLength, 8, kDim}, dtype, stream),
            numbers.array({2, kLength, 4, kDim}, dtype, stream), numbers.array({kDim}, dtype, stream),
            mx::array({7, 300}, mx::int32), mx::exp(mx::arange(0, kDim / 2, mx::float32, stream), stream)};
      },
      [=](const Arrays& x, mx::Stream stream) {
        Arrays normalized;
        for (int i = 0; i < 2; ++i) {
          normalized.push_back(by_head(expect(rms_norm(x[i], x[2], kEps, stream), "rms_norm"), stream));
        }
        return expect(norm_rope(normalized, 1.0f, x[3], x[4], stream), "norm_rope");
      },
      [=](const Arrays& x, mx::Stream stream) {
        Arrays results;
        for (int i = 0; i < 2; ++i) {
          const auto y = by_head(mx::fast::rms_norm(x[i], x[2], kEps, stream), stream);
          results.push_back(mx::fast::rope(y, kDim, /*traditional=*/false, std::nullopt, 1.0f, x[3], x[4], stream));
        }
        return results;
      });
}

} // namespace

std::vector<std::pair<Kernel, Trial>> trials_of(mx::Stream stream) {
  if (is_cuda(stream)) {
    return {{Kernel::sample, sample_trial()}, {Kernel::products, products_trial()},
        {Kernel::quantized_products, quantized_products_trial()}, {Kernel::dequantize, dequantize_trial()},
        {Kernel::attention, attention_trial()}, {Kernel::norm_rope, norm_rope_trial()},
        {Kernel::silu_product, silu_product_trial()}, {Kernel::add_rms_norm, add_rms_norm_trial()},
        {Kernel::embedding, embedding_trial()}};
  }
  return {{Kernel::sample, sample_trial()}, {Kernel::products, products_trial()},
      {Kernel::quantized_products, quantized_products_trial()}, {Kernel::norm_rope, norm_rope_trial()}};
}

} // namespace executorch_mlx::gpu
