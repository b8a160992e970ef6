"""SamplingHead, and mlx::sample in exported and lowered programs."""

import copy
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from executorch_mlx import SamplingHead
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod
from sampling_programs import Sample, lower


def scalar(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


class Decoder(torch.nn.Module):
    """A model that wraps its logits as `output_kind` says. `SamplingHead` refuses the kinds "text" and "flat"."""

    def __init__(self, output_kind="tensor", vocabulary=300):
        super().__init__()
        torch.manual_seed(0)
        self.output_kind = output_kind
        self.embedding = torch.nn.Embedding(vocabulary, 16)

    def forward(self, tokens, scale=1.0):
        logits = scale * self.embedding(tokens) @ self.embedding.weight.T
        return {
            "tensor": lambda: logits,
            "last": lambda: logits[:, -1],
            "tuple": lambda: (logits, None),
            "dict": lambda: {"logits": logits},
            "output": lambda: SimpleNamespace(logits=logits),
            "text": lambda: "logits",
            "flat": lambda: logits[0, 0],
        }[self.output_kind]()


TOKENS = torch.tensor([[3, 1, 4], [1, 5, 9]])


@pytest.mark.parametrize("output_kind", ["tensor", "last", "tuple", "dict", "output"])
def test_uses_the_last_position(output_kind):
    expected = Decoder()(TOKENS)[:, -1]
    head = SamplingHead(Decoder(output_kind))
    assert head(TOKENS, temperature=0.0).equal(expected.argmax(-1))
    drawn = head(TOKENS, temperature=1.0, seed=3, top_k=9, top_p=0.9, min_p=0.01)
    given = [scalar(1.0), scalar(0.9), scalar(3, torch.int64), scalar(9, torch.int64), scalar(0.01)]
    assert drawn.equal(torch.ops.mlx.sample(expected, *given))


def test_passes_arguments_to_the_model():
    head = SamplingHead(Decoder())
    assert head(TOKENS, scale=-1.0, temperature=0).equal((-Decoder()(TOKENS)[:, -1]).argmax(-1))


def test_numbers_and_tensors_are_equivalent():
    head = SamplingHead(Decoder())
    numbers = {"temperature": 2, "top_k": 40, "top_p": 1, "seed": 2**64 - 5, "min_p": 0.01}
    tensors = {
        "temperature": torch.tensor([2]),
        "top_k": torch.tensor(40, dtype=torch.int32),
        "top_p": torch.tensor(1.0, dtype=torch.float64),
        "seed": torch.tensor([-5]),
        "min_p": torch.tensor([[0.01]]),
    }
    assert head(TOKENS, **numbers).equal(head(TOKENS, **tensors))


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"temperature": None}, TypeError, "temperature: got NoneType, expected a number"),
        ({"temperature": "1"}, TypeError, "temperature: got str"),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature: got shape \[3\], expected one"),
        ({"temperature": True}, TypeError, "temperature: got bool"),
        ({"top_k": 4.0}, TypeError, "top_k: got float, expected an integer"),
        ({"top_k": torch.tensor(4.0)}, TypeError, "top_k: got torch.float32, expected an integer"),
        ({"top_k": 2**63}, ValueError, "top_k: got 9223372036854775808, expected 64 bits"),
        ({"seed": 2**64}, ValueError, "seed: got 18446744073709551616"),
        ({"temperature": 1e39}, ValueError, r"temperature: got 1e\+39, expected a number of float32"),
        ({"min_p": 10**400}, ValueError, "min_p: got an integer of 1329 bits, expected a number of float32"),
        ({"top_p": None}, TypeError, "top_p: got NoneType"),
    ],
    ids=str,
)
def test_invalid_parameters_raise(given, error, message):
    with pytest.raises(error, match=message):
        SamplingHead(Decoder())(TOKENS, **{"temperature": 1.0} | given)


def test_numbers_of_numpy_are_numbers():
    head, numbers = SamplingHead(Decoder()), {"temperature": 0.5, "top_p": 0.75, "seed": 7, "top_k": 40}
    types = {"temperature": np.float32, "top_p": np.float16, "seed": np.int64, "top_k": np.uint8}
    given = {name: types[name](value) for name, value in numbers.items()}
    assert head(TOKENS, **given).equal(head(TOKENS, **numbers))


def test_invalid_model_outputs_raise():
    with pytest.raises(TypeError, match="model output: got str, expected a tensor of logits"):
        SamplingHead(Decoder("text"))(TOKENS, temperature=1.0)
    with pytest.raises(ValueError, match=r"logits: got shape \[300\], expected \[B, S, V\]"):
        SamplingHead(Decoder("flat"))(TOKENS, temperature=1.0)


class Step(torch.nn.Module):
    def __init__(self, output_kind="tensor", **fixed):
        super().__init__()
        self.head, self.fixed = SamplingHead(Decoder(output_kind)), fixed

    def forward(self, tokens, temperature, top_p, seed):
        return self.head(tokens, temperature=temperature, top_p=top_p, seed=seed, **self.fixed)


ARGUMENTS = (TOKENS, scalar(1.0), scalar(0.9), scalar(5, torch.int64))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("fixed", [{}, {"top_k": 40, "min_p": 0.1}], ids=str)
def test_export_preserves_the_operator(strict, fixed):
    program = torch.export.export(Step(**fixed), ARGUMENTS, strict=strict)
    targets = [n.target for n in program.graph.nodes]
    assert targets.count(torch.ops.mlx.sample.default) == 1
    assert torch.ops.mlx.random_bits.default not in targets
    program = program.run_decompositions()
    assert torch.ops.mlx.sample.default in [n.target for n in program.graph.nodes]
    assert program.module()(*ARGUMENTS).equal(Step(**fixed)(*ARGUMENTS))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("output_kind", ["tensor", "last"])
def test_one_delegate_call_draws_the_token(strict, output_kind):
    program = lower(Step(output_kind, top_k=40), ARGUMENTS, strict=strict)
    calls = [n for n in program.exported_program().graph.nodes if n.op == "call_function"]
    names = [str(n.target) for n in calls]
    assert names[0] == "executorch_call_delegate" and len(names) == 2, names


def test_one_program_for_all_parameters():
    step = Step(top_k=40)
    method = LoadedMethod(lower(step, ARGUMENTS).buffer)
    seen = set()
    for temperature in (0.0, 0.5, 1.0, 3.0):
        for top_p in (0.2, 0.9, 1.0):
            for seed in range(6):
                given = [TOKENS, scalar(temperature), scalar(top_p), scalar(seed, torch.int64)]
                token = method.execute(given)[0].clone()
                assert token.equal(step(*given)), (temperature, top_p, seed)
                seen.add(tuple(token.tolist()))
    assert len(seen) > 5


S = torch.export.Dim("sequence", min=1, max=32)
# The axis of the tokens whose size is dynamic → `dynamic_shapes` in one form of torch.export.
FORMS = {
    "position": lambda size: ({1: size}, None, None),
    "list": lambda size: [{1: size}, None, None],
    "name": lambda size: {"tokens": {1: size}, "temperature": None, "seed": None},
    "collection": lambda size: collection({1: size}),
}


def collection(dimensions):
    shapes = torch.export.ShapesCollection()
    shapes[TOKENS] = dimensions
    return shapes


@pytest.mark.parametrize("strict, by_keyword", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("size", [S, torch.export.Dim.AUTO], ids=["Dim", "AUTO"])
@pytest.mark.parametrize("form", FORMS)
def test_exports_with_a_dynamic_dimension(form, size, by_keyword, strict):
    head, parameters = SamplingHead(Decoder()), {"temperature": scalar(1.0), "seed": torch.tensor(5)}
    args, kwargs = ((), {"tokens": TOKENS} | parameters) if by_keyword else ((TOKENS,), parameters)
    exported = torch.export.export(head, args, kwargs, dynamic_shapes=FORMS[form](size), strict=strict)
    longer = TOKENS.repeat(1, 5)
    given = ((), {"tokens": longer} | parameters) if by_keyword else ((longer,), parameters)
    assert exported.module()(*given[0], **given[1]).equal(head(longer, **parameters))


def test_a_dynamic_dimension_is_one_in_the_program():
    head, parameters = SamplingHead(Decoder()).eval(), {"seed": torch.tensor(5), "temperature": scalar(1.0)}
    shapes = {"tokens": {0: torch.export.Dim("rows", min=1, max=8), 1: S}, "temperature": None, "seed": None}
    method = LoadedMethod(lower(head, (TOKENS,), kwargs=parameters, dynamic_shapes=shapes).buffer)
    for tokens in (TOKENS, TOKENS[:1, :1], TOKENS.repeat(4, 9)):
        assert method.execute([tokens, *parameters.values()])[0].equal(head(tokens, **parameters))


def test_signature_has_the_names_of_model_and_head():
    class Clash(torch.nn.Module):
        def forward(self, tokens, /, seed, *more, mask=None, **others):
            return Decoder()(tokens) + seed

    head = SamplingHead(Clash())
    names = list(inspect.signature(head.forward).parameters)
    assert names[:4] == ["tokens", "model_seed", "more", "mask"] and names[-1] == "others"
    assert {"temperature", "seed", "history"} <= set(names)
    assert head(TOKENS, 1, temperature=0.0, seed=3).equal(SamplingHead(Decoder())(TOKENS, temperature=0.0))
    copied = copy.deepcopy(head)
    assert copied.forward.__self__ is copied
    with pytest.raises(TypeError, match="temperature"):
        head(TOKENS, 1)


def test_filter_that_is_none_emits_no_instructions():
    def instructions(names, values):
        lowered = lower(Sample(names), (torch.zeros(1, 32000), *values))
        (delegate,) = lowered.executorch_program.backend_delegate_data
        return sum(len(chain.instructions) for chain in read_payload(bytes(delegate.data)).instruction_chains)

    names = ("temperature", "top_p", "seed")
    without = instructions(names, ARGUMENTS[1:])
    with_min_p = instructions((*names, "min_p"), (*ARGUMENTS[1:], scalar(0.1)))
    assert 0 < without < with_min_p


def test_portable_program_has_the_node_as_replacement_only():
    names = ("temperature", "top_p", "seed")
    (delegate,) = lower(Sample(names), (torch.zeros(1, 32000), *ARGUMENTS[1:])).executorch_program.backend_delegate_data
    graph = read_payload(bytes(delegate.data))
    (replacement,) = (r for r in graph.replacements if type(r.instruction.op) is ir.SampleNode)
    assert replacement.chain == graph.main_chain_idx and replacement.count > 1
    ops = [instruction.op for chain in graph.instruction_chains for instruction in chain.instructions]
    assert all(op.OP_TYPE < ir.FIRST_EXTENSION for op in ops)
