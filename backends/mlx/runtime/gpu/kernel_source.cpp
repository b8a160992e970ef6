#include "kernel_source.h"

#include <stdexcept>

#include "../error.h"

namespace executorch_mlx::gpu {

namespace {

constexpr char kPrelude[] = R"(
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7F800000)

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  __device__ explicit bfloat16(float x) {
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    const uint32_t b = __float_as_uint(x);
    bits = x != x ? 0x7FFF : (b + 0x7FFF + (b >> 16 & 1)) >> 16;
#endif
  }
  __device__ explicit operator float() const {
    float x;
    asm("mov.b32 %0, {0, %1};" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct float16 {
  uint16_t bits;
  float16() = default;
  __device__ explicit float16(float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

)";

const char* name_of(mx::Dtype dtype) {
  switch (dtype) {
    case mx::bool_:
      return "bool";
    case mx::uint8:
      return "uint8_t";
    case mx::uint16:
      return "uint16_t";
    case mx::uint32:
      return "uint32_t";
    case mx::uint64:
      return "uint64_t";
    case mx::int8:
      return "int8_t";
    case mx::int16:
      return "int16_t";
    case mx::int32:
      return "int32_t";
    case mx::int64:
      return "int64_t";
    case mx::float16:
      return "float16";
    case mx::bfloat16:
      return "bfloat16";
    case mx::float32:
      return "float";
    default:
      throw std::invalid_argument(str("a kernel cannot read or write ", dtype));
  }
}

} // namespace

std::string input_parameter(mx::Dtype dtype, const std::string& name) {
  return str("const ", name_of(dtype), "* ", name);
}

std::string output_parameter(mx::Dtype dtype, const std::string& name) { return str(name_of(dtype), "* ", name); }

std::string number_parameter(const std::string& name) { return str("int ", name); }

std::string select_numbers(const std::vector<const char*>& names, int count, const std::string& index) {
  std::string text;
  for (const char* name : names) {
    text += str("  int ", name, " = ", name, "0;\n");
  }
  for (int i = 1; i < count; ++i) {
    text += str("  if (", index, " == ", i, ") {");
    for (const char* name : names) {
      text += str(" ", name, " = ", name, i, ";");
    }
    text += " }\n";
  }
  return text;
}

std::string kernel_source(const std::string& name, mx::Dtype type, const Constants& constants,
    const std::vector<std::string>& parameters, std::string_view body, std::string_view header,
    std::string_view attributes) {
  std::string text = str(kPrelude, "using T = ", name_of(type), ";\n");
  for (const auto& [constant, value] : constants) {
    text += str("constexpr int ", constant, " = ", value, ";\n");
  }
  text += str(header, "extern \"C\" __global__ void ", attributes, " ", name, "(");
  const char* separator = "";
  for (const auto& parameter : parameters) {
    text += str(separator, parameter);
    separator = ", ";
  }
  return str(text, ") {\n", body, "}\n");
}

} // namespace executorch_mlx::gpu
