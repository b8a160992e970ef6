"""Settings of the draw: the same on the host as in the head, and refused where they are not there."""

import pytest
import small_llm
import torch
from executorch_mlx.llm import LLM, SettingError
from executorch_mlx.llm.classify import mask_of
from executorch_mlx.llm.settings import seed_of

PROMPT = [7, 300, 12, 300, 45]
COUNT = 40

SETTINGS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.5, "top_k": 20},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "all filters": {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    # Of these sizes they show: a model of random weights hardly ever says a thing twice.
    "repetition": {"temperature": 1.0, "repetition_penalty": 0.1},
    "presence": {"temperature": 1.0, "presence_penalty": -5.0},
    "frequency": {"temperature": 1.0, "frequency_penalty": -3.0},
    "bias": {"temperature": 1.0, "logit_bias": {300: 4.0, 301: 4.0, 0: -100.0}},
    "greedy, penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0},
}


@pytest.fixture(scope="module")
def head(chat_program) -> LLM:
    return LLM.load(chat_program)


@pytest.fixture(scope="module")
def host(logits_program) -> LLM:
    llm = LLM.load(logits_program)
    # The window of the penalties is the head's to say; without one it is the context.
    llm.program.metadata["sampling_history"] = [32]
    return llm


def drawn(llm: LLM, **settings) -> list[int]:
    settings = {"seed": 11, "max_new_tokens": COUNT, "ignore_eos": True} | settings
    return llm.generate(PROMPT, **settings).result().tokens


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", [0, 2**64 - 3])
def test_head_and_host_draw_the_same_tokens(head, host, settings, seed):
    assert drawn(head, seed=seed, **settings) == drawn(host, seed=seed, **settings)


def test_each_setting_makes_a_difference(head):
    """So that equal tokens above say something."""
    plain = drawn(head, temperature=1.0)
    for name in ("repetition", "presence", "frequency", "bias"):
        assert drawn(head, **SETTINGS[name]) != plain, name
    filtered = [tuple(drawn(head, **SETTINGS[name])) for name in ("top_k", "top_p", "min_p")]
    assert len({tuple(drawn(head, temperature=1.5)), *filtered}) == 4


@pytest.mark.parametrize("of", ["head", "host"])
def test_masks(of, request):
    llm = request.getfixturevalue(of)
    asked = []

    def allowed(answer):
        asked.append(list(answer))
        return None if len(answer) == 2 else mask_of(llm.program, [31, 32, 700])[0].numpy()

    tokens = drawn(llm, temperature=5.0, max_new_tokens=12, allowed_tokens=allowed)
    assert asked == [tokens[:n] for n in range(12)]
    rest = set(tokens[:2] + tokens[3:])
    assert rest <= {31, 32, 700} and len(rest) > 1
    assert tokens[2] not in {31, 32, 700}


def test_the_mask_is_checked(head):
    with pytest.raises(SettingError, match=r"gave torch.int32 of shape \[3\], expected int32 of shape \[48\]"):
        drawn(head, allowed_tokens=lambda answer: torch.zeros(3, dtype=torch.int32))


def test_the_seed_moves_on_by_one_from_step_to_step(head):
    first, second, *_ = drawn(head, temperature=1.0, seed=5)
    after = head.generate([*PROMPT, first], temperature=1.0, seed=6, max_new_tokens=1)
    assert after.result().tokens == [second]


def test_the_seed_of_an_answer_gives_it_again(head, host):
    for llm in (head, host):
        some = llm.generate(PROMPT, temperature=1.0, max_new_tokens=COUNT, ignore_eos=True).result()
        assert drawn(llm, temperature=1.0, seed=some.seed) == some.tokens
        assert llm.generate(PROMPT, temperature=1.0).seed != some.seed


@pytest.mark.parametrize("base, step, expected", [(2**63 - 1, 1, -(2**63)), (2**64 - 1, 1, 0), (-1, 1, 0), (3, 4, 7)])
def test_seeds_go_round(base, step, expected):
    assert seed_of(base, step) == expected


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


def test_what_the_program_does_not_take_is_refused(rows_program):
    llm = LLM.load(rows_program)
    for name, value in REFUSED.items():
        with pytest.raises(SettingError, match=f"^{name} is not among the parameters") as caught:
            llm.generate(PROMPT, **{name: value})
        assert caught.value.name == name
        with pytest.raises(SettingError, match=f"^{name} "):
            llm.generate_batch([PROMPT], **{name: value})
    assert len(llm.generate(PROMPT, max_new_tokens=2, ignore_eos=True, **OFF).result().tokens) == 2
    none = dict.fromkeys(OFF)
    assert len(llm.generate(PROMPT, max_new_tokens=2, ignore_eos=True, **none).result().tokens) == 2


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("temperature", "hot", "temperature is 'hot', expected a number"),
        ("temperature", float("nan"), "temperature is nan, expected a number"),
        ("top_p", True, "top_p is True, expected a number"),
        ("top_k", 1.5, "top_k is 1.5, expected an integer"),
        ("seed", 2**64, f"seed is {2**64}, expected 64 bits"),
        ("repetition_penalty", 0, "repetition_penalty is 0, expected above 0"),
        ("logit_bias", [1], "logit_bias is [1], expected token ids with numbers"),
        ("logit_bias", {-1: 1.0}, "logit_bias is -1, expected an id"),
        ("logit_bias", {small_llm.VOCABULARY: 1.0}, "logit_bias: id 1536 is outside the vocabulary [0, 1536)"),
        ("allowed_tokens", 3, "allowed_tokens is 3, expected a function"),
    ],
)
def test_values_are_checked(head, name, value, told):
    with pytest.raises(SettingError) as caught:
        head.generate(PROMPT, **{name: value})
    assert str(caught.value) == told and caught.value.name == name


def test_a_bias_of_more_tokens_than_the_head_takes_is_the_hosts(chat_program, head):
    """This program returns logits as well; one with a head alone has to refuse."""
    bias = {token: -100.0 for token in range(10)}
    assert not set(drawn(head, temperature=1.0, logit_bias=bias)) & bias.keys()
    alone = LLM.load(chat_program)
    alone.program.has_logits = False
    with pytest.raises(SettingError, match="logit_bias has 10 tokens, chat.pte takes at most 4"):
        drawn(alone, logit_bias=bias)
