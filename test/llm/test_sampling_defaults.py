"""The sampling parameters that a generation config recommends."""

import json
from types import SimpleNamespace

import pytest
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export.metadata import sampling_defaults
from transformers import GenerationConfig


@pytest.mark.parametrize(
    "config, expected",
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0}, {}),
        ({"do_sample": True, "temperature": 0.5, "top_p": 7.0}, {"temperature": 0.5}),
    ],
)
def test_defaults_of_a_generation_config(config, expected):
    model = SimpleNamespace(generation_config=GenerationConfig(**config))
    assert sampling_defaults(model) == expected


def test_no_generation_config():
    assert sampling_defaults(SimpleNamespace()) == {}


def test_defaults_that_the_program_does_not_take_are_left_out():
    class Program:
        def data(self, name):
            return json.dumps({"temperature": 0.6, "repetition_penalty": 1.1, "of a later version": 1}).encode()

        def takes(self, name):
            return name != "repetition_penalty"

    llm = LLM.__new__(LLM)
    llm.program = Program()
    assert llm.defaults == {"temperature": 0.6}
