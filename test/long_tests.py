"""The tests that `make test` leaves out, because they take long and similar tests remain. `make test-all` runs them.

Of the op rows in most files of test/ops, `make test` runs all programs, and the first row of each operator. Here, the
overloads of an operator and its variant `_copy` count as one operator.

A key of SHORT_FORM is a test function. Its value lists patterns of the parameters with which `make test` runs the
function, as in the names that pytest prints; an empty list leaves the function out. "not" before a pattern leaves out
the parameters that match, and keeps the others; such a list has no other patterns. A key without a function is for all
tests of the file that have parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase

# Files of whose operators one op row says little about the others.
ALL_OP_ROWS = ("ops/test_attention.py", "ops/test_conv.py", "ops/test_kv_cache.py")

SHORT_FORM: dict[str, list[str]] = {
    "arm64/test_arm64_programs.py::test_a_thousand_seeds": [],
    "arm64/test_arm64_programs.py::test_any_size_of_pages": [],
    "arm64/test_arm64_programs.py::test_example_in_c": [],
    "arm64/test_arm64_programs.py::test_text_of_the_demo_model": [],
    "arm64/test_arm64_programs.py::test_wheel_contains_the_libraries_for_arm64": [],
    "cli/test_doctor.py::test_an_unknown_device_is_an_error": [],
    "cli/test_export_command.py::test_export_merges_an_adapter": [],
    "cli/test_export_command.py::test_int4_is_smaller_and_runs": [],
    "cuda/test_cuda_kernels.py::test_every_kernel_compiles": ["sm_90"],
    "custom_kernel_ops/test_sample.py": ["eager*", "node*", "dtype*"],
    "custom_kernel_ops/test_sample.py::test_any_top_p": ["eager-*-0.9999", "node-*-0.9999"],
    "custom_kernel_ops/test_sample.py::test_any_vocabulary_and_batch": ["eager-4-*", "node-4-*", "replaced-4-8193"],
    "custom_kernel_ops/test_sample.py::test_fifty_seeds_equal_the_specification_and_a_thousand_vary": [
        "eager-all",
        "eager-top_p",
        "node-*",
    ],
    "custom_kernel_ops/test_sample.py::test_nan_is_never_drawn": ["eager-32000-all", "node-32000-min_p"],
    "custom_kernel_ops/test_sample.py::test_token_equals_the_specification": ["*-32000-*-text", "*-32000-*-ties"],
    "custom_kernel_ops/test_sample_distribution.py::test_frequencies": ["*-50-400-10"],
    "custom_kernel_ops/test_sample_head.py::test_exports_with_a_dynamic_dimension": ["name-*", "*-Dim-False-False"],
    "encoders/test_embeddings.py::test_embeddings_equal_transformers": ["modernbert", "gemma3", "qwen3"],
    "fuzz/test_fuzz.py::test_broken_fusion_is_found": ["gelu"],
    "fuzz/test_fuzz.py::test_programs_near_a_fusion_equal_eager_torch": ["rms_norm"],
    "gpu_on_cpu/test_kernel_trials.py::test_a_wrong_kernel_is_not_used": [
        "cuda-sample-*",
        "cuda-quantized_products-quantized_gated_products-*",
        "cuda-attention-attention_step-copy*",
        "cuda-embedding-embedding-*",
        "metal-products-product-*",
        "metal-norm_rope-*",
    ],
    "gpu_on_cpu/test_verdict_file.py::test_a_valid_sum_does_not_make_contents_valid": ["the key*", "*perfect"],
    "gpu_on_cpu/test_verdict_file.py::test_damage_leads_to_new_trials": ["cut", "no sum", "too long"],
    "inspect/test_hostile_files.py::test_nested_branches": ["500-*"],
    "interpreter/test_language_models.py::test_demo_model": ["int4-full", "none-window"],
    "llm/test_cache_rows.py::test_a_call_does_not_copy_the_caches": ["not prefill"],
    "llm/test_check.py::test_command_exits_with_an_error_and_leaves_no_file": [],
    "llm/test_check.py::test_context_of_one_chunk": ["16-5"],
    "llm/test_check.py::test_no_tensor_of_the_check_is_as_large_as_a_cache": [],
    "llm/test_check.py::test_right_program_is_written": ["int4 and bfloat16"],
    "llm/test_chunks.py::test_float32": ["gemma3", "qwen3_moe", "phi3, longrope"],
    "llm/test_chunks.py::test_half_precision_and_quantization": [
        "qwen3-bfloat16",
        "gemma2-int4 with int8 activations",
        "mixtral-int8",
    ],
    "llm/test_chunks.py::test_models_with_states": ["mamba2"],
    "llm/test_decode_widths.py::test_three_answers_do_not_run_the_method_for_eight": [],
    "llm/test_export.py::test_an_export_leaves_no_program_in_memory": [],
    "llm/test_export.py::test_half_precision_draws_a_most_likely_token": ["dtype1"],
    "llm/test_kv_bits.py::test_16_bits_are_half_precision": [],
    "llm/test_kv_bits.py::test_16_bits_do_not_change_a_model_in_half_precision": [],
    "llm/test_kv_bits.py::test_a_portable_program_gives_the_tokens_of_one_with_extensions": [],
    "llm/test_memory_limit.py::test_memory_limit_option_takes_a_size": ["512MiB", "1.5 gb"],
    "llm/test_memory_limit.py::test_packed_weights_take_the_place_of_those_in_the_file": ["True"],
    "llm/test_methods.py": ["*qwen3*"],
    "llm/test_mlx_folder.py::test_greedy_equals_mlx_lm": ["qwen3"],
    "llm/test_mlx_folder.py::test_logits_equal_mlx_lm": [],
    "llm/test_more_families.py::test_greedy_of_an_exported_model_equals_transformers": ["sinks"],
    "llm/test_mtp.py::test_right_guesses_are_accepted": [],
    "llm/test_refused_models.py::test_a_broken_checkpoint_is_refused": [
        "change_a_shape",
        "set_an_unknown_quantization",
        "truncate",
    ],
    "llm/test_repeated_layers.py::test_repeated_layers_have_the_graph_of_a_plain_trace": ["chunk-qwen3"],
    "llm/test_same_bytes.py::test_the_hash_seed_changes_no_byte": [],
    "llm/test_sampling_schema.py::test_the_example_prints_json": [],
    "llm/test_state_families.py::test_a_quantized_model_answers_like_one_with_the_dequantized_weights": ["mamba2-*"],
    "llm/test_state_families.py::test_an_exported_model": [],
    "llm/test_state_mtp.py::test_answers_that_end_inside_a_draft": [],
    "llm/test_state_mtp.py::test_draft_model_with_states_goes_back_behind_wrong_guesses": [],
    "llm/test_state_mtp.py::test_log_probabilities_and_scores": [],
    "llm/test_state_mtp.py::test_rewind_beyond_the_memory_limit_ends_no_answer": [],
    "llm/test_state_mtp.py::test_rewind_in_the_program": [],
    "llm/test_state_mtp.py::test_right_guesses_are_accepted": [],
    "llm/test_state_mtp.py::test_scores_beyond_the_memory_limit_take_fewer_tokens_in_a_call": [],
    "llm/test_state_mtp.py::test_wrong_guesses_are_rejected": [],
    "models/test_models.py::test_model": ["llama", "clip", "resnet", "gru"],
    "ops/test_decomposed.py::test_op_row": [
        "not cummin",
        "not erfc",
        "not bitwise_right_shift.Tensor_Scalar",
        "not __lshift__.Scalar",
        "not bitwise_left_shift.Tensor_Scalar",
        "not logcumsumexp",
        "not __rshift__.Scalar",
        "not special_erfc",
    ],
    "ops/test_quant.py::test_linear": ["*-32-*float32", "*-row-*float32", "*-64-*bfloat16"],
    "ops/test_quantized_cache.py::test_portable_program": [
        "mlx::quantized_attention",
        "mlx::quantized_attention/ring, rows",
        "mlx::quantized_attention/rotated, dynamic",
    ],
    "ops/test_special.py::test_op_row": [
        "not digamma",
        "not i0",
        "not lgamma",
        "not special_erfcx",
        "not special_i0e",
        "not special_i1*",
    ],
    "packaging/test_import_effects.py::test_import_changes_no_global_state": [],
    "packaging/test_import_effects.py::test_import_prints_nothing": [],
    "partitioner/test_partitioner.py::test_cumulative_operator_over_a_dynamic_dimension": ["cumprod"],
    "random/test_seeding.py::test_the_program_draws_what_eager_torch_draws": [],
    "runtime/test_import_order.py::test_commands_say_why_they_fail": [],
    "runtime/test_import_order.py::test_doctor_says_which_delegate_answers": [],
    "runtime/test_import_order.py::test_ours_first_runs_programs": [],
    "runtime/test_memory_state.py::test_kernel_that_runs_out_of_memory_fails_only_its_call": [],
    "runtime/test_output_copies.py::test_copies_start_no_threads_unless_outputs_are_large": [],
    "runtime/test_output_copies.py::test_number_of_torch_threads_stays": [],
    "runtime/test_recurrent_loops.py::test_layers": ["*-50-9", "*-200-1"],
    "runtime/test_recurrent_loops.py::test_number_of_threads_does_not_matter": [],
    "runtime/test_robust.py::test_damaging_instructions_are_errors": ["not empty_scan*"],
    "runtime/test_robust.py::test_programs_that_ran_and_were_unloaded_leave_no_threads_or_memory": [],
    "runtime/test_token_recurrences.py::test_the_number_of_threads_does_not_matter": [],
    "serve/test_serve_command.py::test_draft_model_changes_no_answer": [],
    "speech/test_real_whisper.py::test_a_prompt_spells_names": [],
    "speech/test_real_whisper.py::test_a_sound_without_speech_has_no_text": ["silence-*"],
    "speech/test_real_whisper.py::test_voice_activity_leaves_out_what_is_quiet": [],
    "test_patterns.py::test_rope_along_axis_1": ["*-torch.float32"],
    "test_patterns.py::test_rope_at_any_positions": ["torch.float32-*"],
    "vision/test_videos.py::test_tokens_are_those_of_transformers": ["internvl", "qwen2_5_vl"],
    "vision/test_vlm_families.py::test_pictures_are_those_of_the_processor": [
        "idefics3",
        "llama4",
        "llava_next",
        "phi4*",
        "qwen2_5_vl",
    ],
    "vision/test_vlm_families.py::test_tokens_are_those_of_transformers": ["gemma4", "qwen2_5_vl", "qwen3_5"],
}


def _parts(name: str) -> tuple[str, str, str]:
    """The file, the function with its file, and the parameters of a test."""
    function, _, parameters = name.removesuffix("]").partition("[")
    return function.partition("::")[0], function, parameters


def _operator(row: str) -> str:
    """The operator of an op row, without its overload: squeeze of "squeeze_copy.dims/two"."""
    return re.match(r"[^./]*", row)[0].removesuffix("_copy")


def _is_kept(parameters: str, patterns: list[str]) -> bool:
    left_out = [p.removeprefix("not ") for p in patterns if p.startswith("not ")]
    if left_out:
        return not any(fnmatchcase(parameters, pattern) for pattern in left_out)
    return any(fnmatchcase(parameters, pattern) for pattern in patterns)


def short_form(names: Iterable[str]) -> set[str]:
    """Return the names of the tests that `make test` runs.

    `names` has pytest's names of all tests in their order, without the folder `test/`.
    """
    kept, operators = set(), set()
    for name in names:
        file, function, parameters = _parts(name)
        if function.startswith("ops/") and function.endswith("::test_op_row"):
            operator = parameters if parameters.startswith("program/") else _operator(parameters)
            if file not in ALL_OP_ROWS and (file, operator) in operators:
                continue
            operators.add((file, operator))
        patterns = SHORT_FORM.get(function, SHORT_FORM.get(file) if parameters else None)
        if patterns is None or _is_kept(parameters, patterns):
            kept.add(name)
    return kept


def without_test(names: Iterable[str]) -> list[str]:
    """Return the keys and patterns of SHORT_FORM that fit no test. `names` has the names of all tests."""
    parameters_of = defaultdict(set)
    for name in names:
        file, function, parameters = _parts(name)
        parameters_of[function].add(parameters)
        parameters_of[file].add(parameters)
    unknown = [key for key in SHORT_FORM if key not in parameters_of]
    for key, patterns in SHORT_FORM.items():
        for pattern in patterns:
            if not any(fnmatchcase(parameters, pattern.removeprefix("not ")) for parameters in parameters_of[key]):
                unknown.append(f"{key}[{pattern}]")
    return unknown
