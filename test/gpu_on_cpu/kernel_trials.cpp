// Holds the trials of the kernels for CUDA or for Metal on a CPU: see test_kernel_trials.py.
//
//   kernel_trials PLATFORM FOLDER [OPTIONS]
//
// PLATFORM is cuda, metal, or net, which has trials without kernels. The program stands in for the GPU: it compiles the
// sources of the kernels as C++, in FOLDER, and runs them. It prints a line for each kernel: its name, the verdict,
// whether it is used, its error, and the time of the race. Then it prints how many trials were held.
//
//   --only NAME               holds the trial of this kernel only
//   --edit NAME FROM TO       replaces FROM in the source of the function NAME
//   --time-without UNITS      the time of MLX's operations in a race, 1e9 by default. That of a kernel is the number of
//                             times that its threads start or pass a barrier
//   --file FOLDER             keeps the verdicts in a file there
//   --crash NAME              ends the process in the trial of a kernel
//   --sources FOLDER          writes the sources of the kernels for Metal to a folder
//   --choose LIST             as executorch_mlx_choose_kernels()
//   --count-waits             the trials of net count the milliseconds that they would wait
#include <dlfcn.h>
#include <mlx/mlx.h>
#include <mlx/primitives.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/metal.h"
#include "gpu/verdict_file.h"
#include "gpu/verdicts.h"
#include "group.h"
#include "mlx_internals/cuda.h"
#include "shim/exchange.h"

namespace mx = mlx::core;
namespace gpu = executorch_mlx::gpu;

extern "C" unsigned long gpu_steps();

namespace {

struct Edit {
  std::string kernel, from, to;
  bool is_made = false;
};

std::string platform, folder, sources;
std::vector<Edit> edits;
constexpr int kThreadsOfSampler = 8; // any number of threads is right, and few are faster here

std::string with_edits(const std::string& kernel, std::string source) {
  for (auto& [name, from, to, is_made] : edits) {
    if (name == kernel) {
      for (size_t at = 0; (at = source.find(from, at)) != std::string::npos; at += to.size()) {
        source.replace(at, from.size(), to);
        is_made = true;
      }
    }
  }
  return source;
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

bool is_of_sampler(const std::string& kernel) { return kernel.find("sample_") != std::string::npos; }

using Run = void (*)(void** arguments); // of one thread

std::set<Run> runs_of_sampler;

// Compiles a source with a function run_thread(void** arguments). A source that was compiled before is not again.
std::string compile_library(const std::string& source) {
  const std::string stem = folder + "/" + std::to_string(std::hash<std::string>()(source));
  const std::string library = stem + ".so";
  if (!std::filesystem::exists(library)) {
    const std::string own = stem + "." + std::to_string(std::hash<std::thread::id>()(std::this_thread::get_id()));
    std::ofstream(own + ".cpp") << source;
    const std::string command =
        std::string("c++ -std=c++20 -O1 -shared -fPIC -ffp-contract=off -fno-strict-aliasing -w -I") + SHIM_FOLDER +
        " " + own + ".cpp -o " + own + ".so";
    if (std::system(command.c_str()) != 0) {
      throw std::runtime_error("a kernel does not compile");
    }
    std::filesystem::rename(own + ".so", library);
  }
  return library;
}

Run load_library(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW);
  void* const run = handle != nullptr ? dlsym(handle, "run_thread") : nullptr;
  if (run == nullptr) {
    throw std::runtime_error(dlerror());
  }
  return reinterpret_cast<Run>(run);
}

void run_kernel(Run run, int groups, int threads, std::vector<void*>& arguments) {
  run_groups(groups, threads, [&] { run(arguments.data()); });
}

void allocate(mx::array& x) { x.set_data(mx::allocator::malloc(x.nbytes())); }

void evaluate_here(mx::array x);

// A kernel that is one operation of MLX's graph. The arguments are those of run_thread().
class Kernel : public mx::Primitive {
 public:
  Kernel(mx::Stream stream, Run run, int groups, int threads, std::vector<int> numbers)
      : Primitive(stream), run_(run), groups_(groups), threads_(threads), numbers_(std::move(numbers)) {}

  const char* name() const override { return "KernelOnCpu"; }
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {}
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    std::vector<void*> addresses, arguments;
    for (auto x : inputs) {
      evaluate_here(x);
      addresses.push_back(x.data<char>());
    }
    for (auto& y : outputs) {
      allocate(y);
      addresses.push_back(y.data<char>());
    }
    for (auto& address : addresses) {
      arguments.push_back(&address);
    }
    for (auto& number : numbers_) {
      arguments.push_back(&number);
    }
    run_kernel(run_, groups_, threads_, arguments);
  }

 private:
  Run run_;
  int groups_, threads_;
  std::vector<int> numbers_;
};

std::vector<mx::array> in_row_order(const std::vector<mx::array>& inputs, mx::Stream stream) {
  std::vector<mx::array> result;
  for (const auto& x : inputs) {
    result.push_back(mx::contiguous(x, /*allow_col_major=*/false, stream));
  }
  return result;
}

// Computes an array as mx::eval() does. The kernels run at once, and MLX computes its own operations.
void evaluate_here(mx::array x) {
  static const auto evaluate = reinterpret_cast<void (*)(std::vector<mx::array>)>(
      dlsym(RTLD_NEXT, "_ZN3mlx4core4evalESt6vectorINS0_5arrayESaIS2_EE"));
  static const std::set<std::string> kOurs = {
      "KernelOnCpu", "SequenceKernel", "CacheUpdate", "FusibleNorm", "FusibleRope"};
  if (x.status() != mx::array::Status::unscheduled) {
    return evaluate({x});
  }
  for (const auto& input : std::vector<mx::array>(x.inputs())) {
    evaluate_here(input);
  }
  if (!x.has_primitive() || !kOurs.contains(x.primitive().name())) {
    return evaluate({x});
  }
  auto outputs = x.outputs();
  x.primitive().eval_gpu(x.inputs(), outputs);
  for (auto& y : outputs) {
    y.set_status(mx::array::Status::available);
  }
  x.detach();
}

} // namespace

// -- in place of functions of libmlx -----------------------------------------------------------------

void mlx::core::eval(std::vector<array> arrays) {
  for (const auto& x : arrays) {
    evaluate_here(x);
  }
}

std::vector<mx::array> mlx::core::fast::precompiled_cuda_kernel(const std::string& name, const std::string& binary,
    const std::vector<array>& inputs, const std::vector<Shape>& shapes, const std::vector<Dtype>& dtypes,
    const std::vector<ScalarArg>& scalars, std::tuple<int, int, int> grid, std::tuple<int, int, int> block, int,
    std::optional<float>, bool, StreamOrDevice s) {
  const auto stream = std::get<Stream>(s);
  const int groups = std::get<0>(grid) / std::get<0>(block);
  const int threads = is_of_sampler(name) ? kThreadsOfSampler : std::get<0>(block);
  std::vector<int> numbers;
  for (const auto& scalar : scalars) {
    numbers.push_back(std::get<int>(scalar));
  }
  const auto kernel = std::make_shared<Kernel>(stream, load_library(binary), groups, threads, numbers);
  return array::make_arrays(shapes, dtypes, kernel, in_row_order(inputs, stream));
}

namespace {

std::string metal_name(mx::Dtype dtype) {
  switch (dtype) {
    case mx::float32:
      return "float";
    case mx::float16:
      return "half";
    case mx::bfloat16:
      return "bfloat16_t";
    case mx::int64:
      return "int64_t";
    case mx::uint64:
      return "uint64_t";
    case mx::uint32:
      return "uint32_t";
    default:
      return "int32_t";
  }
}

// What MLX makes the source of a Metal kernel from.
struct MetalKernel {
  std::string name, body, header;
  std::vector<std::string> input_names, output_names;

  // Declarations of the template arguments.
  static std::string constants(const std::vector<std::pair<std::string, mx::fast::TemplateArg>>& arguments) {
    std::string text;
    for (const auto& [name, value] : arguments) {
      const auto* dtype = std::get_if<mx::Dtype>(&value);
      text += dtype != nullptr
          ? "using " + name + " = " + metal_name(*dtype) + ";\n"
          : "constexpr constant int " + name + " = " + std::to_string(std::get<int>(value)) + ";\n";
    }
    return text;
  }

  bool reads_shape(size_t input) const { return body.find(input_names[input] + "_shape") != std::string::npos; }

  // The source for Metal. Arrays of fewer than 8 elements are in another address space.
  std::string for_metal(
      const std::vector<mx::array>& inputs, const std::vector<mx::Dtype>& dtypes, const std::string& constants) const {
    std::string text = header + constants + "kernel void " + name + "(\n";
    for (size_t i = 0; i < inputs.size(); ++i) {
      text += std::string("const ") + (inputs[i].size() < 8 ? "constant " : "device ") + metal_name(inputs[i].dtype()) +
          "* " + input_names[i] + ",\n";
      text += reads_shape(i) ? "const constant int* " + input_names[i] + "_shape,\n" : "";
    }
    for (size_t i = 0; i < dtypes.size(); ++i) {
      text += "device " + metal_name(dtypes[i]) + "* " + output_names[i] + ",\n";
    }
    return text + "uint3 threadgroup_position_in_grid, uint3 thread_position_in_threadgroup) {\n" + body + "}\n";
  }

  // The same as C++, with the pointers in `arguments`.
  std::string for_cpu(
      const std::vector<mx::array>& inputs, const std::vector<mx::Dtype>& dtypes, const std::string& constants) const {
    std::string text = header + constants +
        "extern \"C\" void run_thread(void** arguments) {\n"
        "const uint3 threadgroup_position_in_grid{gpu_group(), 0, 0};\n"
        "const uint3 thread_position_in_threadgroup{gpu_thread(), 0, 0};\n";
    size_t number = 0;
    const auto add = [&](const std::string& type, const std::string& name) {
      text += type + "* " + name + " = *static_cast<" + type + "**>(arguments[" + std::to_string(number++) + "]);\n";
    };
    for (size_t i = 0; i < inputs.size(); ++i) {
      add("const " + metal_name(inputs[i].dtype()), input_names[i]);
      if (reads_shape(i)) {
        text += "const int " + input_names[i] + "_shape[] = {";
        for (const int size : inputs[i].shape()) {
          text += std::to_string(size) + ",";
        }
        text += "};\n";
      }
    }
    for (size_t i = 0; i < dtypes.size(); ++i) {
      add(metal_name(dtypes[i]), output_names[i]);
    }
    text += body + "}\n";
    replace_all(text, "#define GPU_GROUP_MEMORY threadgroup", "#define GPU_GROUP_MEMORY static");
    return text;
  }
};

} // namespace

mx::fast::CustomKernelFunction mlx::core::fast::metal_kernel(const std::string& name,
    const std::vector<std::string>& input_names, const std::vector<std::string>& output_names, const std::string& body,
    const std::string& header, bool, bool, const CompileOptions&) {
  const MetalKernel kernel{name.substr(name.find("mlx_") + 4), body, header, input_names, output_names};
  return [=](const std::vector<array>& inputs, const std::vector<Shape>& shapes, const std::vector<Dtype>& dtypes,
             std::tuple<int, int, int> grid, std::tuple<int, int, int> group,
             std::vector<std::pair<std::string, TemplateArg>> arguments, std::optional<float>, bool, StreamOrDevice s) {
    const auto stream = std::get<Stream>(s);
    const int groups = std::get<0>(grid) / std::get<0>(group);
    int threads = std::get<0>(group);
    for (auto& [argument, value] : arguments) {
      if (argument == "kThreads" && is_of_sampler(name)) {
        value = threads = kThreadsOfSampler;
      }
    }
    const auto constants = MetalKernel::constants(arguments);
    const auto text = kernel.for_metal(inputs, dtypes, constants);
    if (!sources.empty()) {
      std::ofstream(sources + "/" + kernel.name + "." + std::to_string(std::hash<std::string>()(text)) + ".metal")
          << text;
    }
    const auto library = compile_library(with_edits(kernel.name, kernel.for_cpu(inputs, dtypes, constants)));
    const auto primitive = std::make_shared<Kernel>(stream, load_library(library), groups, threads, std::vector<int>());
    return array::make_arrays(shapes, dtypes, primitive, in_row_order(inputs, stream));
  };
}

// -- in place of mlx_internals/cuda.cpp and gpu/metal.cpp ----------------------------------------------

namespace executorch_mlx::gpu {

bool is_cuda(mx::Stream) { return platform == "cuda"; }
bool is_metal(mx::Stream) { return platform == "metal"; }
int architecture(mx::Stream) { return 80; }

std::string compile(const std::string& name, const std::string& kernel, mx::Stream) {
  std::string source = with_edits(name, kernel);
  replace_all(source, R"(asm("mov.b32 %0, {0, %1};" : "=f"(x) : "h"(bits));)", "x = float_of_bfloat16(bits);");
  replace_all(source, R"(asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));)", "bits = float16_of(x);");
  replace_all(source, R"(asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));)", "x = float_of_float16(bits);");
  if (const auto tiles = source.find("if constexpr (kIsBfloat16) {\n      asm(\"mma"); tiles != std::string::npos) {
    source.replace(tiles, source.find("  };\n", tiles) - tiles,
        "multiply_add_tiles<kIsBfloat16>(sums, a0, a1, a2, a3, b0, b1);\n");
  }
  if (const auto fused = source.find("if constexpr (kIsBfloat16) {\n      asm(\"fma"); fused != std::string::npos) {
    source.replace(fused, source.find("    return y;", fused) - fused, "y = fused_pairs<kIsBfloat16>(a, b, c);\n");
  }
  if (const auto threads = source.find("kThreads = "); is_of_sampler(name)) {
    source.replace(threads, source.find(';', threads) - threads, "kThreads = " + std::to_string(kThreadsOfSampler));
  }
  const auto begin = source.find(name + "(") + name.size() + 1;
  const std::string parameters = source.substr(begin, source.find(") {", begin) - begin);
  std::string call;
  for (size_t at = 0, number = 0; at < parameters.size(); ++number) {
    const size_t end = std::min(parameters.find(", ", at), parameters.size());
    const std::string parameter = parameters.substr(at, end - at);
    const std::string type = parameter.substr(0, parameter.rfind(' '));
    call += (number > 0 ? ", " : "") + ("*static_cast<" + type + "*>(arguments[" + std::to_string(number) + "])");
    at = end + 2;
  }
  return compile_library("#include \"cuda.h\"\n" + source + "extern \"C\" void run_thread(void** arguments) { " + name +
      "(" + call + "); }\n");
}

CUfunc_st* load(const std::string& name, const std::string& binary, mx::Stream) {
  const Run run = load_library(binary);
  if (is_of_sampler(name)) {
    runs_of_sampler.insert(run);
  }
  return reinterpret_cast<CUfunc_st*>(run);
}

void* address_on_gpu(const mx::array& x) { return const_cast<mx::array&>(x).data<char>(); }

std::unique_ptr<KernelGraph> KernelGraph::make(mx::Stream) {
  class GraphOnCpu : public KernelGraph { // runs each kernel when it is added
    void add(const KernelRun& kernel) override {
      const auto run = reinterpret_cast<Run>(kernel.function);
      std::vector<void*> arguments;
      for (const uint64_t& argument : kernel.arguments) {
        arguments.push_back(const_cast<uint64_t*>(&argument));
      }
      run_kernel(run, kernel.blocks, runs_of_sampler.contains(run) ? kThreadsOfSampler : kernel.threads, arguments);
    }
    void reads(const mx::array&) override {}
    void writes(const mx::array&) override {}
    void keeps(const mx::array&) override {}
    void submit() override {}
  };
  return std::make_unique<GraphOnCpu>();
}

std::unique_ptr<KernelReplay> KernelReplay::make(const std::vector<KernelRun>&, mx::Stream) { return nullptr; }

void keep_until_done(const std::vector<mx::array>&, mx::Stream) {}

std::unique_ptr<WorkReplay> WorkReplay::evaluate(const std::vector<mx::array>&, mx::Stream) { return nullptr; }

void copy_on_gpu(const mx::array&, const mx::array&, mx::Stream) {}

size_t memory_of_gpu(mx::Stream) { return 0; }

} // namespace executorch_mlx::gpu

namespace {

using Wait = std::function<void(int milliseconds)>;

void sleep_for(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Trials that need no kernel. Their times differ by so much that noise does not matter where they are measured.
std::vector<std::pair<gpu::Kernel, gpu::Trial>> trials_of_net(const Wait& wait_for) {
  const auto trial = [&](float result, int with_kernel, int without_kernel) {
    const auto wait = [=](int milliseconds) {
      return [=] {
        wait_for(milliseconds);
        return std::vector{mx::array(1.0f)};
      };
    };
    return gpu::Trial{1e-3,
        [=](mx::Stream) {
          return std::vector{gpu::Comparison{{mx::array({1.0f, result})}, {mx::array({1.0f, 2.0f})}}};
        },
        [=](mx::Stream) { return gpu::Race{wait(with_kernel), wait(without_kernel)}; }};
  };
  const auto failing = gpu::Trial{
      0, [](mx::Stream) -> std::vector<gpu::Comparison> { throw std::runtime_error("no compiler"); }, nullptr};
  using gpu::Kernel;
  return {{Kernel::sample, trial(2.001f, 0, 50)}, {Kernel::products, trial(2.01f, 0, 50)},
      {Kernel::quantized_products, trial(2.0f, 50, 0)}, {Kernel::attention, failing},
      {Kernel::norm_rope, trial(NAN, 0, 50)}, {Kernel::silu_product, trial(INFINITY, 0, 50)}};
}

void print(const std::vector<gpu::Decision>& decisions, int held) {
  constexpr const char* kOutcomes[] = {"used", "wrong", "slow", "failed", "crashed"};
  for (const auto& d : decisions) {
    std::printf("%s %s %d %g %g %s\n", gpu::name(d.kernel),
        d.is_chosen ? "chosen" : kOutcomes[static_cast<int>(d.verdict.outcome)], d.is_used, d.verdict.error,
        d.verdict.microseconds, d.verdict.reason.c_str());
  }
  std::printf("held %d\n", held);
}

} // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  platform = arguments.at(0);
  folder = arguments.at(1);
  std::string only, crash, choices;
  std::optional<gpu::VerdictFile> file;
  double time_without = 1e9, waited = 0;
  bool counts_waits = false;
  for (size_t i = 2; i < arguments.size(); ++i) {
    const std::string option = arguments[i];
    const auto next = [&] { return arguments.at(++i); };
    if (option == "--only") {
      only = next();
    } else if (option == "--edit") {
      const std::string kernel = next(), from = next();
      edits.push_back({kernel, from, next()});
    } else if (option == "--time-without") {
      time_without = std::stod(next());
    } else if (option == "--file") {
      file.emplace(next(), "the key of a test");
    } else if (option == "--crash") {
      crash = next();
    } else if (option == "--sources") {
      sources = next();
    } else if (option == "--choose") {
      choices = next();
    } else if (option == "--count-waits") {
      counts_waits = true;
    }
  }
  const auto stream = mx::default_stream(mx::Device::cpu);
  const Wait count_wait = [&waited](int milliseconds) { waited += milliseconds; };
  auto trials = platform == "net" ? trials_of_net(counts_waits ? count_wait : Wait(sleep_for)) : gpu::trials_of(stream);
  int held = 0;
  std::optional<double> time; // of the present trial
  for (auto& [kernel, trial] : trials) {
    trial.compare = [&held, &time, &crash, kernel = kernel, compare = trial.compare](mx::Stream s) {
      ++held;
      time.reset();
      if (crash == gpu::name(kernel)) {
        std::_Exit(3);
      }
      return compare(s);
    };
  }
  std::erase_if(trials, [&](const auto& trial) { return !only.empty() && only != gpu::name(trial.first); });
  const auto count = [&](const std::function<void()>& run, bool has_kernel) {
    if (has_kernel && !time) {
      const auto before = gpu_steps();
      run();
      time = static_cast<double>(gpu_steps() - before);
    }
    return has_kernel ? *time : time_without;
  };
  const auto waits = [&waited](const std::function<void()>& run, bool) {
    const auto before = waited;
    run();
    return 1e3 * (waited - before);
  };
  gpu::Stopwatch stopwatch = gpu::measure;
  if (platform != "net") {
    stopwatch = count;
  } else if (counts_waits) {
    stopwatch = waits;
  }
  const auto decisions =
      gpu::decide(trials, gpu::parse_choices(choices, "--choose"), stream, file ? &*file : nullptr, stopwatch);
  print(decisions, held);
  for (const auto& edit : edits) {
    if (!edit.is_made) {
      std::fprintf(stderr, "--edit: %s does not contain %s\n", edit.kernel.c_str(), edit.from.c_str());
      return 2;
    }
  }
}
