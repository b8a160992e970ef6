"""Compares the table of sampling parameters with the signatures and the documentation that repeat its contents."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from executorch_mlx.llm.export import HeadConfig
from executorch_mlx.llm.sampling_head import HEAD_ARGUMENTS, adjust_logits, sample_logits
from executorch_mlx.llm.sampling_parameters import INPUTS, PARAMETERS, SCALARS, SamplingParameters

DOCS = Path(__file__).parents[2] / "docs" / "llm-program.md"
FULL = HeadConfig(penalties=4, logit_bias=2, allowed_tokens=True, logprobs=3)


def keywords(function) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters.items()
    return {name: p for name, p in found if p.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_head_takes_every_input_and_defaults_to_off():
    arguments = keywords(sample_logits) | keywords(adjust_logits)
    assert set(arguments) == set(HEAD_ARGUMENTS)
    for name, argument in arguments.items():
        if name != "temperature":
            assert argument.default in (None, SCALARS[name].off if name in SCALARS else None), name


def test_the_full_head_has_every_input_in_order():
    inputs = FULL.inputs(batch=3, vocab_size=70)
    assert tuple(inputs) == (*INPUTS, "logprobs")
    for name, spec in SCALARS.items():
        assert inputs[name].shape == () and inputs[name].dtype == getattr(torch, spec.dtype)
        assert inputs[name] == (0 if spec.off is None else spec.off)
    assert inputs["bias_tokens"].shape == inputs["bias_values"].shape == (2,)
    assert inputs["allowed_tokens"].shape == (3, 3) and inputs["allowed_tokens"].eq(-1).all()
    assert tuple(HeadConfig.minimal().inputs(1, 70)) == ("temperature", "top_p")
    rows = FULL.inputs(batch=3, vocab_size=70, per_row=True)
    assert tuple(rows) == tuple(inputs)
    for name, value in rows.items():
        expected = inputs[name] if name == "allowed_tokens" else inputs[name].expand(3, *inputs[name].shape)
        assert value.equal(expected) and value.is_contiguous(), name


def test_head_metadata_covers_the_table():
    named = {spec.metadata for spec in PARAMETERS.values()} - {None}
    assert set(FULL.metadata()) == named | {"sampling_history", "sampling_logprobs"}
    assert all(FULL.metadata().values()) and not any(HeadConfig.minimal().metadata().values())


ON = {
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 0,
    "top_k": 1,
    "min_p": 0.5,
    "repetition_penalty": 0.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 1,
    "logit_bias": {0: 0.0},
    "allowed_tokens": len,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_enabled_names_the_parameters_that_are_on(name):
    assert SamplingParameters(**{name: ON[name]}).enabled() == [name]
    for off in (PARAMETERS[name].off, None):
        assert SamplingParameters(**{name: off}).enabled() == []


@pytest.mark.parametrize("name, value", [("temperature", -1), ("top_p", 1.5), ("top_k", -1), ("min_p", -0.1)])
def test_values_beyond_off_are_off(name, value):
    assert SamplingParameters(**{name: value}).enabled() == []


def test_the_documented_inputs_are_those_of_the_table():
    documented = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            for name, dtype in zip(re.findall(r"`([a-z_]+)`", cells[0]), cells[2].split(", ")):
                documented[name] = (dtype, *cells[3:])
    assert tuple(documented) == (*INPUTS, "logprobs", "adjusts")
    for parameter, spec in PARAMETERS.items():
        for name in spec.inputs:
            dtype, condition, off = documented[name]
            assert dtype == (spec.dtype or dtype)
            assert condition == "always" if spec.metadata is None else f"`{spec.metadata}`" in condition
            if parameter in SCALARS and spec.off is not None:
                sign = "" if spec.off_when == "==" else f"{spec.off_when} "
                assert off.startswith(f"`{sign}{spec.off:g}`")
