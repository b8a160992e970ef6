"""mlx::sample against its specification, token for token. The inputs cover every variant of the algorithm."""

import pytest
import torch
from executorch_mlx.custom_kernel_ops.logits_processors import mask_logits, mask_word_count
from executorch_mlx.custom_kernel_ops.sample import sample
from executorch_mlx.custom_kernel_ops.sampling.branches import UNSURE
from executorch_mlx.custom_kernel_ops.sampling.noise import NOISE_KEY, words_by_rank
from executorch_mlx.custom_kernel_ops.sampling.unfiltered import _unfiltered_columns
from sampling_logits import logits_of
from torch.utils._python_dispatch import TorchDispatchMode

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.9, "top_p": 0.9},
    "top_k": {"temperature": 1.3, "top_k": 40},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
}
# Sizes that are smaller than a block of custom_kernel_ops/sampling, at most its SHORT_VOCABULARY, not divisible by the
# size of a block, and usual in models.
VOCABULARIES = [1, 2, 7, 63, 1000, 8191, 8193, 12289, 32000, 50257]


@pytest.mark.parametrize("kind", ["text", "flat", "ties", "constant"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocabulary", [1000, 32000])
def test_token_equals_the_specification(draw, reference, name, kind, vocabulary):
    for seed in range(8):
        logits = logits_of(kind, 1, vocabulary, seed)
        assert draw(logits, seed=seed, **SETTINGS[name]).equal(reference(logits, seed=seed, **SETTINGS[name])), seed


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("batch", [1, 4])
def test_any_vocabulary_and_batch(draw, reference, vocabulary, batch):
    for name in ("greedy", "temperature", "all"):
        for seed in (1, 2**40 + 3):
            logits = logits_of("text", batch, vocabulary, seed)
            token = draw(logits, seed=seed, **SETTINGS[name])
            assert token.dtype == torch.int64 and token.shape == (batch,)
            assert token.equal(reference(logits, seed=seed, **SETTINGS[name])), (name, seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_half_precision_logits_are_computed_in_float32(draw, reference, dtype, name):
    for seed in range(8):
        logits = logits_of("text", 2, 32000, seed).to(dtype)  # with many ties
        assert draw(logits, seed=seed, **SETTINGS[name]).equal(reference(logits, seed=seed, **SETTINGS[name]))


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "all"])
def test_fifty_seeds_equal_the_specification_and_a_thousand_vary(draw, reference, name):
    logits = logits_of("text", 1, 32000)
    tokens = [int(draw(logits, seed=seed, **SETTINGS[name])) for seed in range(1000)]
    expected = [int(reference(logits, seed=seed, **SETTINGS[name])) for seed in range(50)]
    assert tokens[:50] == expected
    assert len(set(tokens)) > 3


def test_programs_equal_eager_for_a_thousand_seeds(draws):
    """Eager torch and all programs draw the same tokens, with other parameters for each seed."""
    logits = logits_of("text", 1, 32000)
    names = list(SETTINGS)
    for seed in range(1000):
        parameters = {"top_k": 0, "min_p": 0.0} | SETTINGS[names[seed % len(names)]]
        token = draws["eager"](logits, seed=seed, **parameters)
        for how in ("portable", "replaced", "node"):
            assert draws[how](logits, seed=seed, **parameters).equal(token), (seed, how)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_node_equals_eager_with_many_ties(draws, dtype):
    for seed in range(60):
        logits = logits_of(("text", "flat")[seed % 2], 2, 20000, seed).to(dtype)
        parameters = {"top_k": 0, "min_p": 0.0} | SETTINGS[list(SETTINGS)[seed % len(SETTINGS)]]
        tokens = [draws[how](logits, seed=seed, **parameters) for how in ("eager", "node")]
        assert tokens[0].equal(tokens[1]), seed


@pytest.mark.parametrize("seed", [-1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("name", ["temperature", "top_k"])
def test_all_bits_of_the_seed_count(draw, reference, seed, name):
    logits = logits_of("flat", 2, 70001)
    for vocabulary in (1000, 32000, 70001):
        part = logits[:, :vocabulary].contiguous()
        assert draw(part, seed=seed, **SETTINGS[name]).equal(reference(part, seed=seed, **SETTINGS[name]))


def test_greedy_ties_go_to_the_lowest_token(draw):
    for vocabulary in (10, 1000, 32000, 50257):
        logits = torch.zeros(2, vocabulary)
        logits[0, [3, 5, vocabulary - 1]] = 2.0
        logits[1, [vocabulary // 2, vocabulary - 2]] = 1.0
        assert draw(logits, 0.0).tolist() == [3, vocabulary // 2]


def test_greedy_token_is_the_exact_argmax_in_each_row(draw):
    """A row with NaN does not change another row, and plus infinity is more than the largest number."""
    logits = logits_of("text", 2, 1000)
    logits[:, 20], logits[:, 30] = torch.finfo(torch.float32).max, torch.inf
    logits[0, 3] = torch.nan
    assert draw(logits, 0.0).tolist() == [30, 30]


@pytest.mark.parametrize("temperature", [0.0, -0.0, -1.0, -torch.inf, torch.nan])
def test_temperature_that_is_not_positive_is_greedy(draw, temperature):
    logits = logits_of("flat", 3, 32000)
    assert draw(logits, temperature, seed=1, top_p=0.9).equal(logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-38, 1e-20, 1e-6, 1e6, 1e38, torch.inf])
def test_extreme_temperatures(draw, temperature):
    logits = logits_of("text", 2, 32000)
    logits[:, 100:] = -torch.inf
    tokens = [draw(logits, temperature, seed=seed) for seed in range(20)]
    if temperature < 1:
        assert all(t.equal(logits.argmax(-1)) for t in tokens)
    else:
        assert max(int(t.max()) for t in tokens) < 100
        assert len({int(t[0]) for t in tokens}) > 5


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocabulary", [1000, 32000])
def test_nan_is_never_drawn(draw, reference, name, vocabulary):
    logits = logits_of("text", 2, vocabulary)
    for tokens in ([0], [vocabulary - 1], [0, 17, 500], list(range(0, vocabulary, 2))):
        with_nan = logits.clone()
        with_nan[0, tokens] = torch.nan
        for seed in range(4):
            token = draw(with_nan, seed=seed, **SETTINGS[name])
            assert int(token[0]) not in tokens
            assert token.equal(reference(with_nan, seed=seed, **SETTINGS[name]))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocabulary", [5, 1000, 32000])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_sequence_without_finite_logits_gives_token_0(draw, name, vocabulary, value):
    logits = logits_of("text", 2, vocabulary)
    logits[1] = value
    token = draw(logits, seed=3, **SETTINGS[name])
    assert int(token[1]) == 0
    alone = draw(torch.full((1, vocabulary), value), seed=3, **SETTINGS[name])
    assert alone.tolist() == [0]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocabulary", [50, 32000])
def test_infinite_logits(draw, reference, name, vocabulary):
    logits = logits_of("text", 2, vocabulary)
    logits[0, 30] = torch.inf
    logits[1, 4:] = -torch.inf
    for seed in range(6):
        token = draw(logits, seed=seed, **SETTINGS[name])
        assert int(token[0]) == 30 and int(token[1]) < 4
        assert token.equal(reference(logits, seed=seed, **SETTINGS[name]))


@pytest.mark.parametrize(
    "off",
    [
        {"top_p": 1.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"top_k": -3},
        {"top_k": 32000},
        {"top_k": 32001},
        {"top_k": 2**40},
        {"min_p": 0.0},
        {"min_p": -1.0},
    ],
    ids=str,
)
def test_off_value_of_a_filter_drops_nothing(draw, off):
    logits = logits_of("flat", 1, 32000)
    for seed in range(10):
        assert draw(logits, seed=seed, **off).equal(draw(logits, seed=seed))


@pytest.mark.parametrize(
    "strictest", [{"top_p": 0.0}, {"top_p": -1.0}, {"top_k": 1}, {"min_p": 1.0}, {"min_p": 7.0}], ids=str
)
@pytest.mark.parametrize("vocabulary", [100, 32000])
def test_the_most_likely_token_is_always_kept(draw, strictest, vocabulary):
    logits = logits_of("text", 2, vocabulary)
    for seed in range(10):
        assert draw(logits, 5.0, seed=seed, **strictest).equal(logits.argmax(-1))


@pytest.mark.parametrize("parameters", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.9}], ids=str)
@pytest.mark.parametrize("vocabulary", [100, 32000])
def test_tokens_tied_with_the_last_kept_token_are_kept(draw, parameters, vocabulary):
    logits = torch.full((1, vocabulary), -30.0)
    tied = torch.arange(vocabulary)[7::9][:300]
    logits[0, tied] = 2.0
    tokens = {int(draw(logits, seed=seed, **parameters)) for seed in range(60)}
    assert tokens <= set(tied.tolist())
    assert len(tokens) > min(9, 0.6 * len(tied)), "only some of the tied tokens were kept"


@pytest.mark.parametrize("top_k", [2, 63, 64, 65, 255, 1000, 1500, 31999])
def test_any_top_k(draw, reference, top_k):
    for kind in ("text", "flat", "ties"):
        logits = logits_of(kind, 2, 40000)
        for seed in range(3):
            parameters = {"temperature": 2.0, "seed": seed, "top_k": top_k}
            assert draw(logits, **parameters).equal(reference(logits, **parameters))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("kind", ["text", "flat", "ties"])
def test_any_top_p(draw, reference, top_p, kind):
    for temperature in (0.3, 1.0, 2.0):
        logits = logits_of(kind, 2, 40000)
        for seed in range(4):
            parameters = {"temperature": temperature, "seed": seed, "top_p": top_p}
            assert draw(logits, **parameters).equal(reference(logits, **parameters))


def test_zeros_of_both_signs_are_tied(draw, reference):
    """Of several thousand tied tokens, the lower id has the lower rank, whatever the sign of its zero."""
    logits = torch.zeros(1, 32000)
    logits[:, ::3] = -0.0
    for seed in range(2):
        parameters = {"temperature": 0.9, "top_p": 0.9, "seed": seed}
        assert draw(logits, **parameters).equal(reference(logits, **parameters))


def test_fast_version_without_filters_serves_padded_vocabularies():
    """8209 is a prime, so that the columns are padded."""
    logits, temperature = logits_of("text", 1, 8209), torch.tensor(1.0)
    words = [torch.ops.mlx.random_bits([1, 8209], torch.tensor(seed)).float() for seed in range(20)]
    assert not any(_unfiltered_columns(logits, temperature, w).eq(UNSURE).any() for w in words)


@pytest.mark.parametrize("vocabulary", [50, 70001])
def test_no_sequences_give_no_tokens(vocabulary):
    logits, one = torch.zeros(0, vocabulary), torch.tensor(1.0)
    for temperature, top_p in ((one, one), (one, one / 2), (one * 0, one), (torch.zeros(0), one)):
        assert sample(logits, temperature, top_p, torch.tensor(3)).shape == (0,)
    assert mask_logits(logits, torch.zeros(0, mask_word_count(vocabulary), dtype=torch.int32)).shape == logits.shape


def test_a_filter_keeps_the_tokens_that_transformers_keeps(kept):
    """With two filters, transformers keeps fewer: its top_p refers to the tokens that top_k has kept."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = logits_of("text", 3, 500)
    warpers = {"top_k": (TopKLogitsWarper, 40), "top_p": (TopPLogitsWarper, 0.9), "min_p": (MinPLogitsWarper, 0.05)}
    for name, (warper, value) in warpers.items():
        theirs = warper(value)(None, logits.clone()) > -torch.inf
        assert kept(logits, **{"temperature": 1.0, "top_p": 1.0} | {name: value}).equal(theirs), name
    theirs = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(40)(None, logits.clone())) > -torch.inf
    ours = kept(logits, temperature=1.0, top_p=0.9, top_k=40)
    assert (theirs <= ours).all() and theirs.sum() < ours.sum()


def test_same_seed_gives_the_same_token(draw):
    logits = logits_of("flat", 1, 32000)
    assert len({int(draw(logits, seed=5)) for _ in range(5)}) == 1


@pytest.mark.parametrize("name", ["temperature", "top_k"])
def test_draws_without_a_seed_vary(draw, name):
    logits = logits_of("flat", 1, 32000)
    assert len({int(draw(logits, **SETTINGS[name])) for _ in range(12)}) > 2


def test_invalid_arguments_raise():
    logits, one, seed = torch.zeros(1, 5), torch.tensor(1.0), torch.tensor(1)
    for arguments, message in [
        ((torch.zeros(5), one, one), r"logits: got torch.float32 of shape \[5\], expected"),
        ((torch.zeros(1, 5).double(), one, one), "logits: got torch.float64"),
        ((torch.zeros(1, 0), one, one), "empty vocabulary"),
        ((logits, torch.ones(2), one), r"temperature: got torch.float32 of shape \[2\]"),
        ((logits, one, seed), "top_p: got torch.int64"),
        ((logits, one, one, one), "seed: got torch.float32 of shape .*, expected an int64"),
        ((logits, one, one, seed, one), "top_k: got torch.float32"),
        ((logits, one, one, seed, None, seed), "min_p: got torch.int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample(*arguments)


class Seeds(TorchDispatchMode):
    """Records the seeds of the random bits that are drawn while it is active."""

    def __init__(self):
        super().__init__()
        self.seeds = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.mlx.random_bits.default:
            self.seeds.append(int(args[1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31 - 1, -1, -(2**31), 2**40 + 7, -(2**62)])
def test_parts_of_the_noise_keep_the_upper_half_of_the_seed(seed):
    # ExecuTorch's own MLX delegate reads the low 32 bits of a seed, with their sign.
    with Seeds() as drawn:
        words_by_rank(1, 3000, torch.tensor(seed))
    assert drawn.seeds[0] == seed and len({*drawn.seeds}) == 3
    assert {s >> 31 for s in drawn.seeds} == {seed >> 31}


def test_consecutive_seeds_share_no_seed_of_a_part():
    for i, j in ((0, 1), (0, 2), (1, 2)):
        difference = i * NOISE_KEY ^ j * NOISE_KEY
        # s ^ difference is at least this far from s, for every s
        assert 2 ** difference.bit_length() - difference > 2**28
