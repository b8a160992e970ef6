"""The table of export options agrees with the docs and with what the export can do."""

import re
from pathlib import Path

import pytest
from executorch_mlx.custom_ops.packing import FLOAT_MODES
from executorch_mlx.llm.export import DTYPES, ExportOptions, HeadConfig, export_llm
from executorch_mlx.llm.export.quantize import GROUP_SIZES
from executorch_mlx.llm.export_options import HEAD_OPTIONS, OPTIONS, QUANTIZED, TEXT, OptionError

PAGE = Path(__file__).parents[2] / "docs" / "language-models.md"


def documented() -> tuple[set[str], set[str]]:
    """Return the flags and the arguments of the table in the docs."""
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    flags = {flag for first, _ in rows for flag in re.findall(r"--[a-z-]+", first)}
    return flags, {name for _, second in rows for name in re.findall(r"`(\w+)", second)}


def test_the_docs_have_each_option_of_a_language_model():
    flags, names = documented()
    for name, spec in OPTIONS.items():
        if TEXT not in spec.models:
            continue
        own = {flag for flag, value in spec.flags.items() if value != spec.default} or {f"--{name.replace('_', '-')}"}
        assert own <= flags, name
        assert name in names or name in HEAD_OPTIONS and "head" in names, name


def test_the_choices_are_those_of_the_export():
    assert OPTIONS["dtype"].choices == tuple(DTYPES)
    assert OPTIONS["group_size"].choices == GROUP_SIZES
    assert QUANTIZED == ("int4", "int8", "mixed", "nvfp4", "mxfp4", "mxfp8") and set(FLOAT_MODES) < set(QUANTIZED)


@pytest.mark.parametrize(
    "options, name",
    [
        ({"dtype": "float64"}, "dtype"),
        ({"quantize": "int3"}, "quantize"),
        ({"group_size": 32}, "group_size"),
        ({"calibrate": "text.txt"}, "calibrate"),
        ({"activations": "int4"}, "activations"),
        ({"chunk": 1}, "chunk"),
        ({"batch": 0}, "batch"),
        ({"kv_bits": 5}, "kv_bits"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"sliding_window": "all"}, "sliding_window"),
        ({"outputs": "logits", "head": HeadConfig(logprobs=2)}, "head.logprobs"),
    ],
)
def test_an_invalid_option_is_named(options, name):
    with pytest.raises(OptionError, match=f"^{name}: got") as caught:
        ExportOptions(**options)
    assert caught.value.name == name


def test_an_option_of_another_kind_of_model_is_refused():
    with pytest.raises(ValueError, match="^export_llm: max_seconds: got 3.0, expected 30.0 for a language model"):
        export_llm("model", max_seconds=3.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        export_llm("model", rows=3)


def test_a_dtype_has_a_name():
    for name, dtype in DTYPES.items():
        assert ExportOptions(dtype=name).torch_dtype is dtype is ExportOptions(dtype=dtype).torch_dtype
    assert ExportOptions().torch_dtype is None
