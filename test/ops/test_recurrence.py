"""Compares the recurrences over tokens, in eager torch and lowered, with loops written from their formulas."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod
from oprows import Dyn, f32, floats, indices, ints, pytest_function, row
from oprows.portable import without_replacements

BATCH, HEADS, KEY_HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 2, 8, 6
EXAMPLE_LENGTH = 16
LENGTHS = (1, 7, 8, 64, 65, 150)


def linear_inputs(length):
    g = torch.Generator().manual_seed(length)
    query, key = torch.randn(2, BATCH, KEY_HEADS, length, KEY_SIZE, generator=g)
    value = torch.randn(BATCH, HEADS, length, VALUE_SIZE, generator=g)
    decay = -torch.rand(BATCH, HEADS, length, generator=g)
    return [query, key, value, decay, torch.randn(BATCH, HEADS, KEY_SIZE, VALUE_SIZE, generator=g)]


def delta_inputs(length, channels=()):
    query, key, value, _, state = linear_inputs(length)
    g = torch.Generator().manual_seed(length + 1)
    decay = -torch.rand(BATCH, HEADS, length, *channels, generator=g)
    key = torch.nn.functional.normalize(key, dim=-1)
    return [query, key, value, decay, torch.rand(BATCH, HEADS, length, generator=g), state]


def delta_by_channel_inputs(length):
    return delta_inputs(length, (KEY_SIZE,))


def selective_inputs(length):
    g = torch.Generator().manual_seed(length)
    x, step = torch.randn(2, BATCH, length, 10, generator=g)
    key, query = torch.randn(2, BATCH, length, 5, generator=g)
    return [x, step.abs(), key, query, -torch.rand(10, 5, generator=g), torch.randn(BATCH, 10, 5, generator=g)]


def diagonal_inputs(length):
    g = torch.Generator().manual_seed(length)
    x, decay = torch.rand(2, BATCH, length, 10, generator=g)
    return [x - 0.5, decay, torch.randn(BATCH, 10, generator=g)]


def expected_linear(query, key, value, decay, state):
    query, key = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (query, key))
    out = []
    for t in range(value.shape[2]):
        state = decay[:, :, t, None, None].exp() * state + torch.einsum("bhk,bhv->bhkv", key[:, :, t], value[:, :, t])
        out.append(torch.einsum("bhk,bhkv->bhv", query[:, :, t], state))
    return torch.stack(out, 2), state


def expected_delta(query, key, value, decay, beta, state):
    query, key = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (query, key))
    decay = decay if decay.dim() == 4 else decay[..., None]
    out = []
    for t in range(value.shape[2]):
        state = decay[:, :, t, :, None].exp() * state
        error = value[:, :, t] - torch.einsum("bhk,bhkv->bhv", key[:, :, t], state)
        state = state + torch.einsum("bhk,bhv,bh->bhkv", key[:, :, t], error, beta[:, :, t])
        out.append(torch.einsum("bhk,bhkv->bhv", query[:, :, t], state))
    return torch.stack(out, 2), state


def expected_selective(x, step, key, query, rates, state):
    out = []
    for t in range(x.shape[1]):
        state = torch.exp(step[:, t, :, None] * rates) * state
        state = state + torch.einsum("bd,bn->bdn", step[:, t] * x[:, t], key[:, t])
        out.append(torch.einsum("bdn,bn->bd", state, query[:, t]))
    return torch.stack(out, 1), state


def expected_diagonal(x, decay, state):
    out = []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        out.append(state)
    return torch.stack(out, 1), state


# Name → operator, function that makes its inputs, formula, axis of the tokens.
CASES = {
    "linear": ("gated_linear_attention", linear_inputs, expected_linear, 2),
    "delta": ("gated_delta_rule", delta_inputs, expected_delta, 2),
    "delta by channel": ("gated_delta_rule", delta_by_channel_inputs, expected_delta, 2),
    "selective": ("selective_scan", selective_inputs, expected_selective, 1),
    "diagonal": ("diagonal_recurrence", diagonal_inputs, expected_diagonal, 1),
}


def assert_close(results, expected):
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=2e-5, atol=2e-5 * float(value.abs().max()))


def has_token_axis(x, axis):
    """Whether an input for `EXAMPLE_LENGTH` tokens has one element per token along `axis`.

    The state and the rates have no axis of tokens.
    """
    return x.dim() > 2 and x.shape[axis] == EXAMPLE_LENGTH


def program_of(name):
    """Return the manager of a program that runs a recurrence for any number of tokens."""
    op, inputs, _, axis = CASES[name]
    operator = getattr(torch.ops.mlx, op)
    example = inputs(EXAMPLE_LENGTH)
    length = torch.export.Dim("length", min=1, max=200)
    shapes = [{axis: length} if has_token_axis(x, axis) else None for x in example]

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return operator(*tensors)

    exported = torch.export.export(Model(), tuple(example), dynamic_shapes=(tuple(shapes),))
    partitioner = MLXPartitioner()
    config = EdgeCompileConfig(_check_ir_validity=False)
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    assert partitioner.explain().refused == ()
    return manager.to_executorch()


def replacements_of(program):
    """Return the names of the nodes that replace instructions of the only delegate of a program."""
    (delegate,) = program.executorch_program.backend_delegate_data
    return [r.instruction.op.NAME for r in read_payload(bytes(delegate.data)).replacements or ()]


NODES = {
    "linear": ["GatedRecurrenceNode"],
    "delta": ["GatedRecurrenceNode"],
    "delta by channel": ["GatedRecurrenceNode"],
    "selective": ["SelectiveScanNode"],
    "diagonal": [],
}


@pytest.mark.parametrize("portable", [False, True], ids=["nodes", "loops"])
@pytest.mark.parametrize("name", CASES)
def test_a_recurrence(name, portable):
    """Run the nodes that replace the loops, and the loops."""
    op, inputs, formula, _ = CASES[name]
    with without_replacements() if portable else nullcontext():
        lowered = program_of(name)
    assert replacements_of(lowered) == ([] if portable else NODES[name])
    method = LoadedMethod(lowered.buffer)
    for count in LENGTHS:
        tensors = inputs(count)
        expected = formula(*tensors)
        assert_close(getattr(torch.ops.mlx, op)(*tensors), expected)
        assert_close([x.clone() for x in method.execute([x.contiguous() for x in tensors])], expected)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems run the loops")
@pytest.mark.parametrize("name", CASES)
def test_calls_of_any_length_give_the_same_bits(name):
    _, inputs, _, axis = CASES[name]
    method = LoadedMethod(program_of(name).buffer)
    length = 150
    *tensors, initial = inputs(length)
    has_tokens = [x.dim() > 2 and x.shape[axis] == length for x in tensors]
    results = []
    for lengths in ([1], [3, 64, 20], [150]):
        outputs, state, at, i = [], initial, 0, 0
        while at < length:
            count = min(lengths[i % len(lengths)], length - at)
            part = [x.narrow(axis, at, count) if tokens else x for x, tokens in zip(tensors, has_tokens)]
            out, state = (x.clone() for x in method.execute([x.contiguous() for x in (*part, state)]))
            outputs.append(out)
            at, i = at + count, i + 1
        results.append((torch.cat(outputs, axis), state))
    for out, state in results[1:]:
        assert out.equal(results[0][0]) and state.equal(results[0][1])


RUN_SAVED = """
import sys
from pathlib import Path
import torch
from loaded_method import LoadedMethod
folder = Path(sys.argv[1])
method = LoadedMethod(folder / "model.pte")
torch.save([x.clone() for x in method.execute(torch.load(folder / "inputs"))], folder / "outputs")
"""


def test_a_device_without_kernels_runs_the_loops(tmp_path):
    _, inputs, formula, _ = CASES["delta"]
    (tmp_path / "model.pte").write_bytes(program_of("delta").buffer)
    tensors = inputs(7)
    torch.save([x.contiguous() for x in tensors], tmp_path / "inputs")
    path = str(Path(__file__).parents[1])
    environment = os.environ | {"EXECUTORCH_MLX_INTERNALS": "0", "PYTHONPATH": path}  # MLX's public operations only
    subprocess.run([sys.executable, "-c", RUN_SAVED, tmp_path], env=environment, check=True, timeout=300)
    assert_close(torch.load(tmp_path / "outputs"), formula(*tensors))


@pytest.mark.parametrize("name", CASES)
def test_a_recurrence_continues_from_its_state(name):
    op, inputs, _, axis = CASES[name]
    operator = getattr(torch.ops.mlx, op)
    *tensors, state = inputs(EXAMPLE_LENGTH)
    expected = operator(*tensors, state)
    parts = []
    for begin, end in ((0, 1), (1, 3), (3, 14), (14, EXAMPLE_LENGTH)):
        part = [x.narrow(axis, begin, end - begin) if has_token_axis(x, axis) else x for x in tensors]
        out, state = operator(*part, state)
        parts.append(out)
    assert_close([torch.cat(parts, axis), state], expected)


def test_wrong_shapes():
    *tensors, state = linear_inputs(4)
    message = r"gated_linear_attention: state: got shape \[2, 4, 6, 8\], expected \[2, 4, 8, 6\]"
    with pytest.raises(ValueError, match=message):
        torch.ops.mlx.gated_linear_attention(*tensors, state.mT)
    with pytest.raises(ValueError, match="value: got 3 heads, expected a multiple of the 2 of the query"):
        torch.ops.mlx.gated_linear_attention(*tensors[:2], tensors[2][:, :3], tensors[3][:, :3], state[:, :3])


N = Dyn("n", 5)
ROWS = [
    row(
        "mlx::read_layer_state",
        lambda x, start: torch.ops.mlx.read_layer_state(x, start),
        floats(1, 1, 1, 6),
        ints(1, low=0, high=2),
        calls=3,
        dtypes=(f32,),
        nodes=("ReadLayerStateNode",),
    ),
    row(
        "mlx::read_layer_state/rows",
        lambda x, start, rows: torch.ops.mlx.read_layer_state(x, start, rows, 3),
        floats(1, 1, 3, 6),
        ints(4, low=0, high=2),
        indices(4, below=3),
        calls=3,
        dtypes=(f32,),
        nodes=("ReadLayerStateNode",),
    ),
    row(
        "mlx::causal_conv1d",
        lambda x, w, bias: torch.ops.mlx.causal_conv1d(x, w, bias),
        floats(2, 3, N),
        floats(3, 4),
        floats(3),
        dtypes=(f32,),
    ),
    row("mlx::causal_conv1d/no bias", lambda x, w: torch.ops.mlx.causal_conv1d(x, w), floats(2, 3, 5), floats(3, 2)),
]

test_op_row = pytest_function(ROWS)
