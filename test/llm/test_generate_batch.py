"""`LLM.generate_batch`, with programs of one row and of several rows, and `LLM.classify`."""

import pytest
import small_llm
import torch
from executorch_mlx.llm import LLM, PromptLengthError, SettingError

LONG = list(range(100, 100 + 2 * small_llm.CHUNK + 3))
PROMPTS = [[5, 6, 7], LONG, [], [900], [3] * (small_llm.CONTEXT + 1), [8, 9], LONG[:20]]
TEXTS = ["Return the", "", "a " * small_llm.CONTEXT, "This class"]
LABELS = [" value", " the name", " the number of"]


@pytest.fixture(scope="module")
def single(chat_program) -> LLM:
    return LLM.load(chat_program)


@pytest.fixture(scope="module")
def batched(batch_program) -> LLM:
    return LLM.load(batch_program)


@pytest.mark.parametrize("fixture", ["single", "batched"])
def test_each_prompt_has_an_answer_or_an_error(fixture, request, single):
    llm = request.getfixturevalue(fixture)
    results = llm.generate_batch(PROMPTS, max_new_tokens=9)
    assert len(results) == len(PROMPTS)
    for prompt, result in zip(PROMPTS, results):
        if not 0 < len(prompt) <= small_llm.CONTEXT:
            assert str(result.error) == f"prompt: got {len(prompt)} tokens, expected 1 to {small_llm.CONTEXT}"
            assert result.tokens == [] and result.finish is None
            continue
        alone = single.generate(prompt, max_new_tokens=9).result()
        assert result.error is None
        assert (result.tokens, result.text, result.finish) == (alone.tokens, alone.text, alone.finish)
        assert result.metrics.prompt_tokens == len(prompt)
        assert result.metrics.generated_tokens == 9


def test_text_prompts(batched, single):
    results = batched.generate_batch(TEXTS, max_new_tokens=6)
    assert [type(result.error) for result in results] == [type(None), type(None), PromptLengthError, type(None)]
    for index in (0, 1, 3):
        alone = single.generate(TEXTS[index], max_new_tokens=6).result()
        assert len(alone.tokens) > 0 and (results[index].tokens, results[index].text) == (alone.tokens, alone.text)


def test_sequences_end_independently(batched, single):
    whole = [single.generate(prompt, max_new_tokens=12).result().tokens for prompt in (LONG, [5, 6, 7])]
    stop = next(token for token in whole[0] if token not in whole[1])
    results = batched.generate_batch([LONG, [5, 6, 7]], max_new_tokens=12, stop_ids=[stop])
    assert results[0].tokens == whole[0][: whole[0].index(stop)] and results[0].finish == "stop"
    assert results[1].tokens == whole[1] and results[1].finish == "length"


def test_prompts_with_only_the_first_token_in_common_keep_their_rows(batch_program):
    prompts = [[small_llm.BOS, *range(start, start + 60)] for start in (100, 200, 300)]
    with LLM.load(batch_program) as llm:
        llm.generate_batch(prompts, max_new_tokens=1)
        again = [llm.generate([*prompt, 7], max_new_tokens=1).result() for prompt in prompts]
    assert [answer.metrics.cached_tokens for answer in again] == [61, 61, 61]


def test_full_context_ends_one_answer(batched):
    (short, long) = batched.generate_batch([[5], [5] * (small_llm.CONTEXT - 2)], ignore_eos=True, max_new_tokens=20)
    assert (long.finish, len(long.tokens)) == ("context", 3)
    assert (short.finish, len(short.tokens)) == ("length", 20)


def test_batched_program_answers_single_prompts(batched, single):
    batched.generate_batch([[1, 2], [3, 4]], max_new_tokens=2)
    for prompt in ([1, 2, 3], LONG):
        expected = single.generate(prompt, max_new_tokens=8).result().tokens
        assert len(expected) == 8 and batched.generate(prompt, max_new_tokens=8).result().tokens == expected


def test_sampling_of_a_batch(batched, single):
    with pytest.raises(SettingError, match="max_new_tokens"):
        batched.generate_batch([[1]], max_new_tokens=0)
    options = {"temperature": 1.0, "max_new_tokens": 10, "ignore_eos": True}
    alone = single.generate([5, 6], seed=3, **options).result().tokens
    results = single.generate_batch([[5, 6], [5, 6]], seed=3, **options)
    assert [result.tokens for result in results] == [alone, alone] and len(alone) == 10
    # Without the argument `seed`, each answer has a seed of its own.
    results = batched.generate_batch([[5, 6], [5, 6], [5, 6]], **options)
    assert len({tuple(result.tokens) for result in results}) == 3


# Labels --------------------------------------------------------------------------------


def expected_probabilities(llm: LLM, prompt: list[int]) -> list[float]:
    """The probability of each label, computed by transformers."""
    scores = []
    for label in LABELS:
        ids = llm.encode(label, special=False)
        with torch.no_grad():
            logits = small_llm.model()(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        positions = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
        scores.append(sum(logits[position, token] for position, token in zip(positions, ids)))
    return torch.stack(scores).softmax(-1).tolist()


def test_label_probabilities_match_transformers(single):
    assert max(len(single.encode(label, special=False)) for label in LABELS) == 3
    long, empty, short = single.classify([LONG, [], [5, 6]], LABELS)
    assert str(empty.error) == f"prompt: got 0 tokens, expected 1 to {small_llm.CONTEXT - 2}"
    for prompt, result in ((LONG, long), ([5, 6], short)):
        expected = expected_probabilities(single, prompt)
        assert result.error is None
        assert result.label == LABELS[expected.index(max(expected))]
        assert list(result.probabilities) == LABELS
        assert list(result.probabilities.values()) == pytest.approx(expected, abs=1e-4)


def test_classify_with_the_head_only(mask_program, single):
    llm = LLM.load(mask_program)
    labels = [" value", " name", " number"]
    (found,) = llm.classify([LONG], labels)
    (expected,) = single.classify([LONG], labels)
    assert found.label == expected.label and found.probabilities is None
    with pytest.raises(ValueError, match="expected different first tokens"):
        llm.classify([LONG], LABELS)
    with pytest.raises(ValueError, match="score: mask.pte returns neither logits nor log probabilities"):
        llm.score([5], [[6]])


def test_single_elements_in_place_of_lists(single):
    for prompts in ("text", b"text", {"prompt": "text"}):
        with pytest.raises(TypeError, match=r"^prompts: got .*text.*, expected a list"):
            single.generate_batch(prompts)
    with pytest.raises(TypeError, match="^prompt: got 7, expected text or token ids"):
        single.generate_batch([7, 8])
    with pytest.raises(TypeError, match="^prompts: got 'text', expected a list"):
        single.classify("text", LABELS)
    with pytest.raises(TypeError, match="^labels: got 'ab', expected a list"):
        single.classify(["text"], "ab")


def test_label_errors(single, batched):
    with pytest.raises(ValueError, match="expected at least two non-empty labels"):
        single.classify([LONG], [" value"])
    with pytest.raises(ValueError, match="expected different labels"):
        single.classify([LONG], [" value", " value"])
    with pytest.raises(
        ValueError, match="batch.pte neither returns logits or log probabilities nor takes allowed_tokens"
    ):
        batched.classify([LONG], LABELS)
