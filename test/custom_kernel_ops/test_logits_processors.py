"""Penalties, bias and mask against a NumPy reference that handles one token at a time."""

import functools
from collections import Counter

import numpy as np
import pytest
import torch
from executorch_mlx.custom_kernel_ops.logits_processors import bias_logits, mask_logits, penalize_logits
from executorch_mlx.llm.sampling_head import adjust_logits, sample_logits
from loaded_method import LoadedMethod
from sampling_programs import lower

VOCABULARY = 500
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
OFF = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
DRAW_PARAMETERS = {"temperature": 0.9, "top_p": 0.95, "seed": 0, "top_k": 40}


class Adjusted(torch.nn.Module):
    """Returns the adjusted logits, and the tokens drawn from them."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, logits, *values):
        parameters = dict(zip(self.names, values, strict=True))
        draw = {name: parameters.pop(name) for name in DRAW_PARAMETERS}
        adjusted = adjust_logits(logits, **parameters)
        return adjusted, sample_logits(adjusted, **draw)


@functools.cache
def _load(names, kinds):
    arguments = tuple(torch.ones(shape, dtype=dtype) for shape, dtype in kinds)
    method = LoadedMethod(lower(Adjusted(names), arguments).buffer)
    return lambda values: [t.clone() for t in method.execute(values)]


def _run(how, logits, **given):
    given = {n: torch.as_tensor(v) for n, v in (DRAW_PARAMETERS | given).items()}
    values = [logits, *given.values()]
    if how == "eager":
        return Adjusted(tuple(given))(*values)
    kinds = tuple((tuple(v.shape), v.dtype) for v in values)
    return _load(tuple(given), kinds)(values)


@pytest.fixture(params=["eager", "runtime"])
def run(request):
    return functools.partial(_run, request.param)


def case(seed, batch=3, dtype=torch.float32, vocabulary=VOCABULARY, **changes):
    """Random logits and parameters. History and bias contain repeated ids and ids outside of the vocabulary."""
    g = torch.Generator().manual_seed(seed)

    def random_ids(*shape, low=-3, high=vocabulary // 8):
        return torch.randint(low, high, shape, generator=g)

    given = {
        "repetition_penalty": 0.5 + 2 * torch.rand((), generator=g),
        "presence_penalty": torch.randn((), generator=g),
        "frequency_penalty": torch.randn((), generator=g),
        "history": torch.cat([random_ids(batch, 20), random_ids(batch, 4, high=2 * vocabulary)], 1),
        "history_valid": torch.rand(batch, 24, generator=g) < 0.7,
        "bias_tokens": torch.cat([random_ids(5), random_ids(2, high=2 * vocabulary), torch.tensor([-1, 2**40])]),
        "bias_values": 3 * torch.randn(9, generator=g),
        "allowed_tokens": random_ids(batch, -(-vocabulary // 32), low=-(2**31), high=2**31).int(),
    }
    logits = 3 * torch.randn(batch, vocabulary, generator=g)
    return logits.to(dtype), given | changes


def reference(
    logits,
    *,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    history,
    history_valid,
    bias_tokens,
    bias_values,
    allowed_tokens,
):
    x, vocabulary = logits.float().numpy().copy(), logits.shape[1]
    valid_ids = range(vocabulary)
    repetition, presence, frequency = (
        np.float32(float(v)) for v in (repetition_penalty, presence_penalty, frequency_penalty)
    )
    for sequence, tokens, valid, words in zip(x, history.tolist(), history_valid.tolist(), allowed_tokens.tolist()):
        for token, n in Counter(t for t, v in zip(tokens, valid) if v and t in valid_ids).items():
            value = sequence[token] / repetition if sequence[token] > 0 else sequence[token] * repetition
            sequence[token] = value - presence - frequency * np.float32(n)
        for token, value in zip(bias_tokens.tolist(), bias_values.numpy()):
            if token in valid_ids:
                sequence[token] += value
        for token in valid_ids:
            if not words[token // 32] >> token % 32 & 1:
                sequence[token] = -np.inf
    return torch.from_numpy(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_equal_the_reference(run, dtype):
    for seed in range(10):
        logits, given = case(seed, dtype=dtype)
        adjusted, _ = run(logits, **given)
        assert adjusted.dtype == torch.float32
        assert adjusted.equal(reference(logits, **given)), seed


def test_runtime_equals_eager_bit_for_bit():
    seen = set()
    for seed in range(300):
        logits, given = case(seed)
        draw = {"temperature": seed % 3 / 2, "top_p": (0.9, 1.0)[seed % 2], "seed": seed, "top_k": seed % 50}
        eager, runtime = (_run(how, logits, **given, **draw) for how in ("eager", "runtime"))
        assert eager[0].equal(runtime[0]) and eager[1].equal(runtime[1]), seed
        seen.update(runtime[1].tolist())
    assert len(seen) > 100


@pytest.mark.parametrize("penalty", PENALTIES)
def test_each_penalty_alone(run, penalty):
    logits, given = case(1)
    off = {"bias_values": torch.zeros(9), "allowed_tokens": torch.full((3, 16), -1, dtype=torch.int32)}
    given |= OFF | off | {penalty: given[penalty]}
    adjusted, _ = run(logits, **given)
    assert adjusted.equal(reference(logits, **given)) and not adjusted.equal(logits)


def test_off_values_change_nothing(run):
    off = OFF | {"bias_values": torch.zeros(9), "allowed_tokens": torch.full((3, 16), -1, dtype=torch.int32)}
    for seed in range(40):
        logits, given = case(seed, **off)
        logits[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
        logits[1, :8] = -torch.inf
        adjusted, tokens = run(logits, **given, seed=seed)
        torch.testing.assert_close(adjusted, logits, rtol=0, atol=0, equal_nan=True)
        assert tokens.equal(sample_logits(logits, **DRAW_PARAMETERS | {"seed": seed}))


def test_repetition_penalty_equals_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    for penalty in (0.7, 1.0, 1.3, 5.0):
        logits, given = case(3)
        history = given["history"].clamp(0, VOCABULARY - 1)
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
        assert adjust_logits(logits, repetition_penalty=penalty, history=history).equal(theirs)


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan])
def test_repetition_penalty_that_is_not_positive_is_off(run, value):
    logits, given = case(4)
    adjusted, _ = run(logits, **given | {"repetition_penalty": torch.tensor(value)})
    assert adjusted.equal(reference(logits, **given | {"repetition_penalty": 1.0}))


def test_infinite_penalty_excludes_only_tokens_in_the_history(run):
    logits, given = case(5)
    for name in ("presence_penalty", "frequency_penalty"):
        changed = given | OFF | {name: torch.tensor(torch.inf)}
        adjusted, _ = run(logits, **changed)
        assert adjusted.equal(reference(logits, **changed))
        assert not adjusted.isnan().any()


def test_history_without_valid_mask_counts_fully():
    logits, given = case(6)
    penalties = {name: given[name] for name in PENALTIES}
    everything = torch.ones_like(given["history_valid"])
    assert adjust_logits(logits, history=given["history"], **penalties).equal(
        adjust_logits(logits, history=given["history"], history_valid=everything, **penalties)
    )


def packed(allowed):
    """Return the mask of `allowed`, bool `[B, V]`, as int32 `[B, ceil(V / 32)]` with a bit for each token."""
    batch, vocabulary = allowed.shape
    bits = torch.nn.functional.pad(allowed, (0, -vocabulary % 32)).reshape(batch, -1, 32)
    return (bits.long() << torch.arange(32)).sum(-1).to(torch.int32)


# With a large vocabulary, sampling first selects candidates. The mask may exclude most of them.
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 32000])
@pytest.mark.parametrize("count", [1, 2, 30, 70])
def test_only_allowed_tokens_are_drawn(run, vocabulary, count):
    for seed in range(12):
        logits, given = case(seed, batch=1, vocabulary=vocabulary)
        tokens = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))[:count]
        allowed = torch.zeros(1, vocabulary, dtype=torch.bool)
        allowed[0, tokens] = True
        given["allowed_tokens"] = packed(allowed)
        draw = {"seed": seed, "top_k": (40, 0)[seed % 2], "top_p": (1.0, 0.9, 0.99)[seed % 3]}
        adjusted, token = run(logits, **given, **draw)
        assert allowed[0, token]
        assert token.equal(sample_logits(adjusted.masked_fill(~allowed, -torch.inf), **DRAW_PARAMETERS | draw))


def test_sequence_without_allowed_tokens_gives_token_0(run):
    logits, given = case(7)
    given["allowed_tokens"][1] = 0
    for seed in range(5):
        _, tokens = run(logits, **given, seed=seed)
        assert tokens[1] == 0
        assert all(given["allowed_tokens"][b, t // 32] >> t % 32 & 1 for b, t in ((0, tokens[0]), (2, tokens[2])))


def test_bits_beyond_the_vocabulary_are_ignored(run):
    logits, given = case(8)
    other = given["allowed_tokens"].clone()
    other[:, -1] ^= -(2 ** (VOCABULARY % 32))
    assert run(logits, **given)[0].equal(run(logits, **given | {"allowed_tokens": other})[0])


LOGITS, HISTORY, ONE = torch.zeros(2, 40), torch.zeros(2, 3, dtype=torch.int64), torch.tensor(1.0)


@pytest.mark.parametrize(
    "operator, arguments, message",
    [
        (penalize_logits, (LOGITS[0], HISTORY), r"logits: got torch.float32 of shape \[40\]"),
        (penalize_logits, (LOGITS.long(), HISTORY), "logits: got torch.int64"),
        (penalize_logits, (LOGITS, HISTORY.int()), "history: got torch.int32 .* expected torch.int64"),
        (penalize_logits, (LOGITS, HISTORY[:1]), r"history: got torch.int64 of shape \[1, 3\], .* \[2, N\]"),
        (penalize_logits, (LOGITS, HISTORY, HISTORY), "valid: got torch.int64 .* expected torch.bool"),
        (penalize_logits, (LOGITS, HISTORY, HISTORY[:, :2] > 0), r"expected torch.bool of shape \[2, 3\]"),
        (
            penalize_logits,
            (LOGITS, HISTORY, None, torch.ones(3)),
            r"repetition: got torch.float32 .* or of shape \[2\]",
        ),
        (penalize_logits, (LOGITS, HISTORY, None, None, HISTORY[0, 0]), "presence: got torch.int64"),
        (bias_logits, (LOGITS, HISTORY[:1], HISTORY), r"tokens: got torch.int64 of shape \[1, 3\], .* or \[2, K\]"),
        (bias_logits, (LOGITS, HISTORY[0], torch.ones(2)), r"values: .* of shape \[3\]"),
        (bias_logits, (LOGITS, HISTORY[0], HISTORY[0]), "values: got torch.int64"),
        (mask_logits, (LOGITS, torch.zeros(2, 1).int()), r"torch.int32 of shape \[2, 2\], a bit"),
        (mask_logits, (LOGITS, torch.zeros(2, 2).long()), "allowed: got torch.int64"),
    ],
    ids=str,
)
def test_invalid_arguments_raise(operator, arguments, message):
    with pytest.raises(ValueError, match=f"mlx::{operator._schema.name[5:]}: .*{message}"):
        operator(*arguments)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"presence_penalty": 1.0}, TypeError, "presence_penalty and history: got only one of them"),
        ({"history": HISTORY}, TypeError, "a penalty and history: got only one of them"),
        ({"history_valid": HISTORY > 0}, TypeError, "history_valid: expected history as well"),
        ({"bias_tokens": HISTORY[0]}, TypeError, "bias_tokens and bias_values: got only one of them"),
        ({"repetition_penalty": "2", "history": HISTORY}, TypeError, "repetition_penalty: got str"),
    ],
    ids=str,
)
def test_incomplete_parameters_raise(given, error, message):
    with pytest.raises(error, match=f"SamplingHead: {message}"):
        adjust_logits(LOGITS, **given)
