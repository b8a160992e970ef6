"""The tests that `make test` leaves out, because they take long and similar tests remain. `make test-all` runs them.

A key of SHORT_FORM is a test function. Its value lists patterns of the parameters with which `make test` runs the
function, as in the names that pytest prints; an empty list leaves the function out. A key without a function is for all
tests of the file that have parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase

SHORT_FORM: dict[str, list[str]] = {
    "cluster/test_tensor_parallel.py::test_four_processes_share_two_key_heads_of_a_quantized_model": [],
    "custom_kernel_ops/test_sample.py": ["eager*", "node*", "replaced*", "dtype*"],
    "custom_kernel_ops/test_sample.py::test_any_vocabulary_and_batch": ["eager-4-*", "node-4-*", "replaced-4-*"],
    "custom_kernel_ops/test_sample.py::test_token_equals_the_specification": ["*"],
    "custom_kernel_ops/test_sample_distribution.py::test_frequencies": ["*-50-400-10"],
    "fuzz/test_fuzz.py::test_broken_fusion_is_found": ["attention", "gelu"],
    "fuzz/test_fuzz.py::test_programs_near_a_fusion_equal_eager_torch": ["attention", "quantized", "rms_norm"],
    "llm/test_check.py::test_no_tensor_of_the_check_is_as_large_as_a_cache": ["logits"],
    "llm/test_check.py::test_right_program_is_written": ["tokens", "int4 and bfloat16"],
    "llm/test_chunks.py::test_float32": ["gemma3", "qwen3_moe", "llama3", "phi3, longrope"],
    "llm/test_chunks.py::test_half_precision_and_quantization": [
        "qwen3-bfloat16", "qwen3-int4", "gemma2-int4 with int8 activations", "mixtral-int8"],
    "llm/test_chunks.py::test_models_with_states": ["qwen3_5", "mamba2"],
    "llm/test_export.py::test_half_precision_draws_a_most_likely_token": ["dtype1"],
    "llm/test_kv_bits.py::test_16_bits_are_half_precision": [],
    "llm/test_kv_bits.py::test_a_portable_program_gives_the_tokens_of_one_with_extensions": ["4"],
    "llm/test_memory_limit.py::test_memory_limit_option_takes_a_size": ["512MiB", "1.5 gb"],
    "llm/test_memory_limit.py::test_packed_weights_take_the_place_of_those_in_the_file": ["True"],
    "llm/test_methods.py": ["*qwen3*", "*gemma2*", "*mixtral*"],
    "llm/test_mlx_folder.py::test_greedy_equals_mlx_lm": ["qwen3"],
    "llm/test_more_families.py::test_greedy_of_an_exported_model_equals_transformers": ["latent attention", "sinks"],
    "llm/test_mtp.py::test_right_guesses_are_accepted": [],
    "llm/test_repeated_layers.py::test_repeated_layers_have_the_graph_of_a_plain_trace": [
        "verify-windows", "chunk-qwen3", "chunk-experts"],
    "llm/test_same_bytes.py::test_the_hash_seed_changes_no_byte": [],
    "llm/test_state_families.py::test_a_quantized_model_answers_like_one_with_the_dequantized_weights": ["mamba2-*"],
    "llm/test_state_families.py::test_an_exported_model": ["falcon_h1"],
    "llm/test_state_mtp.py::test_log_probabilities_and_scores": [],
    "llm/test_state_mtp.py::test_rewind_in_the_program": [],
    "llm/test_state_mtp.py::test_wrong_guesses_are_rejected": [],
    "models/test_models.py::test_model": [
        "llama", "gemma3", "qwen3", "gpt2", "bert", "clip", "resnet", "t5 encoder", "whisper encoder", "gru"],
    "ops/test_quantized_cache.py::test_portable_program": [
        "mlx::quantized_attention", "mlx::quantized_attention/ring, rows", "mlx::quantized_attention/rotated, dynamic"],
    "partitioner/test_partitioner.py::test_cumulative_operator_over_a_dynamic_dimension": ["cumprod"],
    "runtime/test_import_order.py::test_commands_say_why_they_fail": ["run"],
    "runtime/test_import_order.py::test_doctor_says_which_delegate_answers": ["theirs first"],
    "runtime/test_import_order.py::test_ours_first_runs_programs": ["Runtime"],
    "runtime/test_memory_state.py::test_kernel_that_runs_out_of_memory_fails_only_its_call": ["1-0"],
    "runtime/test_output_copies.py::test_copies_start_no_threads_unless_outputs_are_large": ["131072-2"],
    "runtime/test_recurrences.py::test_number_of_threads_does_not_matter": ["rnn"],
    "test_patterns.py::test_rope_along_axis_1": ["*-torch.float32"],
    "test_patterns.py::test_rope_at_any_positions": ["torch.float32-*"],
}


def _parts(name: str) -> tuple[str, str, str]:
    """The file, the function with its file, and the parameters of a test."""
    function, _, parameters = name.removesuffix("]").partition("[")
    return function.partition("::")[0], function, parameters


def is_in_short_form(name: str) -> bool:
    """Return whether `make test` runs a test. `name` is pytest's name of it, without the folder `test/`."""
    file, function, parameters = _parts(name)
    patterns = SHORT_FORM.get(function, SHORT_FORM.get(file) if parameters else None)
    return patterns is None or any(fnmatchcase(parameters, pattern) for pattern in patterns)


def without_test(names: Iterable[str]) -> list[str]:
    """Return the keys and patterns of SHORT_FORM that fit no test. `names` has the names of all tests."""
    parameters_of = defaultdict(set)
    for name in names:
        file, function, parameters = _parts(name)
        parameters_of[function].add(parameters)
        parameters_of[file].add(parameters)
    unknown = [key for key in SHORT_FORM if key not in parameters_of]
    for key, patterns in SHORT_FORM.items():
        unknown += [f"{key}[{p}]" for p in patterns if not any(fnmatchcase(x, p) for x in parameters_of[key])]
    return unknown
