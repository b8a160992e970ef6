"""Log probabilities: of drawn tokens, and of given continuations."""

import pytest
import small_llm
import torch
from executorch_mlx.llm import LLM
from executorch_mlx.llm.scoring import CancelledError

PROMPT = [5, 300, 12, 7]
SCORED_AT_ONCE = 64  # the tokens of a call of `verify`
LONG = list(range(100, 100 + 2 * small_llm.CHUNK + 3))


@pytest.fixture(scope="module", params=["chat_program", "logits_program", "logprob_program"])
def llm(request) -> LLM:
    return LLM.load(request.getfixturevalue(request.param), small_llm.DEMO)


def expected_logprobs(prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log probabilities `[len(tokens), V]` in transformers. Row i is after the prompt and `tokens[:i]`."""
    with torch.no_grad():
        logits = small_llm.model()(torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0, "top_k": 50, "seed": 3}], ids=["greedy", "sampled"])
def test_logprobs_of_drawn_tokens(llm, settings):
    generation = llm.generate(PROMPT, max_new_tokens=12, logprobs=3, ignore_eos=True, **settings)
    tokens = list(generation)
    expected = expected_logprobs(PROMPT, generation.tokens)
    own = expected[range(12), generation.tokens]
    assert [token.logprob for token in tokens] == pytest.approx(own.tolist(), abs=1e-4)
    assert generation.result().logprobs == [token.logprob for token in tokens]
    values, ids = expected.topk(3)
    for token, row_ids, row in zip(tokens, ids.tolist(), values.tolist()):
        assert [id for id, _ in token.top_logprobs] == row_ids
        assert [value for _, value in token.top_logprobs] == pytest.approx(row, abs=1e-4)


def test_logprobs_do_not_change_the_tokens(llm):
    settings = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "ignore_eos": True}
    plain = llm.generate(PROMPT, **settings)
    assert {(token.logprob, token.top_logprobs) for token in plain} == {(None, ())}
    assert plain.result().logprobs is None
    with_logprobs = llm.generate(PROMPT, logprobs=0, **settings)
    assert all(token.logprob < 0 and token.top_logprobs == () for token in with_logprobs)
    assert with_logprobs.tokens == plain.tokens


def test_scores_match_transformers(llm):
    greedy = llm.generate(LONG, max_new_tokens=3, ignore_eos=True).result().tokens
    continuations = [[300, 301, 5], [8], greedy, greedy[:1] + [9]]
    scores = llm.score(LONG, continuations, logprobs=3)
    for tokens, score in zip(continuations, scores):
        expected = expected_logprobs(LONG, tokens)
        assert score.logprobs == pytest.approx(expected[range(len(tokens)), tokens].tolist(), abs=1e-4)
        values, ids = expected.topk(3)
        for top, row_ids, row in zip(score.top_logprobs, ids.tolist(), values.tolist(), strict=True):
            assert [id for id, _ in top] == row_ids
            assert [value for _, value in top] == pytest.approx(row, abs=1e-4)
        assert score.logprob == pytest.approx(sum(score.logprobs)) and score.tokens == tokens
    assert [score.is_greedy for score in scores] == [False, False, True, False]
    assert llm.score(LONG, [[8]])[0].top_logprobs == [()]


def test_text_continuations(llm):
    (score,) = llm.score("Return the", [" value of"])
    assert score.tokens == llm.encode(" value of", special=False)
    expected = expected_logprobs(llm.encode("Return the"), score.tokens)
    assert score.logprob == pytest.approx(expected[range(len(score.tokens)), score.tokens].sum().item(), abs=1e-3)


def test_arguments_are_checked(llm):
    with pytest.raises(ValueError, match="continuations: got 0 tokens, expected 1 to"):
        llm.score(PROMPT, [[]])
    with pytest.raises(ValueError, match="continuations: got 5 tokens, expected 1 to 2"):
        llm.score([5] * (small_llm.CONTEXT - 1), [[5] * 5])
    with pytest.raises(ValueError, match="continuations: id 1536 is outside the vocabulary"):
        llm.score(PROMPT, [[small_llm.VOCABULARY]])
    with pytest.raises(ValueError, match="prompt: got 0 tokens"):
        llm.score([], [[5]])
    with pytest.raises(TypeError, match="continuations: got ' value', expected a list"):
        llm.score(PROMPT, " value")
    with pytest.raises(TypeError, match="continuations: got 5, expected text or token ids"):
        llm.score(PROMPT, [5, 6])
    with pytest.raises(ValueError, match="logprobs: got -1, expected an integer of at least 0"):
        llm.generate(PROMPT, logprobs=-1)


def test_a_score_can_be_cancelled(llm):
    for answers in ([True], [False, True]):
        left = iter(answers)
        with pytest.raises(CancelledError, match="score: it was cancelled"):
            llm.score(PROMPT, [[5] * 900], logprobs=1, is_cancelled=lambda: next(left, True))
        assert llm.stats.running == llm.stats.waiting == 0
    (score,) = llm.score(PROMPT, [[300, 301]])
    assert score.logprobs == pytest.approx(expected_logprobs(PROMPT, [300, 301])[[0, 1], [300, 301]].tolist(), abs=1e-4)


def test_a_cancelled_score_ends_within_a_call(llm):
    """A program with `verify` scores in chunks, and others a token in each call. The row keeps the tokens of a call."""
    scored, asked = [6, *[9] * 300], iter([False, True])
    is_cancelled = (lambda: True) if llm.program.has_verify else (lambda: next(asked, True))
    with pytest.raises(CancelledError):
        llm.score(scored[:1], [scored[1:]], is_cancelled=is_cancelled)
    assert llm.stats.running == llm.stats.waiting == 0
    assert llm.generate(scored, max_new_tokens=1).result().metrics.cached_tokens <= 2 * SCORED_AT_ONCE
    llm.score(scored[:1], [scored[1:]])
    assert llm.generate(scored, max_new_tokens=1).result().metrics.cached_tokens >= 299
