// Replaces the other source files of this folder on platforms without CPU kernels.
#pragma GCC visibility push(default)  // the library exports only these functions
#include <executorch_mlx/delegate.h>
#pragma GCC visibility pop

#include "accelerate.h"

namespace executorch_mlx::cpu {

void parallel(int count, const std::function<void(int)>& item) {
  for (int i = 0; i < count; ++i) {
    item(i);
  }
}

bool computes_at_once(mx::Stream) {
  return false;
}

std::optional<mx::array> matmul(
    const mx::array&, const mx::array&, const std::optional<mx::array>&, float, float, mx::Stream, const mx::array*) {
  return std::nullopt;
}

std::optional<mx::array> pack_matrix(const mx::array&, int64_t, mx::Stream) {
  return std::nullopt;
}

bool has_fast_integers(int, int, int) {
  return false;
}

std::optional<size_t> integer_panels_size(const PackedMatrix&, int, int, mx::Stream) {
  return std::nullopt;
}

void pack_integer_panels(const PackedMatrix&, int, int, mx::array&) {}

std::optional<size_t> panels_size(const mx::array&, mx::Stream) {
  return std::nullopt;
}

void pack_panels(const mx::array&, mx::array&) {}

std::optional<mx::array> add(const mx::array&, const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> subtract(const mx::array&, const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> multiply(const mx::array&, const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<ElementwiseResults> elementwise_sequence(
    const ElementwiseSequence&, const std::vector<mx::array>&, mx::Stream) {
  return std::nullopt;
}

bool can_pack_recurrent(const mx::array&, mx::Stream) {
  return false;
}

mx::array pack_recurrent(const mx::array& b) {
  return b;
}

std::optional<RecurrentLoopResults> recurrent_loop(
    const RecurrentCell&, const RecurrentLoopOperands&, const mx::array&) {
  return std::nullopt;
}

std::optional<mx::array> copy(const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> concatenate(const std::vector<mx::array>&, int, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> matmul_half(const mx::array&, const mx::array&, mx::Dtype, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> quantized_matmul(const mx::array&, const PackedMatrix&, int, int, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> int8_quantized_matmul(const mx::array&, const PackedMatrix&, int, int, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> dequantize(const PackedMatrix&, int, int, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> convert(const mx::array&, mx::Dtype, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> mask_logits(const mx::array&, const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> attention_of_rows(
    const mx::array&, const mx::array&, const mx::array&, float, const std::vector<Span>&,
    const std::vector<mx::array>&, mx::Stream) {
  return std::nullopt;
}

std::optional<std::vector<mx::array>> quantized_matmuls(
    const mx::array&, const std::vector<PackedMatrix>&, int, int, mx::Stream) {
  return std::nullopt;
}

std::optional<std::vector<mx::array>> int8_quantized_matmuls(
    const mx::array&, const std::vector<PackedMatrix>&, int, int, mx::Stream) {
  return std::nullopt;
}

std::optional<std::vector<mx::array>> matmuls(const mx::array&, const std::vector<RowMatrix>&, mx::Stream) {
  return std::nullopt;
}

std::optional<std::vector<mx::array>> matmuls_half(
    const mx::array&, const std::vector<RowMatrix>&, const std::vector<mx::Dtype>&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> gather_matmul(
    const mx::array&, const mx::array&, const std::optional<mx::array>&, const std::optional<mx::array>&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> gather_quantized_matmul(
    const mx::array&, const mx::array&, const mx::array&, const mx::array&, const std::optional<mx::array>&,
    const std::optional<mx::array>&, int, int, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> exp(const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> silu(const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> sigmoid(const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> tanh(const mx::array&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> rms_norm(const mx::array&, const std::optional<mx::array>&, float, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> convolution(
    const mx::array&, const mx::array&, const Window&, int, const mx::Shape&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> rope(
    const mx::array&, int, float, float, const mx::array&, const std::optional<mx::array>&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> attention(
    const mx::array&, const mx::array&, const mx::array&, float, bool, const std::optional<mx::array>&, mx::Stream) {
  return std::nullopt;
}

std::optional<QuantizedEntries> quantize_entries(
    const std::vector<mx::array>&, const EntryFormat&, mx::Dtype, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> quantized_attention(const QuantizedAttention&, mx::Stream) {
  return std::nullopt;
}

std::optional<RecurrenceStates> gated_recurrence(const GatedRecurrenceInputs&, mx::Stream) {
  return std::nullopt;
}

std::optional<RecurrenceStates> selective_scan(const SelectiveScanInputs&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> read_layer_state(const mx::array&, const std::vector<int>&, mx::Stream) {
  return std::nullopt;
}

std::optional<mx::array> sample(const SampleInputs&, mx::Stream) {
  return std::nullopt;
}

void check_instruction_set() {}

} // namespace executorch_mlx::cpu

const char* executorch_mlx_cpu_kernels() {
  return "";
}

const char* executorch_mlx_blas() {
  return "mlx";
}
