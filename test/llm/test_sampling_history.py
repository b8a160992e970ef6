"""The token history of a program, the penalties that use the history, and parameters that are None.

A parameter that is None adds no operator to the program.
"""

import executorch_mlx
import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import SamplingHead
from executorch_mlx.llm.export.history import TokenHistory, last_positions
from loaded_method import LoadedMethod

CONTEXT, WINDOW = 24, 6


def lower(module, arguments, **options):
    program = torch.export.export(module.eval(), arguments, **options)
    partitioner = executorch_mlx.MLXPartitioner()
    return to_edge_transform_and_lower(program, partitioner=[partitioner])


def method_of(lowered):
    method = LoadedMethod(lowered.to_executorch().buffer)
    return lambda *inputs: [t.clone() for t in method.execute(list(inputs))]


# The window -----------------------------------------------------------------------------


def updated(history, tokens, input_pos, row=None, last=None):
    """The histories after a write, up to the position `last`: by default that of the last token of each row."""
    written = history.write(tokens, input_pos, row)
    return history.read(written, last_positions(tokens.shape[1], input_pos) if last is None else last, row)


class Window(torch.nn.Module):
    def __init__(self, rows=2, context=CONTEXT, window=WINDOW):
        super().__init__()
        self.history = TokenHistory(rows, context, window)

    def forward(self, tokens, input_pos, row=None):
        return updated(self.history, tokens, input_pos, row)


def at(position):
    return torch.tensor([position])


def tokens_of(length, first=100):
    """Different tokens [1, length]: `first`, `first + 1`, …"""
    return torch.arange(first, first + length).unsqueeze(0)


@pytest.fixture(scope="module")
def runtime_update():
    sequence = torch.export.Dim("sequence", min=1, max=CONTEXT)
    return method_of(lower(Window(), (tokens_of(2), at(0), at(0)), dynamic_shapes=({1: sequence}, None, None)))


@pytest.fixture(params=["eager", "runtime"])
def update(request, runtime_update):
    return Window() if request.param == "eager" else runtime_update


def test_the_window_holds_the_last_tokens_of_each_row(update):
    written, count = [{}, {}], 100
    # A prompt, two steps and a longer chunk. Then a rewind to position 4. Then a new sequence in chunks, which fill
    # the context.
    for position, length in [(0, 3), (3, 1), (4, 1), (5, 9), (4, 1), (5, 2), (0, 1), (1, 8), (9, 15)]:
        for row in range(2):
            tokens, count = tokens_of(length, count), count + length
            ids, valid = update(tokens, at(position), at(row))
            assert ids.shape == valid.shape == (1, WINDOW)
            written[row] |= {position + i: int(t) for i, t in enumerate(tokens[0])}
            end = position + length
            expected = [written[row][p] for p in range(max(0, end - WINDOW), end)]
            assert ids[0][valid[0]].tolist() == expected, (position, length)


def test_tokens_of_several_rows():
    history = Window(rows=3)
    for row in range(3):
        history(tokens_of(4 + row, 100 * row), at(0), at(row))
    ids, valid = history(torch.tensor([[7, 8]]), torch.tensor([6, 4]), torch.tensor([2, 0]))
    assert ids[0].tolist() == [201, 202, 203, 204, 205, 7]
    assert ids[1][valid[1]].tolist() == [0, 1, 2, 3, 8]


def test_histories_up_to_several_positions():
    history = TokenHistory(1, CONTEXT, WINDOW)
    ids, valid = updated(history, tokens_of(8), at(0), last=torch.tensor([0, 6, 7]))
    assert [i[v].tolist() for i, v in zip(ids, valid)] == [[100], [*range(101, 107)], [*range(102, 108)]]


def test_positions_beyond_the_context_are_refused(update):
    with pytest.raises((ValueError, RuntimeError)):
        update(tokens_of(3), at(CONTEXT - 2), at(0))


@pytest.mark.parametrize("window", [0, CONTEXT + 1])
def test_a_window_out_of_range_is_refused(window):
    with pytest.raises(ValueError, match=f"TokenHistory: window: got {window}, expected 1 to 24"):
        TokenHistory(1, CONTEXT, window)


def test_a_step_does_not_copy_the_history():
    context = 1 << 20
    step = method_of(lower(Window(1, context), (torch.tensor([[7]]), at(3))))
    import mlx.core as mx  # not at the top: the delegate must be loaded first

    step(torch.tensor([[7]]), at(3))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step(torch.tensor([[8]]), at(4))
    assert mx.get_peak_memory() - before < context * 8 / 2


# The head -------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Random logits that depend on the last token."""

    def __init__(self, vocabulary=16):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(vocabulary, vocabulary)

    def forward(self, tokens):
        return self.embedding(tokens)


class Step(torch.nn.Module):
    """One call as in an exported program: the history records the tokens, then the head samples with the penalties."""

    def __init__(self):
        super().__init__()
        self.head, self.history = SamplingHead(Model()), TokenHistory(1, CONTEXT, WINDOW)

    def forward(self, tokens, input_pos, temperature, seed, repetition, presence, frequency):
        ids, valid = updated(self.history, tokens, input_pos)
        return self.head(
            tokens,
            temperature=temperature,
            seed=seed,
            history=ids,
            history_valid=valid,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )


@pytest.fixture(scope="module")
def steps():
    """The step in eager torch and as an exported program. Each of the two has its own history."""
    sequence = torch.export.Dim("sequence", min=1, max=CONTEXT)
    arguments = (torch.tensor([[3, 1]]), at(0), *map(torch.tensor, (1.0, 0, 1.0, 0.0, 0.0)))
    lowered = lower(Step(), arguments, dynamic_shapes=({1: sequence}, *[None] * 6))
    calls = [n for n in lowered.exported_program().graph.nodes if n.op == "call_function"]
    assert len(calls) == 2  # the call of the delegate and a getitem
    step = Step()
    return {"eager": lambda *inputs: [step(*inputs)], "runtime": method_of(lowered)}


def answer(step, penalties, temperature=0.0, seed=0, prompt=(3, 1, 4), length=18):
    tokens, position, out = list(prompt), 0, []
    penalties = [torch.tensor(float(p)) for p in penalties]
    for i in range(length):
        inputs = torch.tensor([tokens]), at(position), torch.tensor(temperature), torch.tensor(seed + i)
        position, tokens = position + len(tokens), step(*inputs, *penalties)[0].tolist()
        out += tokens
    return out


def test_eager_and_runtime_draw_the_same_answers(steps):
    answers = set()
    for seed in range(8):
        for penalties in [(1, 0, 0), (1.5, 0, 0), (1, 2, 0), (1, 0, 2), (1.2, -1, 0.5)]:
            given = {"penalties": penalties, "temperature": seed / 4, "seed": seed}
            eager, runtime = (answer(steps[how], **given) for how in ("eager", "runtime"))
            assert eager == runtime, given
            answers.add(tuple(runtime))
    assert len(answers) > 20


@pytest.mark.parametrize("penalties", [(1, 1e9, 0), (1, 0, 1e9)])
@pytest.mark.parametrize("how", ["eager", "runtime"])
def test_a_huge_penalty_prevents_repetition_within_the_window(steps, how, penalties):
    plain = answer(steps[how], (1, 0, 0))
    assert len(set(plain)) < WINDOW  # without a penalty the model repeats itself
    tokens = [3, 1, 4, *answer(steps[how], penalties)]
    for position in range(3, len(tokens)):
        assert tokens[position] not in tokens[max(0, position - WINDOW) : position]
    assert len(set(tokens)) < len(tokens)  # a token outside the window may repeat


@pytest.mark.parametrize("how", ["eager", "runtime"])
def test_penalties_that_are_off_change_no_token(steps, how):
    head = SamplingHead(Model())
    for seed in range(5):
        expected, token = [], 4
        for i in range(18):
            token = int(head(torch.tensor([[token]]), temperature=1.0, seed=seed + i))
            expected.append(token)
        assert answer(steps[how], (1, 0, 0), temperature=1.0, seed=seed) == expected


# Parameters that are None --------------------------------------------------------------


class Head(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.head, self.names = SamplingHead(torch.nn.Identity()), names

    def forward(self, logits, *values):
        return self.head(logits, temperature=0.0, **dict(zip(self.names, values, strict=True)))


def operators(**given):
    program = torch.export.export(Head(tuple(given)), (torch.zeros(1, 64), *given.values()))
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    return [t._schema.name for t in targets if t.namespace == "mlx"]


def test_a_parameter_that_is_none_adds_no_operator():
    history = {"history": torch.zeros(1, 4, dtype=torch.int64), "presence_penalty": torch.tensor(1.0)}
    bias = {"bias_tokens": torch.zeros(2, dtype=torch.int64), "bias_values": torch.zeros(2)}
    allowed = {"allowed_tokens": torch.zeros(1, 2, dtype=torch.int32)}
    assert operators() == ["mlx::sample"]
    assert operators(**history) == ["mlx::penalize_logits", "mlx::sample"]
    assert operators(**bias) == ["mlx::bias_logits", "mlx::sample"]
    assert operators(**history, **bias, **allowed) == [
        "mlx::penalize_logits",
        "mlx::bias_logits",
        "mlx::mask_logits",
        "mlx::sample",
    ]


class Penalized(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, logits, history, *penalties):
        none = [None] * (3 - self.count)
        return torch.ops.mlx.penalize_logits(logits, history, None, *penalties, *none)


def test_a_penalty_that_is_none_adds_no_instruction():
    arguments = (torch.zeros(1, 64), torch.zeros(1, 4, dtype=torch.int64), *[torch.tensor(1.0)] * 3)
    sizes = []
    for count in (1, 3):
        lowered = lower(Penalized(count), arguments[: 2 + count])
        sizes.append(sum(len(chain) for chain in chains(lowered)))
    assert sizes[0] < sizes[1]


def chains(lowered):
    from executorch_mlx.serialization.read import read_payload

    program = lowered.exported_program()
    payloads = [
        getattr(program.graph_module, n.target).processed_bytes for n in program.graph.nodes if n.op == "get_attr"
    ]
    return [c.instructions for p in payloads for c in read_payload(p).instruction_chains]
