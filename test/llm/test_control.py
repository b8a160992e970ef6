"""`LLM.prefill`, `clone`, `logits`, `suspend`, `resume` and `release_memory`."""

import pytest
import small_llm
from executorch_mlx.llm import LLM
from executorch_mlx.llm.errors import PromptLengthError

PROMPT = list(range(100, 100 + 2 * small_llm.CHUNK + 5))
SAMPLED = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return small_llm.shared(tmp_path_factory, "control", batch=2, outputs="both")


def cached(llm, prompt) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many tokens of its prompt were in the cache."""
    answer = llm.generate(prompt, **SAMPLED).result()
    return answer.tokens, answer.metrics.cached_tokens


def test_prefill_and_clone(path):
    prompts = [[*PROMPT, 7], [*PROMPT, 9]]
    with LLM.load(path) as llm:
        expected = [cached(llm, prompt)[0] for prompt in prompts]
    with LLM.load(path) as llm:
        llm.prefill(PROMPT)
        llm.clone(PROMPT)
        assert [cached(llm, prompt) for prompt in prompts] == [(tokens, len(PROMPT)) for tokens in expected]
        with pytest.raises(PromptLengthError):
            llm.prefill([])


def test_logits(path):
    with LLM.load(path) as llm:
        logits = llm.logits(PROMPT)
        assert len(logits) == llm.program.vocab_size
        [first] = llm.generate(PROMPT, max_new_tokens=1, ignore_eos=True).result().tokens
        assert logits.index(max(logits)) == first


def test_suspended_model_waits_and_its_memory_can_be_freed(path):
    with LLM.load(path) as llm:
        expected = llm.generate(PROMPT, **SAMPLED).result().tokens
        llm.suspend()
        answer = llm.generate(PROMPT, **SAMPLED)
        assert llm.stats.generated_tokens == len(expected)
        llm.release_memory()
        llm.resume()
        assert answer.result().tokens == expected
