"""Many prompts: side by side, one after the other, and classified."""

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
def rows(rows_program) -> LLM:
    return LLM.load(rows_program)


@pytest.mark.parametrize("of", ["single", "rows"])
def test_every_prompt_has_its_answer_or_its_error(of, request, single):
    llm = request.getfixturevalue(of)
    results = llm.generate_batch(PROMPTS, max_new_tokens=9)
    assert len(results) == len(PROMPTS)
    for prompt, result in zip(PROMPTS, results):
        if not 0 < len(prompt) <= small_llm.CONTEXT:
            assert str(result.error) == f"the prompt has {len(prompt)} tokens, expected 1 to {small_llm.CONTEXT}"
            assert result.tokens == [] and result.finish is None
            continue
        alone = single.generate(prompt, max_new_tokens=9).result()
        assert result.error is None
        assert (result.tokens, result.text, result.finish) == (alone.tokens, alone.text, alone.finish)
        assert result.metrics.prompt_tokens == len(prompt)
        assert result.metrics.generated_tokens == 9


def test_texts(rows, single):
    results = rows.generate_batch(TEXTS, max_new_tokens=6)
    assert [type(result.error) for result in results] == [type(None), type(None), PromptLengthError, type(None)]
    assert results[3].text == single.generate(TEXTS[3], max_new_tokens=6).result().text


def test_rows_end_apart(rows, single):
    """A row that has ended does not end the others, and its answer does not go on."""
    whole = [single.generate(prompt, max_new_tokens=12).result().tokens for prompt in (LONG, [5, 6, 7])]
    stop = next(token for token in whole[0] if token not in whole[1])
    results = rows.generate_batch([LONG, [5, 6, 7]], max_new_tokens=12, stop_ids=[stop])
    assert results[0].tokens == whole[0][: whole[0].index(stop)] and results[0].finish == "stop"
    assert results[1].tokens == whole[1] and results[1].finish == "length"


def test_the_context_ends_rows(rows):
    (short, long) = rows.generate_batch([[5], [5] * (small_llm.CONTEXT - 2)], ignore_eos=True)
    assert (long.finish, len(long.tokens)) == ("context", 3)
    # They stand side by side: the short one has the room of the long one.
    assert (short.finish, len(short.tokens)) == ("context", 3)


def test_a_program_of_rows_answers_single_prompts(rows, single):
    rows.generate_batch([[1, 2], [3, 4]], max_new_tokens=2)
    for prompt in ([1, 2, 3], LONG):
        expected = single.generate(prompt, max_new_tokens=8).result().tokens
        assert rows.generate(prompt, max_new_tokens=8).result().tokens == expected


def test_settings_of_a_batch(rows, single):
    with pytest.raises(SettingError, match="max_new_tokens"):
        rows.generate_batch([[1]], max_new_tokens=0)
    same = single.generate_batch([[5, 6], [5, 6]], temperature=1.0, seed=3, max_new_tokens=10)
    assert same[0].tokens == same[1].tokens  # one after the other: each as if alone
    apart = rows.generate_batch([[5, 6], [5, 6], [5, 6]], temperature=1.0, max_new_tokens=10)
    assert len({tuple(result.tokens) for result in apart}) == 3


# Labels --------------------------------------------------------------------------------


def shares(llm: LLM, prompt: list[int]) -> list[float]:
    """The probability of each label by transformers."""
    scores = []
    for label in LABELS:
        ids = llm.encode(label, special=False)
        with torch.no_grad():
            logits = small_llm.model()(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
        scores.append(sum(logits[place, token] for place, token in zip(places, ids)))
    return torch.stack(scores).softmax(-1).tolist()


def test_labels_by_their_probabilities(single):
    assert max(len(single.encode(label, special=False)) for label in LABELS) == 3
    found = single.classify([LONG, [], [5, 6]], LABELS)
    for prompt, one in zip((LONG, None, [5, 6]), found):
        if prompt is None:
            assert str(one.error) == f"the prompt has 0 tokens, expected 1 to {small_llm.CONTEXT - 2}"
            continue
        expected = shares(single, prompt)
        assert one.label == LABELS[expected.index(max(expected))]
        assert list(one.probabilities) == LABELS
        assert list(one.probabilities.values()) == pytest.approx(expected, abs=1e-4)


def test_labels_by_the_head_alone(chat_program, single):
    llm = LLM.load(chat_program)
    llm.program.has_logits = False
    labels = [" value", " name", " number"]
    (found,) = llm.classify([LONG], labels)
    (told,) = single.classify([LONG], labels)
    assert found.label == told.label and found.probabilities is None
    with pytest.raises(ValueError, match="some begin with the same token"):
        llm.classify([LONG], LABELS)


def test_labels_that_cannot_be_told_apart(single, rows):
    with pytest.raises(ValueError, match="expected two or more"):
        single.classify([LONG], [" value"])
    with pytest.raises(ValueError, match="expected different ones"):
        single.classify([LONG], [" value", " value"])
    with pytest.raises(ValueError, match="rows.pte gives neither logits nor takes allowed_tokens"):
        rows.classify([LONG], LABELS)
