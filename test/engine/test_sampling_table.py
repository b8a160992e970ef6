"""The engine agrees with the Python table of sampling parameters: options, inputs, metadata and off values."""

import re
from dataclasses import replace

import pytest
import torch
from executorch.exir import to_edge
from executorch_mlx.llm.export_options import HeadConfig
from executorch_mlx.llm.sampling_parameters import PARAMETERS, SCALARS

VOCABULARY = 1 << len(PARAMETERS)  # a token for each set of parameters, see `Probe`
FULL = HeadConfig(penalties=4, logit_bias=2, allowed_tokens=True)
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in PARAMETERS} | {"allowed_tokens": "--allow-ids"}
OTHER_OPTIONS = {
    "--prompt-ids",
    "--max-new-tokens",
    "--min-new-tokens",
    "--stop",
    "--stop-ids",
    "--ignore-eos",
    "--ids",
    "--json",
    "--device",
    "--memory-limit",
    "--repeat",
    "--profile",
    "--draft-model",
    "--help",
}


class Probe(torch.nn.Module):
    """Returns a token whose bit i is set if parameter i of the table does not have its off value."""

    def __init__(self, head: HeadConfig):
        super().__init__()
        self.off = head.inputs(1, VOCABULARY)

    def forward(self, tokens, input_pos, *inputs):
        token = torch.zeros(1, dtype=torch.int64)
        values = dict(zip(self.off, inputs, strict=True))
        for bit, spec in enumerate(PARAMETERS.values()):
            name = spec.inputs[-1]
            if name in values:
                token = token + (values[name] != self.off[name]).any().to(torch.int64) * (1 << bit)
        return token


def export(path, head):
    inputs = head.inputs(1, VOCABULARY)
    args = (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), *inputs.values())
    shapes = ({1: torch.export.Dim("sequence", min=1, max=8)}, None, (None,) * len(inputs))
    metadata = {"get_max_seq_len": 8, "get_vocab_size": VOCABULARY, "sampling_head": True} | head.metadata()
    program = to_edge(torch.export.export(Probe(head), args, dynamic_shapes=shapes), constant_methods=metadata)
    path.write_bytes(program.to_executorch().buffer)
    return path


@pytest.fixture(scope="module")
def draw(run, tmp_path_factory):
    """`draw(head, *options)`: the runner draws one token from a `Probe` with the inputs of `head`."""
    folder, paths = tmp_path_factory.mktemp("probes"), {}

    def draw(head, *options):
        if head not in paths:
            paths[head] = export(folder / f"{len(paths)}.pte", head)
        return run(paths[head], "--prompt-ids=1", "--ids", "--max-new-tokens=1", *options)

    return draw


def value_of(name):
    """Return a value other than the off value, as an argument of the runner."""
    if name in SCALARS:
        return "5" if SCALARS[name].type is int else "0.5"
    return {"logit_bias": "3:0.5", "allowed_tokens": "3"}[name]


def test_help_lists_the_parameters_of_the_table(run):
    listed = set(re.findall(r"^  (--[a-z-]+)", run("--help").stdout, re.MULTILINE))
    assert listed - OTHER_OPTIONS == set(OPTIONS.values())


def test_defaults_are_off(draw):
    assert draw(FULL, "--seed=0").ids == [0]


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_option_sets_its_input_and_no_other(draw, name):
    options = {"--seed": "0", OPTIONS[name]: value_of(name)}
    expected = 1 << list(PARAMETERS).index(name)
    assert draw(FULL, *(f"{option}={value}" for option, value in options.items())).ids == [expected]


@pytest.mark.parametrize("name", [name for name, spec in PARAMETERS.items() if spec.metadata])
def test_metadata_tells_whether_the_program_takes_a_parameter(draw, name):
    option, spec = f"{OPTIONS[name]}={value_of(name)}", PARAMETERS[name]
    refused = draw(HeadConfig.minimal(), option)
    assert refused.code == 2 and f"mlx_llm_runner: {name}" in refused.stderr
    if name in SCALARS and spec.off is not None:
        assert draw(HeadConfig.minimal(), f"{OPTIONS[name]}={spec.off}").ids == [0]
    field = spec.metadata.removeprefix("sampling_")
    head = replace(HeadConfig.minimal(), **{field: getattr(FULL, field)})
    assert draw(head, option).ids == [1 << list(PARAMETERS).index(name)]
