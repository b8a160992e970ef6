"""Overlap: the engine submits a step before it reads the tokens of the previous step.

On a CPU, the engine overlaps steps only if the caller asks for it.
"""

import math
import threading

import c_api as api
import pytest
from executorch_mlx import memory

SETTINGS = {"max_new_tokens": 12, "ignore_eos": True, "draft": 0}
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    import small_llm
    from executorch_mlx.llm.export import HeadConfig

    return small_llm.shared(
        tmp_path_factory, "engine_overlap", head=HeadConfig(penalties=16, allowed_tokens=True, logprobs=3), batch=2
    )


@pytest.fixture(scope="module")
def expected(path):
    with api.Engine(path, overlap=0) as engine:
        return engine.generate(PROMPT, **SETTINGS)


def test_overlap_is_minus_one_zero_or_one(path):
    with pytest.raises(api.ApiError, match="overlap: got 2, expected -1, 0 or 1"):
        api.Engine(path, overlap=2)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_stop_id_costs_one_discarded_step(path, expected, overlap):
    """The discarded step writes one position behind the answer, which does not change later answers."""
    end = expected.index(expected[5])  # where that token occurs first
    with api.Engine(path, overlap=overlap) as engine:
        assert engine.generate(PROMPT, **SETTINGS, stop_ids=[expected[end]]) == expected[:end]
        assert engine.generate(PROMPT, **SETTINGS) == expected
        # Each answer takes a step for each drawn token. The stop id is drawn too. With overlap, one step is discarded.
        assert engine.stats().steps == end + 1 + overlap + len(expected)
        assert engine.stats().reused_tokens == len(PROMPT) - 1
        assert engine.generate([*PROMPT, *expected[:6]], **SETTINGS)[:6] == expected[6:]


def test_no_step_follows_the_last_token(path, expected):
    with api.Engine(path, overlap=1) as engine:
        assert engine.generate(PROMPT, **SETTINGS) == expected
        assert engine.stats().steps == len(expected)


def test_cancelled_request_leaves_the_others_alone(path, expected):
    with api.Engine(path, overlap=1) as engine:
        first = engine.submit(PROMPT, on_event=lambda request: len(request.events) < 4, **SETTINGS)
        second = engine.submit(PROMPT[:30], **SETTINGS)
        third = engine.submit(PROMPT, **SETTINGS)
        assert all(request.wait() for request in (first, second, third))
        assert (first.finish, first.tokens) == (api.CANCELLED, expected[:4])
        assert second.tokens == engine.generate(PROMPT[:30], **SETTINGS)
        assert third.tokens == expected
        for request in (first, second, third):
            request.free()


@pytest.mark.parametrize("same", [0, 20])
def test_a_prompt_is_submitted_before_the_token_after_the_previous_one_is_read(path, same):
    """A prompt that begins like the previous one waits for it, because it reuses its row."""
    prompts = [PROMPT, [*PROMPT[:same], *reversed(PROMPT[same:])]]
    with api.Engine(path, overlap=0) as engine:
        expected = [engine.generate(prompt, **SETTINGS) for prompt in prompts]
    opened, running = threading.Event(), []
    with api.Engine(path, overlap=1, chunk_seconds=math.inf) as engine:
        gate = engine.submit([1], lambda _: opened.wait(60), max_new_tokens=1)
        requests = [
            engine.submit(prompt, lambda _: running.append(engine.stats().running), **SETTINGS) for prompt in prompts
        ]
        opened.set()
        assert all(request.wait() for request in (gate, *requests))
        assert [request.tokens for request in requests] == expected
        assert requests[1].info.reused_tokens == same
        assert running[0] == 2
        for request in (gate, *requests):
            request.free()


def test_a_step_is_submitted_before_the_token_after_the_prompt_is_read(path, expected):
    with api.Engine(path, overlap=1, chunk_seconds=math.inf) as engine:
        assert engine.generate(PROMPT, **SETTINGS, stop_ids=[expected[0]]) == []
        assert engine.generate(PROMPT, **SETTINGS) == expected
        assert engine.stats().steps == 2 + len(expected)  # a draw of the stop id, and a discarded one


@pytest.mark.parametrize("settings", [{"logprobs": 3}, {"allowed_tokens": lambda answer: range(100, 1500)}])
def test_log_probabilities_and_masks(path, settings):
    def run(overlap):
        with api.Engine(path, overlap=overlap) as engine, engine.submit(PROMPT, **SETTINGS, **settings) as request:
            assert request.wait()
            return request.tokens, request.logprobs, engine.stats().steps

    assert run(overlap=1) == run(overlap=0)


def test_minimum(path, expected):
    """Steps overlap once the answer is long enough."""

    def run(overlap, **settings):
        with api.Engine(path, overlap=overlap) as engine:
            return engine.generate(PROMPT, **SETTINGS, stop_ids=expected[2:4], **settings), engine.stats().steps

    tokens, steps = run(overlap=0, min_new_tokens=6)
    assert len(tokens) >= 6 and not {*expected[2:4]} & {*tokens} and run(overlap=0)[0] == expected[:2]
    ended = len(tokens) < SETTINGS["max_new_tokens"]
    assert run(overlap=1, min_new_tokens=6) == (tokens, steps + ended)


def test_failed_step_ends_the_request_after_the_tokens_before_it(path, expected):
    """A memory limit that is set during the answer lets the next step fail. What the row holds stays valid."""

    def limit(request):
        if len(request.events) == 3:
            memory.set_memory_limit(1)

    with api.Engine(path, overlap=1) as engine:
        try:
            with engine.submit(PROMPT, on_event=limit, **SETTINGS) as request:
                assert request.wait()
                assert request.finish == api.FINISH_ERROR and request.info.status == api.OUT_OF_MEMORY
                # One step was submitted before the limit was set.
                assert [token for token, *_ in request.events if token >= 0] == expected[:4]
                assert "the limit is 1 bytes" in request.error
        finally:
            memory.set_memory_limit(None)
        assert engine.generate(PROMPT, **SETTINGS) == expected


def test_memory_limit_changes_nothing_else(path, expected):
    memory.set_memory_limit(1 << 30)
    try:
        with api.Engine(path, overlap=1) as engine:
            assert engine.generate(PROMPT, **SETTINGS) == expected
    finally:
        memory.set_memory_limit(None)
