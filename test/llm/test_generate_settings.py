"""Sampling parameters: the head and the host draw the same tokens. Unsupported parameters are errors."""

import numpy as np
import pytest
import small_llm
import torch
from executorch_mlx.llm import LLM, SamplingParameters, SettingError, generation
from executorch_mlx.llm.scoring import allow_only

PROMPT = [7, 300, 12, 300, 45]
# The length of an answer. Prompt and answer have 32 tokens, as many as the history of the head. The host has no such
# limit: after more tokens, its penalties would differ from those of the head.
COUNT = 27

SETTINGS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.5, "top_k": 20},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "all filters": {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    # Extreme values, because a model with random weights rarely repeats a token.
    "repetition": {"temperature": 1.0, "repetition_penalty": 0.1},
    "presence": {"temperature": 1.0, "presence_penalty": -5.0},
    "frequency": {"temperature": 1.0, "frequency_penalty": -3.0},
    "bias": {"temperature": 1.0, "logit_bias": {300: 4.0, 301: 4.0, 0: -100.0}},
    "greedy, penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0},
}


@pytest.fixture(scope="module")
def head(chat_program) -> LLM:
    """A model whose sampling head draws the tokens."""
    return LLM.load(chat_program)


@pytest.fixture(scope="module")
def host(logits_program) -> LLM:
    """A model whose program returns logits, from which the host draws the tokens."""
    return LLM.load(logits_program)


def drawn(llm: LLM, **settings) -> list[int]:
    settings = {"seed": 11, "max_new_tokens": COUNT, "ignore_eos": True} | settings
    return llm.generate(PROMPT, **settings).result().tokens


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", [0, 2**64 - 3])
def test_head_and_host_draw_the_same_tokens(head, host, settings, seed):
    assert drawn(head, seed=seed, **settings) == drawn(host, seed=seed, **settings)


def test_each_parameter_changes_the_tokens(head):
    """The parameters of the test above change the tokens. Otherwise that test would prove nothing."""
    plain = drawn(head, temperature=1.0)
    for name in ("repetition", "presence", "frequency", "bias"):
        assert drawn(head, **SETTINGS[name]) != plain, name
    filtered = [tuple(drawn(head, **SETTINGS[name])) for name in ("top_k", "top_p", "min_p")]
    assert len({tuple(drawn(head, temperature=1.5)), *filtered}) == 4


@pytest.mark.parametrize("fixture", ["head", "host"])
def test_allowed_tokens(fixture, request):
    llm = request.getfixturevalue(fixture)
    answers = []

    def allowed(answer):
        answers.append(list(answer))
        return None if len(answer) == 2 else torch.from_numpy(allow_only(llm.program.vocab_size, [31, 32, 700]))

    tokens = drawn(llm, temperature=5.0, max_new_tokens=12, allowed_tokens=allowed)
    assert answers == [tokens[:n] for n in range(12)]
    masked = set(tokens[:2] + tokens[3:])
    assert masked <= {31, 32, 700} and len(masked) > 1
    assert tokens[2] not in {31, 32, 700}


@pytest.mark.parametrize("fixture", ["head", "host"])
@pytest.mark.parametrize("draft", [0, 4])
def test_minimum_length(fixture, draft, request):
    """The tokens are those of a mask without the stop ids, also with draft tokens."""
    llm = request.getfixturevalue(fixture)
    stops = drawn(llm, temperature=1.0)[3:6]
    without_stops = torch.from_numpy(allow_only(llm.program.vocab_size, {*range(llm.program.vocab_size)} - {*stops}))
    expected = drawn(llm, temperature=1.0, allowed_tokens=lambda answer: without_stops if len(answer) < 12 else None)
    end = next((index for index in range(12, COUNT) if expected[index] in stops), COUNT)
    assert drawn(llm, temperature=1.0, min_new_tokens=12, stop_ids=stops, draft=draft) == expected[:end]
    assert len(drawn(llm, temperature=1.0, stop_ids=stops)) == 3


def test_minimum_length_is_checked(head):
    with pytest.raises(SettingError, match="min_new_tokens: got -1, expected an integer of at least 0"):
        drawn(head, min_new_tokens=-1)
    with pytest.raises(SettingError, match="min_new_tokens: got 28, expected at most max_new_tokens, which is 27"):
        drawn(head, min_new_tokens=28)


def test_mask_is_checked(head):
    expected = r"allowed_tokens: got int32 of shape \[3\], expected int32 of shape \[48\]"
    with pytest.raises(SettingError, match=expected):
        drawn(head, allowed_tokens=lambda answer: torch.zeros(3, dtype=torch.int32))
    with pytest.raises(SettingError, match="allowed_tokens: got a mask that admits no token"):
        drawn(head, allowed_tokens=lambda answer: torch.zeros(48, dtype=torch.int32))


def test_seed_advances_by_one_per_step(head):
    first, second, *_ = drawn(head, temperature=1.0, seed=5)
    after = head.generate([*PROMPT, first], temperature=1.0, seed=6, max_new_tokens=1)
    assert after.result().tokens == [second]


def test_seed_of_an_answer_reproduces_it(head, host):
    for llm in (head, host):
        first = llm.generate(PROMPT, temperature=1.0, max_new_tokens=COUNT, ignore_eos=True).result()
        assert drawn(llm, temperature=1.0, seed=first.seed) == first.tokens and len(first.tokens) == COUNT
        assert llm.generate(PROMPT, temperature=1.0).seed != first.seed


def test_seeds_wrap_around(head):
    first, second, *_ = drawn(head, temperature=1.0, seed=2**64 - 1)
    after = head.generate([*PROMPT, first], temperature=1.0, seed=0, max_new_tokens=1)
    assert after.result().tokens == [second]


REFUSED = {
    "seed": 1,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.0},
    "allowed_tokens": lambda answer: None,
}
OFF = {"seed": None, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0.0}
OFF |= {"frequency_penalty": 0, "logit_bias": {}, "allowed_tokens": None, "top_p": 1.0}


def test_unsupported_parameter_is_an_error(batch_program):
    llm = LLM.load(batch_program)
    for name, value in REFUSED.items():
        with pytest.raises(SettingError, match=f"^{name}: the program was exported without") as caught:
            llm.generate(PROMPT, **{name: value})
        assert caught.value.name == name
        with pytest.raises(SettingError, match=f"^{name}: "):
            llm.generate_batch([PROMPT], **{name: value})
    assert len(llm.generate(PROMPT, max_new_tokens=2, ignore_eos=True, **OFF).result().tokens) == 2
    # None stands for the off value.
    none = dict.fromkeys(OFF)
    assert len(llm.generate(PROMPT, max_new_tokens=2, ignore_eos=True, **none).result().tokens) == 2


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("temperature", "hot", "temperature: got 'hot', expected a number"),
        ("temperature", float("nan"), "temperature: got nan, expected a number"),
        ("top_p", True, "top_p: got True, expected a number"),
        ("top_k", 1.5, "top_k: got 1.5, expected an integer"),
        ("seed", 2**64, f"seed: got {2**64}, expected 64 bits"),
        ("repetition_penalty", 0, "repetition_penalty: got 0, expected more than 0"),
        pytest.param(
            "temperature",
            10**400,
            "temperature: got an integer of 1329 bits, expected a number",
            id="large temperature",
        ),
        pytest.param(
            "temperature",
            10**5000,
            "temperature: got an integer of 16610 bits, expected a number",
            id="huge temperature",
        ),
        pytest.param("seed", 10**5000, "seed: got an integer of 16610 bits, expected 64 bits", id="huge seed"),
        ("logit_bias", {5: 10**400}, "logit_bias: got an integer of 1329 bits, expected a number"),
        ("logit_bias", [1], "logit_bias: got [1], expected a mapping from token ids to numbers"),
        ("logit_bias", {-1: 1.0}, "logit_bias: got -1, expected a token id"),
        ("logit_bias", {small_llm.VOCABULARY: 1.0}, "logit_bias: id 1536 is outside the vocabulary [0, 1536)"),
        ("allowed_tokens", 3, "allowed_tokens: got 3, expected a function"),
        ("stop_ids", ["a"], "stop_ids: got ['a'], expected token ids"),
        ("stop_ids", [1.5], "stop_ids: got [1.5], expected token ids"),
        ("stop_ids", b"\n", "stop_ids: got b'\\n', expected token ids"),
        ("stop_ids", 3, "stop_ids: got 3, expected token ids"),
        ("temperature", np.float32("nan"), "temperature: got nan, expected a number"),
        ("top_p", np.bool_(True), f"top_p: got {np.bool_(True)!r}, expected a number"),
        ("stop_ids", [-1], "stop_ids: got -1, expected a token id"),
        ("stop_ids", [2**64 + 5], f"stop_ids: got {2**64 + 5}, expected a token id"),
        ("stop", 5, "stop: got 5, expected stop strings"),
        ("stop", "\ud800", "stop: got ['\\ud800'], expected non-empty strings without zeros and lone surrogates"),
        pytest.param(
            "max_new_tokens",
            10**5000,
            "max_new_tokens: got an integer of 16610 bits, expected an integer below 2**31",
            id="huge max_new_tokens",
        ),
    ],
)
def test_values_are_checked(head, name, value, message):
    known = set(generation._requests)
    with pytest.raises(SettingError) as caught:
        head.generate(PROMPT, **{name: value})
    assert str(caught.value) == message and caught.value.name == name
    assert set(generation._requests) <= known  # a refused request leaves nothing behind


def test_numbers_of_numpy(head):
    settings = {"temperature": np.float64(0.75), "top_p": np.float32(0.5), "top_k": np.int32(20), "seed": np.uint64(9)}
    settings |= {"repetition_penalty": np.float32(0.5), "max_new_tokens": np.int64(9), "priority": np.int8(1)}
    plain = {name: value.item() for name, value in settings.items()}
    tokens = drawn(head, logit_bias={np.int64(300): np.float16(4)}, **settings)
    assert tokens == drawn(head, logit_bias={300: 4.0}, **plain)
    assert SamplingParameters(temperature=np.float32(0.5)) == SamplingParameters(temperature=0.5)
    assert type(generation.Options(logprobs=np.int64(3)).logprobs) is int


def test_request_that_cannot_be_passed_to_the_engine_leaves_nothing_behind(head):
    """`Options` and `SamplingParameters` refuse other values. An id beyond 64 bits only gets here without `LLM`."""
    known = set(generation._requests)
    with pytest.raises(OverflowError):
        generation.Request(head.program, [2**64 + 5], SamplingParameters(), generation.Options())
    assert set(generation._requests) <= known


def test_more_log_probabilities_than_those_of_the_head_are_an_error(logprob_program, host):
    llm = LLM.load(logprob_program)
    assert len(next(llm.generate(PROMPT, logprobs=4)).top_logprobs) == 4
    for start in (llm.generate, lambda prompt, **options: llm.generate_batch([prompt], **options)):
        with pytest.raises(SettingError, match="^logprobs: got 5, expected at most 4, the number") as caught:
            start(PROMPT, logprobs=5)
        assert caught.value.name == "logprobs"
    assert len(next(host.generate(PROMPT, logprobs=50)).top_logprobs) == 50


def test_host_applies_a_bias_that_is_too_long_for_the_head(mask_program, head):
    """The host draws, because the program returns logits. Without logits, such a bias would be an error."""
    likely = drawn(head, temperature=1.0)
    bias = dict.fromkeys(likely[:10], -100.0)
    assert len(bias) > 4  # the limit of the head
    tokens = drawn(head, temperature=1.0, logit_bias=bias)
    assert len(tokens) == COUNT and not set(tokens) & bias.keys()
    alone = LLM.load(mask_program)
    with pytest.raises(SettingError, match=f"logit_bias: got {len(bias)} tokens, expected at most 4"):
        drawn(alone, logit_bias=bias)
