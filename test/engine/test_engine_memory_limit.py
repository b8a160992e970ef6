"""Calls beyond the memory limit: they are divided, or end their requests only."""

import c_api as api
import pytest
from engine_rows import LONG, export, options_of, path  # noqa: F401 (fixture)


def test_memory_limit_ends_the_requests_of_the_step(path):
    from executorch_mlx import memory

    with api.Engine(path) as engine:
        engine.generate([5], max_new_tokens=2, ignore_eos=True)
        before = memory.set_memory_limit(memory.get_active_memory() + 1000)
        try:
            with engine.submit(LONG, max_new_tokens=2) as request:
                assert request.wait() and request.finish == api.FINISH_ERROR
                assert request.info.status == api.OUT_OF_MEMORY and "memory limit" in request.error
        finally:
            memory.set_memory_limit(before)
        assert engine.generate(LONG, max_new_tokens=2, ignore_eos=True)


def test_draft_beyond_the_memory_limit_ends_no_answer(path):
    """`verify` computes the logits of all its tokens, and needs more memory than the other methods."""
    from executorch_mlx import memory

    pattern = [4, 5, 6, 7]
    options = options_of({"allowed_tokens": lambda answer: [pattern[len(answer) % 4]]})
    with api.Engine(path) as engine:
        expected = engine.generate(pattern * 4, **options, draft=0)
        assert engine.generate(pattern * 4, **options, draft=15) == expected
        before = memory.set_memory_limit(memory.get_active_memory() + 80_000)
        try:
            for draft in (0, 15, -1):
                with engine.submit(pattern * 4, **options, draft=draft) as request:
                    assert request.wait() and (request.tokens, request.error) == (expected, "")
        finally:
            memory.set_memory_limit(before)


@pytest.mark.parametrize("overlap", [0, 1])
def test_step_of_several_rows_beyond_the_memory_limit_is_divided(path, overlap):
    from executorch_mlx import memory

    options = options_of({"temperature": 1, "seed": 3, "top_k": 20}, draft=0)
    with api.Engine(path, chunk=1, overlap=overlap) as engine:

        def answers() -> list[list[int]]:
            requests = [engine.submit([token, 6], **options) for token in (5, 7, 9, 11)]
            tokens = [request.tokens if request.wait() and not request.error else None for request in requests]
            for request in requests:
                request.free()
            return tokens

        expected = answers()
        before = memory.set_memory_limit(memory.get_active_memory() + 40_000)  # has room for a call of one row
        try:
            assert answers() == expected
        finally:
            memory.set_memory_limit(before)


@pytest.mark.parametrize("window", ["auto", 24])
def test_chunk_beyond_the_memory_limit_is_divided(tmp_path_factory, window):
    """A chunk of 256 tokens needs more than 600,000 bytes. With ring buffers, a row cannot go back by a whole chunk."""
    from executorch_mlx import memory

    path = export(tmp_path_factory, f"engine_chunk_{window}", chunk=256, sliding_window=window)
    prompt, targets, options = LONG * 3, LONG[:60], options_of({"temperature": 1, "seed": 3, "top_k": 20})
    with api.Engine(path, reuse_prompts=False) as engine:
        expected = engine.generate(prompt, **options), engine.score(LONG, targets)
        for room in (600_000, 200_000, 100_000):
            before = memory.set_memory_limit(memory.get_active_memory() + room)
            try:
                with engine.submit(prompt, **options) as request:
                    assert request.wait() and (request.tokens, request.error) == (expected[0], "")
                assert engine.score(LONG, targets) == expected[1]
            finally:
                memory.set_memory_limit(before)


def test_overlapped_step_of_several_rows_beyond_the_memory_limit_is_divided(tmp_path_factory):
    """The limit is set while a step of both rows is pending. The ring buffers can go back by one position only.

    The rows go on with the tokens of the pending step, and know afterwards which tokens they hold. How much memory a
    step of one row and of two rows takes depends on the processor, so the test raises the limit until steps of one row
    have room and steps of two rows do not. Below and above this limit, the answers are errors or right, too.
    """
    from executorch_mlx import memory

    path = export(tmp_path_factory, "engine_short_ring", batch=2, sliding_window=24, chunk=2, speculation=False)
    options = options_of({"temperature": 1, "seed": 3, "top_k": 20}, draft=0, max_new_tokens=100)
    prompts = [LONG[:40], LONG[40:80]]
    before = memory.set_memory_limit(None)
    for room in range(0, 60_000, 2_000):
        with api.Engine(path, overlap=1) as engine:

            def limit(request, room=room):
                if len(request.events) == 2:  # the first token of a step for both rows
                    memory.set_memory_limit(idle + room)

            expected = [engine.generate(prompt, **options) for prompt in prompts]
            steps, idle = engine.stats().steps, memory.get_active_memory()
            requests = [engine.submit(prompts[0], **options), engine.submit(prompts[1], limit, **options)]
            try:
                assert all(request.wait() for request in requests)
                assert all("memory limit" in request.error for request in requests if request.error)
                answered = not any(request.error for request in requests)
                assert not answered or [request.tokens for request in requests] == expected
            finally:
                memory.set_memory_limit(before)
                for request in requests:
                    request.free()
            for prompt, tokens in zip(prompts, expected, strict=True) if answered else ():
                with engine.submit([*prompt, *tokens, 5], max_new_tokens=1) as request:
                    assert request.wait() and request.info.reused_tokens == len(prompt) + len(tokens) - 1
            if answered and engine.stats().steps - steps > 150:  # almost all steps are for one row
                return
    pytest.fail("no limit had room for steps of one row only")


def test_draft_beyond_the_memory_limit_does_not_end_another_answer(path, capfd):
    """`verify` fails behind updates in place, so that all buffers are undefined.

    The engine resets them, and both requests read prompt and answer again.
    """
    from executorch_mlx import memory

    pattern = [4, 5, 6, 7]
    drafted = options_of({"allowed_tokens": lambda answer: [pattern[len(answer) % 4]]}, draft=15)
    plain = options_of({"temperature": 1, "seed": 3, "top_k": 20}, draft=0, max_new_tokens=40)
    later = []
    with api.Engine(path) as engine:
        expected = [engine.generate(LONG[:30], **plain), engine.generate(pattern * 4, **drafted)]

        def limit(request):
            if len(request.events) == 3:
                memory.set_memory_limit(memory.get_active_memory() + 80_000)
                later.append(engine.submit(pattern * 4, **drafted))

        before = memory.set_memory_limit(None)
        capfd.readouterr()
        try:
            with engine.submit(LONG[:30], limit, **plain) as first:
                assert first.wait() and later[0].wait()
                assert [(r.tokens, r.error) for r in (first, later[0])] == [(tokens, "") for tokens in expected]
        finally:
            memory.set_memory_limit(before)
            for request in later:
                request.free()
    assert "undefined now" in capfd.readouterr().err
