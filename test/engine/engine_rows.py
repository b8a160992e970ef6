"""Small language models with a whole head, and requests to them, for several tests of the engine."""

import random

import c_api as api
import pytest

ROWS = 4
HISTORY = 16
SETTINGS = [
    {},
    {"temperature": 0.9, "seed": 3, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "seed": 2**40, "min_p": 0.02, "repetition_penalty": 1.4, "logit_bias": {7: 2.0, 9: -3.0}},
    {"temperature": 0.7, "seed": -5, "allowed_tokens": lambda answer: range(len(answer) % 3, 1536, 3)},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
]
RANDOM = random.Random(5)
PROMPTS = [[RANDOM.randrange(2, 1500) for _ in range(length)] for length in (1, 3, 16, 17, 40, 100, 33, 5)]
LONG = [RANDOM.randrange(2, 1500) for _ in range(200)]
REQUESTS = [(prompt, SETTINGS[i % len(SETTINGS)]) for i, prompt in enumerate(PROMPTS + PROMPTS[::-1])]


def export(tmp_path_factory, name: str, **options):
    import small_llm
    from executorch_mlx.llm.export import HeadConfig

    head = HeadConfig(penalties=HISTORY, logit_bias=2, allowed_tokens=True, logprobs=3)
    return small_llm.shared(tmp_path_factory, name, head=head, **{"speculation": True} | options)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A program with ROWS rows."""
    return export(tmp_path_factory, "engine_rows", batch=ROWS)


@pytest.fixture(scope="module")
def one_row(tmp_path_factory):
    return export(tmp_path_factory, "engine_one_row", outputs="both")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A program with two rows and a sliding window of 24 positions. Its ring buffers have room for a chunk too."""
    return export(tmp_path_factory, "engine_windowed", batch=2, sliding_window=24)


def options_of(settings: dict, **more) -> dict:
    return settings | {"max_new_tokens": 20, "ignore_eos": True} | more


def answer(engine, prompt, **options) -> tuple[list[int], int]:
    """Return the answer, and the number of prompt tokens that were reused."""
    with engine.submit(prompt, **options_of({"temperature": 0.8, "seed": 1}, **options)) as request:
        assert request.wait() and request.finish != api.FINISH_ERROR, request.error
        return request.tokens, request.info.reused_tokens
