// Helpers for kernels that take over operations of the lazy graph. Only the sources of this folder include this file.
#pragma once

#include <mlx/mlx.h>
#include <mlx/primitives.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../checks.h"
#include "../dtype.h"

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

constexpr int kThreads = 256; // of a block
constexpr int kWarp = 32;
constexpr size_t kMaxSpans = 64; // of positions, in a kernel for several rows of a KV cache
constexpr int kMaxBlocks = 1 << 22; // kMaxBlocks * kThreads fits in 32 bits

inline int blocks_of(size_t rows, int per_block) { return static_cast<int>((rows + per_block - 1) / per_block); }

// x before lazy operations that only change its shape. The elements keep their order.
const mx::array& before_reshapes(const mx::array& x);

// Whether x has the dtype `dtype`, and the kernels can read it: it must be a float dtype.
inline bool has_float_dtype(const mx::array& x, mx::Dtype dtype) { return x.dtype() == dtype && is_float(dtype); }

// An operation that a kernel for several operations usually takes over. Its array costs the host less than those of
// MLX's functions and of CudaKernel. If something else needs the result, compute() is called and then evaluated.
class FusibleOperation : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + ": runs on GPU streams only");
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const mx::array y = compute(inputs);
    y.primitive().eval_gpu(y.inputs(), outputs);
  }

 private:
  // Returns the lazy result of one operation of MLX with these inputs.
  virtual mx::array compute(const std::vector<mx::array>& inputs) = 0;
};

// rms_norm(x, weight, eps) of inputs x and weight.
class FusibleNorm : public FusibleOperation {
 public:
  FusibleNorm(mx::Stream stream, float eps) : FusibleOperation(stream), eps(eps) {}

  const char* name() const override { return kName; }

  static constexpr char kName[] = "FusibleNorm";
  const float eps;

 private:
  mx::array compute(const std::vector<mx::array>& inputs) override {
    return mx::fast::rms_norm(inputs[0], inputs[1], eps, stream());
  }
};

// rope() of one or two arrays after their transposition and perhaps an RMSNorm: see norm_rope(). The inputs are x0,
// weight0, x1, weight1, offset and freqs, without x1 and weight1 for one array.
class FusibleRope : public FusibleOperation {
 public:
  struct Options {
    std::vector<int> heads; // of each array
    int dim;
    int batches; // B of the results [B, H, S, D]
    int length; // S
    bool has_norm;
    float eps; // of the norm
    float scale; // of the positions
    std::vector<int> offsets; // one, or one for each of B; empty if the host does not know them
  };

  FusibleRope(mx::Stream stream, Options options) : FusibleOperation(stream), options(std::move(options)) {}

  const char* name() const override { return kName; }

  // The last two of the inputs.
  static const mx::array& offset_of(const std::vector<mx::array>& inputs) { return inputs[inputs.size() - 2]; }

  static const mx::array& freqs_of(const std::vector<mx::array>& inputs) { return inputs.back(); }

  static constexpr char kName[] = "FusibleRope";
  const Options options;

 private:
  mx::array compute(const std::vector<mx::array>& inputs) override;
  mx::array compute_on_metal(std::vector<mx::array> inputs);
};

// cache[:, :, positions[i]] = update[:, :, i] for each i, of inputs cache and update: see update_positions().
class CacheUpdate : public mx::Primitive {
 public:
  // Of equal positions, the last one counts.
  CacheUpdate(mx::Stream stream, std::vector<int> positions) : Primitive(stream), positions(std::move(positions)) {}

  const char* name() const override { return kName; }

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(kName) + ": runs on GPU streams only");
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

  // Changes `update`, the lazy result of a CacheUpdate: the kernel that computes `writer` will write to the memory of
  // the cache, which `update` then only refers to.
  static void take_over(mx::array update, const mx::array& writer);

  bool is_taken_over() const { return is_taken_over_; }

  static constexpr char kName[] = "CacheUpdate";
  const std::vector<int> positions;

 private:
  bool is_taken_over_ = false; // then the inputs are the cache and `writer`
};

// The primitive of x if x is the lazy result of an update that no kernel has taken over, else null.
const CacheUpdate* open_update(const mx::array& x);

// The operand if y [B, H, S, D] is the lazy result of a transposition of it, else null. The operand has the elements in
// the order [B, S, H, D], and perhaps another shape. If S or H is 1, it may be the operand of a reshape.
const mx::array* operand_of_transposition(const mx::array& y);

// The primitive of x if x is the lazy result of an RMSNorm over vectors of `size` elements, else null.
inline const FusibleNorm* norm_of(const mx::array& x, int size) {
  const bool is_norm = is_lazy(x, FusibleNorm::kName) && x.shape(-1) == size;
  return is_norm ? static_cast<const FusibleNorm*>(&x.primitive()) : nullptr;
}

// Source code of two functions that a warp calls. set_rotation(angle) sets the rotation: by `angle` times the inverse
// of each frequency. norm_rope(x, weight, out) normalizes a row of kDim elements and multiplies it by `weight`, with
// kNorm, then rotates it, and writes it to `out`.
constexpr char kNormRope[] = R"(
  constexpr int kHalf = kDim / 2;
  constexpr int kPairs = (kHalf + 31) / 32;  // of a thread
  float sines[kPairs], cosines[kPairs];
  const auto set_rotation = [&](float angle) {
    for (int pair = 0; pair < kPairs; ++pair) {
      const float theta = angle * (1.0f / static_cast<float>(freqs[min(pair * 32 + int(threadIdx.x) % 32, kHalf - 1)]));
      sines[pair] = sinf(theta);
      cosines[pair] = cosf(theta);
    }
  };
  const auto norm_rope = [&](const T* x, const T* weight, T* out) {
    const int lane_of_warp = threadIdx.x % 32;
    float first[kPairs], second[kPairs], first_weight[kPairs], second_weight[kPairs];
    float squares = 0.0f;
    for (int pair = 0; pair < kPairs; ++pair) {
      const int i = pair * 32 + lane_of_warp;
      first[pair] = i < kHalf ? static_cast<float>(x[i]) : 0.0f;
      second[pair] = i < kHalf ? static_cast<float>(x[kHalf + i]) : 0.0f;
      first_weight[pair] = kNorm && i < kHalf ? static_cast<float>(weight[i]) : 0.0f;
      second_weight[pair] = kNorm && i < kHalf ? static_cast<float>(weight[kHalf + i]) : 0.0f;
      squares += first[pair] * first[pair] + second[pair] * second[pair];
    }
    for (int other = 16; other > 0; other /= 2) {
      squares += __shfl_xor_sync(0xFFFFFFFFu, squares, other);
    }
    const float norm = rsqrtf(squares / kDim + __int_as_float(kEps));
    for (int pair = 0; pair < kPairs; ++pair) {
      const int i = pair * 32 + lane_of_warp;
      if (i < kHalf) {
        const auto normalized = [&](float value, float factor) {
          if (!kNorm) {
            return value;
          }
          const T rounded = static_cast<T>(value * norm);
          return static_cast<float>(static_cast<T>(factor * static_cast<float>(rounded)));
        };
        const float a = normalized(first[pair], first_weight[pair]);
        const float b = normalized(second[pair], second_weight[pair]);
        out[i] = static_cast<T>(a * cosines[pair] - b * sines[pair]);
        out[kHalf + i] = static_cast<T>(a * sines[pair] + b * cosines[pair]);
      }
    }
  };
)";

// Source code that adds up `squares` of all threads of a block. Each thread gets the sum.
constexpr char kSumSquares[] = R"(
  __shared__ float of_warp[kThreads / 32];
  for (int other = 16; other > 0; other /= 2) {
    squares += __shfl_xor_sync(0xFFFFFFFFu, squares, other);
  }
  if (threadIdx.x % 32 == 0) {
    of_warp[threadIdx.x / 32] = squares;
  }
  __syncthreads();
  squares = 0.0f;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    squares += of_warp[warp];
  }
)";

} // namespace executorch_mlx::gpu
