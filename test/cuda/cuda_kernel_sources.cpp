// Writes the sources of the CUDA kernels to a folder, without a GPU: cuda_kernel_sources FOLDER.
// Prints the fused instructions of a payload, as on an NVIDIA GPU: cuda_kernel_sources --fused PAYLOAD. With
// --position, prints how the payload depends on the position of its token: see call/position.h.
//
// The program calls the functions of gpu/fused.h and gpu/sample.h as the runtime does, and stands in for
// mlx_internals/cuda.cpp and MLX's CUDA backend. compile() writes the source that the runtime would compile. Nothing
// computes a result.
#include <mlx/mlx.h>
#include <mlx/primitives.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "call/position.h"
#include "fusion/fuse.h"
#include "fusion/product_and_sum.h"
#include "fusion/product_group.h"
#include "fusion/quantized_embedding.h"
#include "fusion/rope.h"
#include "fusion/silu_product.h"
#include "fusion/sum_and_norm.h"
#include "gpu/fused.h"
#include "gpu/sample.h"
#include "gpu/sequence_kernel.h"
#include "gpu/verdicts.h"
#include "mlx_internals/cuda.h"
#include "program/program.h"

namespace mx = mlx::core;

namespace {

std::filesystem::path folder;

// The result of a kernel that did not run.
class Unknown : public mx::Primitive {
 public:
  using Primitive::Primitive;
  const char* name() const override { return "Unknown"; }
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {}
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {}
};

} // namespace

namespace executorch_mlx::gpu {

bool is_cuda(mx::Stream) { return true; }

int architecture(mx::Stream) { return 80; }

std::string compile(const std::string& name, const std::string& source, mx::Stream) {
  static std::map<std::string, int> counts; // by name
  std::ofstream(folder / (name + "." + std::to_string(counts[name]++) + ".cu")) << source;
  return "binary";
}

CUfunc_st* load(const std::string&, const std::string&, mx::Stream) {
  static char function;
  return reinterpret_cast<CUfunc_st*>(&function);
}

void* address_on_gpu(const mx::array&) { return nullptr; }

std::unique_ptr<KernelGraph> KernelGraph::make(mx::Stream) {
  class EmptyGraph : public KernelGraph {
    void add(const KernelRun&) override {}
    void reads(const mx::array&) override {}
    void writes(const mx::array&) override {}
    void keeps(const mx::array&) override {}
    void submit() override {}
  };
  return std::make_unique<EmptyGraph>();
}

std::unique_ptr<KernelReplay> KernelReplay::make(const std::vector<KernelRun>&, mx::Stream) { return nullptr; }

void keep_until_done(const std::vector<mx::array>&, mx::Stream) {}

std::unique_ptr<WorkReplay> WorkReplay::evaluate(const std::vector<mx::array>&, mx::Stream) { return nullptr; }

void copy_on_gpu(const mx::array&, const mx::array&, mx::Stream) {}

size_t memory_of_gpu(mx::Stream) { return 0; }

} // namespace executorch_mlx::gpu

// In place of the function in libmlx.
std::vector<mx::array> mlx::core::fast::precompiled_cuda_kernel(const std::string&, const std::string&,
    const std::vector<array>& inputs, const std::vector<Shape>& shapes, const std::vector<Dtype>& dtypes,
    const std::vector<ScalarArg>&, std::tuple<int, int, int>, std::tuple<int, int, int>, int, std::optional<float>,
    bool, StreamOrDevice) {
  const auto primitive = std::make_shared<Unknown>(default_stream(Device::cpu));
  return array::make_arrays(shapes, dtypes, primitive, inputs);
}

namespace {

namespace gpu = executorch_mlx::gpu;

constexpr int kDim = 64, kHeads = 4, kKeyHeads = 2, kCapacity = 512, kDepth = 256;

// Evaluates an array, of which the program needs the memory but no contents.
mx::array array_of(const mx::Shape& shape, mx::Dtype dtype) {
  mx::array x = mx::zeros(shape, dtype, mx::Device::cpu);
  x.eval();
  return x;
}

template <typename T>
T expect(std::optional<T> result, const char* function) {
  if (!result) {
    throw std::runtime_error(std::string(function) + ": got no kernel");
  }
  return *std::move(result);
}

// Lets the kernels that compute y compile their sources.
void compile(mx::array y) {
  auto outputs = y.outputs();
  y.primitive().eval_gpu(y.inputs(), outputs);
}

class Kernels {
 public:
  Kernels(mx::Dtype dtype, mx::Stream stream) : dtype_(dtype), stream_(stream) {}

  void fused() const {
    const auto a = zeros({2, kDepth}), b = zeros({2, kDepth});
    expect(gpu::silu_product(a, b, stream_), "silu_product");
    expect(gpu::add_rms_norm(a, b, zeros({kDepth}), 1e-5f, stream_), "add_rms_norm");
    for (const int rows : {1, 2}) {
      compile(rotated({kHeads}, rows, true)[0]);
      for (const bool has_norm : {false, true}) {
        compile(rotated({kHeads, kKeyHeads}, rows, has_norm)[0]);
      }
    }
  }

  void dequantize() const {
    for (const int bits : {4, 8}) {
      const auto matrix = quantized(kDepth, kDepth, bits);
      expect(gpu::dequantize(matrix, stream_), "dequantize");
      expect(gpu::dequantized_product(zeros({2, kDepth}), matrix, stream_), "dequantized_product");
    }
  }

  // The matrices have integers of `bits` bits, or none if it is 0.
  void products(int vectors, bool has_norm, int bits = 0) const {
    gpu::Vectors x{zeros({1, vectors, kDepth})};
    const auto w = bits == 0 ? gpu::Matrix(zeros({kDepth, kDepth})) : quantized(kDepth, kDepth, bits);
    if (has_norm) {
      x.norm = mx::square(zeros({kDepth}), stream_); // lazy: its address is not known when the kernel is chosen
      compile(product(x, {w})[0]);
      x.norm = zeros({kDepth});
    }
    for (size_t count = 1; count <= 4; ++count) {
      compile(product(x, std::vector<gpu::Matrix>(count, w))[0]);
    }
    compile(expect(gpu::gated_products(x, w, w, stream_), "gated_products"));
    compile(expect(gpu::product_and_sum(x, w, zeros(x.x.shape()), stream_), "product_and_sum"));
  }

  void updates(int positions) const {
    compile(updated(zeros({1, kKeyHeads, kCapacity, kDim}), zeros({1, kKeyHeads, positions, kDim}), positions));
  }

  void attention(int rows) const {
    const auto q = zeros({1, kHeads, rows, kDim});
    const auto cache = zeros({1, kKeyHeads, kCapacity, kDim});
    compile_attention(q, cache, cache, rows);
  }

  // With the norm and the rotation of query and key, and the update of the cache.
  void attention_step(int rows, bool has_norm) const {
    const auto heads = rotated({kHeads, kKeyHeads}, rows, has_norm);
    const auto by_position = [&](const mx::array& x) { // [rows, heads, 1, dim] -> [1, heads, rows, dim]
      return rows > 1 ? mx::transpose(x, {2, 1, 0, 3}, stream_) : x;
    };
    const auto value = mx::transpose(zeros({1, rows, kKeyHeads, kDim}), {0, 2, 1, 3}, stream_);
    const auto keys = updated(zeros({1, kKeyHeads, kCapacity, kDim}), by_position(heads[1]), rows);
    const auto values = updated(zeros({1, kKeyHeads, kCapacity, kDim}), value, rows);
    compile_attention(by_position(heads[0]), keys, values, rows);
  }

  void sample() const {
    const auto number = [](mx::Dtype dtype) { return array_of({1}, dtype); };
    const auto logits =
        expect(gpu::products_of_row({zeros({1, kDepth})}, {zeros({1000, kDepth})}, stream_), "products_of_row")[0];
    const executorch_mlx::SampleInputs inputs{
        logits, number(mx::float32), number(mx::float32), number(mx::int64), number(mx::int64), number(mx::float32)};
    const auto token = expect(gpu::sample(inputs, stream_), "sample");
    if (gpu::record({logits, token}) == nullptr) {
      throw std::runtime_error("sample: the draw is not in the sequence of the logits, so that no step is replayed");
    }
    compile(token);
  }

  void embeddings() const {
    const auto indices = array_of({1, 1}, mx::int64);
    compile(expect(gpu::embedding(zeros({kDepth, kDepth}), indices, stream_), "embedding"));
    if (dtype_ != mx::float32) {
      for (const int bits : {4, 8}) {
        compile(expect(gpu::embedding(quantized(kDepth, kDepth, bits), indices, stream_), "embedding"));
      }
    }
  }

 private:
  mx::array zeros(const mx::Shape& shape) const { return array_of(shape, dtype_); }

  gpu::Matrix quantized(int rows, int depth, int bits) const {
    constexpr int kGroupSize = 32;
    const auto scales = zeros({rows, depth / kGroupSize});
    return {array_of({rows, depth * bits / 32}, mx::uint32), scales, scales, kGroupSize, bits};
  }

  mx::array norm(const mx::array& x) const {
    return expect(gpu::rms_norm(x, zeros({x.shape(-1)}), 1e-5f, stream_), "rms_norm");
  }

  std::vector<mx::array> product(const gpu::Vectors& x, const std::vector<gpu::Matrix>& matrices) const {
    return expect(gpu::products_of_row(x, matrices, stream_), "products_of_row");
  }

  // Queries, or queries and keys, [rows, heads, 1, dim]: one array for each number of heads.
  std::vector<mx::array> rotated(const std::vector<int>& heads, int rows, bool has_norm) const {
    std::vector<mx::array> arrays;
    for (const int count : heads) {
      const auto x = zeros({rows, 1, count, kDim});
      arrays.push_back(mx::transpose(has_norm ? norm(x) : x, {0, 2, 1, 3}, stream_));
    }
    const auto known = array_of({rows}, mx::int32), freqs = array_of({kDim / 2}, mx::float32);
    const auto offset = has_norm ? known : mx::negative(known, stream_); // which the host does not know
    return expect(gpu::norm_rope(arrays, 1.0f, offset, freqs, stream_), "norm_rope");
  }

  // A cache with an update of the position 300 + i for each i.
  mx::array updated(const mx::array& cache, const mx::array& update, int count) const {
    std::vector<int> positions;
    for (int i = 0; i < count; ++i) {
      positions.push_back(300 + i);
    }
    return expect(gpu::update_positions(cache, update, positions, stream_), "update_positions");
  }

  // The spans end with the positions that updated() writes.
  void compile_attention(const mx::array& q, const mx::array& keys, const mx::array& values, int rows) const {
    if (rows == 1) {
      const auto part = [&](const mx::array& x) {
        return mx::slice(x, {0, 0, 0, 0}, {1, kKeyHeads, 301, kDim}, stream_);
      };
      compile(expect(gpu::attention_of_token(q, part(keys), part(values), 0.125f, stream_), "attention_of_token"));
      return;
    }
    std::vector<executorch_mlx::Span> spans;
    for (int i = 0; i < rows; ++i) {
      spans.push_back({0, 301 + i});
    }
    const auto y = expect(gpu::attention_of_rows(q, keys, values, 0.125f, spans, stream_), "attention_of_rows");
    compile(y.inputs()[0]); // y is a transposition
  }

  mx::Dtype dtype_;
  mx::Stream stream_;
};

std::string describe(const executorch_mlx::FusedInstruction& fused) {
  using namespace executorch_mlx;
  if (const auto* group = dynamic_cast<const ProductGroup*>(&fused)) {
    return std::string(group->norm ? "norm, " : "") + std::to_string(group->members.size()) + " products";
  }
  if (const auto* product = dynamic_cast<const SiluProduct*>(&fused)) {
    const bool has_products = product->gate_product && product->up_product;
    const bool has_norm = has_products && product->gate_product->norm;
    return std::string(has_norm ? "norm, " : "") + (has_products ? "products, " : "") + "silu, product";
  }
  if (const auto* sum = dynamic_cast<const ProductAndSum*>(&fused)) {
    return sum->product.norm ? "norm, product, sum" : "product, sum";
  }
  if (dynamic_cast<const LeftProduct*>(&fused) != nullptr) {
    return "left product";
  }
  if (dynamic_cast<const LeftSilu*>(&fused) != nullptr) {
    return "left silu";
  }
  if (dynamic_cast<const RopeGroup*>(&fused) != nullptr) {
    return std::to_string(fused.length) + " rope";
  }
  if (dynamic_cast<const QuantizedEmbedding*>(&fused) != nullptr) {
    return "embedding";
  }
  return dynamic_cast<const SumAndNorm*>(&fused) != nullptr ? "sum, norm" : "unknown";
}

// A program and the payload that it reads.
struct Loaded {
  explicit Loaded(const char* path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    payload.resize((bytes.size() + 7) / 8);
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(payload.data()));
    program = executorch_mlx::load_program(payload.data(), bytes.size(), mx::Device::gpu, "an Apple GPU");
  }

  std::vector<uint64_t> payload;
  executorch_mlx::MlxProgram program;
};

// A line for each fused instruction of a payload.
void print_fused(const char* path) {
  Loaded loaded(path);
  executorch_mlx::fuse(loaded.program);
  for (const auto& chain : loaded.program.chains) {
    for (const auto& instruction : chain.instructions) {
      if (instruction.fused != nullptr) {
        std::printf("%u: %s\n", instruction.index, describe(*instruction.fused).c_str());
      }
    }
  }
}

void print_position(const char* path) {
  const Loaded loaded(path);
  const auto use = executorch_mlx::find_position_use(loaded.program);
  use ? std::printf("%zu instructions, %zu for numbers, %zu rows, %zu updates\n", use->end, use->arithmetic.size(),
            use->rows.size(), use->caches.size())
      : std::printf("none\n");
}

} // namespace

int main(int argc, char** argv) {
  const gpu::OnTrial on_trial; // without a GPU, no trial can be held, and each kernel is used
  if (argc == 3 && std::string(argv[1]) == "--fused") {
    print_fused(argv[2]);
    return 0;
  }
  if (argc == 3 && std::string(argv[1]) == "--position") {
    print_position(argv[2]);
    return 0;
  }
  if (argc != 2) {
    std::fputs("usage: cuda_kernel_sources FOLDER, or cuda_kernel_sources --fused|--position PAYLOAD\n", stderr);
    return 2;
  }
  folder = argv[1];
  for (const auto dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    const Kernels kernels(dtype, mx::default_stream(mx::Device::cpu));
    kernels.fused();
    kernels.sample();
    kernels.embeddings();
    for (const bool has_norm : {false, true}) {
      for (const int rows : {1, 8}) {
        kernels.products(rows, has_norm);
        kernels.attention_step(rows, has_norm);
      }
      if (dtype == mx::float32) {
        continue;
      }
      kernels.products(/*vectors=*/20, has_norm);
      kernels.dequantize();
      for (const int vectors : {1, 8, 32}) {
        for (const int bits : {4, 8}) {
          kernels.products(vectors, has_norm, bits);
        }
      }
    }
    for (const int rows : {1, 8}) {
      kernels.updates(rows);
      kernels.attention(rows);
    }
  }
}
