"""The token law on a small model.

Other requests, chunk sizes, prompt reuse and speculation do not change the tokens of a request.
"""

import math
import os
import random
import shutil
import struct
import threading
import time

import c_api as api
import pytest
import torch

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


@pytest.fixture(scope="module")
def alone(path):
    """The answers to REQUESTS, generated one after the other, without speculation and prompt reuse."""
    with api.Engine(path, reuse_prompts=False) as engine:
        return [engine.generate(prompt, **options_of(settings, draft=0)) for prompt, settings in REQUESTS]


@pytest.mark.parametrize(
    ("engine_options", "request_options"),
    [
        ({}, {}),
        ({"reuse_prompts": False}, {"draft": 0}),
        ({"chunk": 3}, {"draft": 0}),
        ({"chunk": 7, "chunk_seconds": 1e-9}, {"draft": 5}),
        ({"overlap": 1}, {}),
        ({"overlap": 1, "chunk": 3}, {"draft": 0}),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_other_requests(path, alone, engine_options, request_options):
    with api.Engine(path, **engine_options) as engine:
        requests = [engine.submit(prompt, **options_of(settings, **request_options)) for prompt, settings in REQUESTS]
        for request in requests:
            assert request.wait(), request.error
        assert [request.tokens for request in requests] == alone
        for request in requests:
            request.free()


def test_short_prompts_are_read_without_a_step_between_them(path):
    draws, all_wait = [], threading.Event()

    def allowed_tokens(index):
        def allowed(answer):
            draws.append((index, len(answer)))
            return all_wait.wait(60) and range(2, 100)

        return allowed

    with api.Engine(path, chunk_seconds=1e6) as engine:
        options = {"max_new_tokens": 2, "ignore_eos": True}
        requests = [engine.submit([7, 8, 9], allowed_tokens=allowed_tokens(i), **options) for i in range(ROWS)]
        all_wait.set()
        for request in requests:
            assert request.wait() and request.finish != api.FINISH_ERROR, request.error
            request.free()
    assert draws[:ROWS] == [(i, 0) for i in range(ROWS)]


@pytest.mark.parametrize("draft", [0, -1, 1, 7])
def test_program_with_one_row_draws_the_same(one_row, alone, draft):
    with api.Engine(one_row) as engine:
        assert [engine.generate(p, **options_of(settings, draft=draft)) for p, settings in REQUESTS] == alone


def test_host_draws_what_the_head_draws(tmp_path_factory, alone):
    """The program returns logits of all rows, and no tokens."""
    import small_llm

    path = small_llm.shared(tmp_path_factory, "engine_logits", outputs="logits", batch=ROWS)
    with api.Engine(path) as engine:
        requests = [engine.submit(prompt, **options_of(settings)) for prompt, settings in REQUESTS]
        for request, expected, (_, settings) in zip(requests, alone, REQUESTS, strict=True):
            assert request.wait(), request.error
            # Without a head, the penalties count all tokens, and not only the last HISTORY. Those answers may differ.
            if not any(name.endswith("penalty") for name in settings):
                assert request.tokens == expected
            request.free()


# -- prompt reuse ----------------------------------------------------------------------

LONG = [RANDOM.randrange(2, 1500) for _ in range(200)]


def answer(engine, prompt, **options) -> tuple[list[int], int]:
    """Return the answer, and the number of prompt tokens that were reused."""
    with engine.submit(prompt, **options_of({"temperature": 0.8, "seed": 1}, **options)) as request:
        assert request.wait() and request.finish != api.FINISH_ERROR, request.error
        return request.tokens, request.info.reused_tokens


@pytest.fixture(scope="module")
def cold(path):
    """`cold(prompt)` returns the answer without prompt reuse."""

    def run(prompt):
        with api.Engine(path, reuse_prompts=False) as engine:
            tokens, reused = answer(engine, prompt)
            assert reused == 0
            return tokens

    return run


def test_conversation_continues_its_row(path, cold):
    with api.Engine(path) as engine:
        first, _ = answer(engine, LONG)
        turn = [*LONG, *first, 5, 6]
        second, reused = answer(engine, turn)
        assert second == cold(turn) and reused == len(LONG) + len(first) - 1
        # The same prompt again: only its last token is computed.
        assert answer(engine, turn) == (second, len(turn) - 1)


def test_rows_in_use_are_copied(path, cold):
    prompts = [[*LONG, 5 + i] for i in range(6)]
    with api.Engine(path) as engine:
        requests = [engine.submit(p, **options_of({"temperature": 0.8, "seed": 1})) for p in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.wait()
            assert request.tokens == cold(prompt)
        assert [request.info.reused_tokens for request in requests] == [0] + [200] * 5
        for request in requests:
            request.free()
        assert engine.stats().reused_tokens == 1000


def test_short_prompt_does_not_replace_a_longer_row_that_starts_with_it(path):
    with api.Engine(path) as engine:
        first, _ = answer(engine, LONG)
        _, reused = answer(engine, LONG[:50])  # copied to another row
        assert reused == 49
        assert answer(engine, LONG) == (first, 199)


def test_least_recently_used_row_is_replaced_first(path):
    others = [[RANDOM.randrange(2, 1500) for _ in range(30)] for _ in range(ROWS)]
    with api.Engine(path) as engine:
        for prompt in (LONG, *others[:3]):
            answer(engine, prompt)
        assert answer(engine, LONG)[1] == 199
        answer(engine, others[3])  # replaces others[0]
        assert [answer(engine, prompt)[1] for prompt in (LONG, others[1], others[2], others[3])] == [199, 29, 29, 29]


def test_ring_buffers_rewind_as_far_as_they_can(windowed):
    with api.Engine(windowed, reuse_prompts=False) as engine:
        expected = [answer(engine, prompt)[0] for prompt in (LONG, LONG[:150], [*LONG, 7])]
    with api.Engine(windowed) as engine:
        rewind = engine.loaded_model.get_int("get_max_rewind")
        assert 0 < rewind < 50
        assert answer(engine, LONG) == (expected[0], 0)
        assert answer(engine, LONG[:150]) == (expected[1], 0)
        assert answer(engine, LONG[:150]) == (expected[1], 149 if rewind >= 20 else 0)
        tokens, reused = answer(engine, [*LONG, 7])
        assert tokens == expected[2] and reused in (0, 200)


@pytest.mark.parametrize("draft", [0, 3, 15])
def test_ring_buffers_and_speculation(windowed, draft):
    with api.Engine(windowed, reuse_prompts=False) as engine:
        plain = [engine.generate(p, **options_of(s, draft=0, max_new_tokens=60)) for p, s in REQUESTS[:5]]
    with api.Engine(windowed) as engine:
        requests = [engine.submit(p, **options_of(s, draft=draft, max_new_tokens=60)) for p, s in REQUESTS[:5]]
        for request in requests:
            assert request.wait()
        assert [request.tokens for request in requests] == plain
        for request in requests:
            request.free()


@pytest.mark.parametrize("draft_model", ["itself", "ring buffers", "one row"])
def test_draft_model_changes_nothing(path, one_row, windowed, alone, draft_model):
    """The draft model has the same weights. With a window of 24 positions it often guesses wrong."""
    draft = {"itself": path, "ring buffers": windowed, "one row": one_row}[draft_model]
    model = api.Model(path, draft=str(draft).encode())
    with api.Engine(model) as engine:
        for length in (4, -1):
            requests = [engine.submit(p, **options_of(s, draft=length)) for p, s in REQUESTS]
            for request in requests:
                assert request.wait(), request.error
            assert [request.tokens for request in requests] == alone
            if length > 0:
                drafted = sum(request.info.drafted_tokens for request in requests)
                accepted = sum(request.info.accepted_tokens for request in requests)
                assert drafted > 30 and accepted > (0.95 * drafted if draft_model == "itself" else 0)
            for request in requests:
                request.free()
    model.free()


# -- prompt caches on disk ---------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(path, tmp_path_factory):
    """The file of the saved prefix LONG."""
    file = tmp_path_factory.mktemp("prefix") / "long.cache"
    with api.Engine(path) as engine:
        engine.save_prefix(LONG, file)
    assert [each.name for each in file.parent.iterdir()] == ["long.cache"]
    return file


@pytest.mark.parametrize("name", ["path", "one_row", "windowed"])
def test_loaded_prefix_gives_the_answer_of_a_cold_run(request, tmp_path, name):
    path = request.getfixturevalue(name)
    with api.Engine(path, reuse_prompts=False) as engine:
        expected = answer(engine, [*LONG, 5])[0]
    with api.Engine(path) as engine:
        engine.save_prefix(LONG, tmp_path / "x.cache")
    with api.Engine(path) as engine:
        answer(engine, LONG[50:])
        assert engine.load_prefix(tmp_path / "x.cache") == 200
        assert answer(engine, [*LONG, 5]) == (expected, 200)


def test_prefix_is_saved_while_an_answer_runs(path, saved, tmp_path):
    with api.Engine(path) as engine, engine.submit([3], max_new_tokens=500, ignore_eos=True) as running:
        engine.save_prefix(LONG, tmp_path / "second.cache")
        running.cancel()
    first, second = saved.read_bytes(), (tmp_path / "second.cache").read_bytes()
    assert first == second


def test_steps_of_an_answer_run_while_a_prefix_is_saved(path, tmp_path):
    """A step runs between two buffers of the row."""
    unfinished = []

    def watch(request):
        while len(request.events) == 1 and engine.stats().waiting == 0:  # until the prefix is queued
            time.sleep(0.001)
        unfinished.append(len(list(tmp_path.glob("*.tmp"))))

    with api.Engine(path) as engine, engine.submit([3], watch, max_new_tokens=500, ignore_eos=True) as running:
        engine.save_prefix(LONG, tmp_path / "x.cache")
        running.cancel()
    assert sum(unfinished) > 0


def test_file_of_the_program_is_read_before_the_engine_is_needed_for_a_prefix(path, tmp_path):
    program = shutil.copy(path, tmp_path / "program.pte")
    with api.Engine(program) as engine:
        os.utime(program, (1, 1))
        with pytest.raises(api.ApiError, match="the file has changed since it was loaded"):
            engine.save_prefix(LONG, tmp_path / "x.cache")
        assert engine.stats().busy_seconds == 0


def refusal(path, file) -> str:
    """Return the message of the error of `load_prefix`. After the error, the engine answers without a prefix."""
    with api.Engine(path) as engine:
        with pytest.raises(api.ApiError) as error:
            engine.load_prefix(file)
        assert error.value.status == api.INVALID_ARGUMENT
        assert answer(engine, PROMPTS[3])[1] == 0
        return str(error.value)


def test_damaged_prefix_is_refused(path, saved, tmp_path):
    data = saved.read_bytes()
    file = tmp_path / "bad.cache"
    source = random.Random(3)
    header = 56  # its size in bytes
    for at in [*range(0, header, 7), *(source.randrange(len(data)) for _ in range(20)), len(data) - 1]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << source.randrange(8)
        file.write_bytes(damaged)
        refusal(path, file)
    for length in (1, header - 1, header, 1000, len(data) - 1):
        file.write_bytes(data[:length])
        refusal(path, file)
    file.write_bytes(data + b"x")
    assert "the file is incomplete" in refusal(path, file)
    file.write_bytes(data[:8] + struct.pack("<Q", 2) + data[16:])
    assert "got format version 2, expected 1" in refusal(path, file)


def test_prefix_that_is_truncated_while_it_is_read_is_refused(path, saved, tmp_path):
    """The file shrinks in a step between two buffers."""
    file = shutil.copy(saved, tmp_path / "short.cache")

    def truncate(request):
        while len(request.events) == 1 and engine.stats().waiting == 0:  # until load_prefix() is queued
            time.sleep(0.001)
        if len(request.events) == 2:  # a part is read
            os.truncate(file, 100)

    options = dict(max_new_tokens=500, ignore_eos=True, draft=0)
    with api.Engine(path) as engine, engine.submit([3], truncate, **options) as running:
        with pytest.raises(api.ApiError, match="the file is damaged"):
            engine.load_prefix(file)
        running.cancel()
        assert answer(engine, PROMPTS[3])[1] == 0


def test_prefix_of_another_program_is_refused(windowed, saved):
    assert "the prompt cache of another program" in refusal(windowed, saved)


def test_prefix_errors(path, tmp_path, saved):
    with api.Engine(path) as engine:
        with pytest.raises(api.ApiError, match="cannot read the file") as error:
            engine.load_prefix(tmp_path / "none")
        assert error.value.status == api.NOT_FOUND
        with pytest.raises(api.ApiError, match="cannot write the file"):
            engine.save_prefix(LONG, tmp_path / "no" / "folder")
        os.mkfifo(tmp_path / "pipe")
        for special in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(api.ApiError, match="expected a regular file") as error:
                engine.save_prefix(LONG, special)
            assert error.value.status == api.INVALID_ARGUMENT
        assert (tmp_path / "pipe").is_fifo()
        with pytest.raises(api.ApiError, match="prompt: id 1536 is outside the vocabulary"):
            engine.save_prefix([1536], tmp_path / "x")
        assert engine.generate([5], max_new_tokens=1, ignore_eos=True)


def test_refused_prefix_costs_no_row(one_row, saved, tmp_path):
    with api.Engine(one_row) as engine:
        answer(engine, LONG)
        for file in (tmp_path / "none", saved):
            with pytest.raises(api.ApiError, match="cannot read the file|of another program"):
                engine.load_prefix(file)
        assert answer(engine, [*LONG, 5])[1] == 200


# -- log probabilities -------------------------------------------------------------------


def test_scores_are_the_log_probabilities_of_the_answer(path):
    prompt = PROMPTS[4]
    with api.Engine(path) as engine:
        with engine.submit(prompt, max_new_tokens=30, ignore_eos=True, logprobs=2) as request:
            assert request.wait()
            tokens, events = request.tokens, request.logprobs
        for token, (logprob, top) in zip(tokens, events, strict=True):
            assert len(top) == 2 and list(top)[0] == token and top[token] == logprob
        logprobs, greedy = engine.score(prompt, tokens)
        assert logprobs == pytest.approx([logprob for logprob, _ in events], abs=1e-4) and all(greedy)
        for top, (_, expected) in zip(engine.score_top(prompt, tokens, 2), events, strict=True):
            assert list(top) == list(expected) and top == pytest.approx(expected, abs=1e-4)
        wrong = [*tokens[:10], (tokens[10] + 1) % 1536]
        logprobs, greedy = engine.score(prompt, wrong)
        assert greedy == [True] * 10 + [False] and logprobs[10] < events[10][0]
        assert engine.score([5], [7])[0] == pytest.approx(engine.score([5], [7, 8])[0][:1], abs=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1, "seed": 3, "logit_bias": {7: 60.0, 9: 60.0}}], ids=["greedy", "sampled"]
)
def test_drafts_do_not_change_log_probabilities(path, settings):
    def answer(engine, draft):
        options = options_of(settings, max_new_tokens=60, logprobs=2, draft=draft)
        with engine.submit([4, 5, 6] * 6, **options) as request:
            assert request.wait()
            return request.tokens, request.logprobs, request.info.drafted_tokens

    with api.Engine(path) as engine:
        tokens, logprobs, drafted = answer(engine, draft=7)
        assert drafted > 0 and (tokens, logprobs, 0) == answer(engine, draft=0)


def test_host_computes_log_probabilities_too(tmp_path_factory, path):
    import small_llm

    logits = small_llm.shared(tmp_path_factory, "engine_logits", outputs="logits", batch=ROWS)
    results = []
    for program in (path, logits):
        with api.Engine(program) as engine:
            with engine.submit(PROMPTS[4], max_new_tokens=5, ignore_eos=True, logprobs=3) as request:
                assert request.wait()
                results.append(request.logprobs)
    for (head, head_top), (host, host_top) in zip(*results, strict=True):
        assert host == pytest.approx(head, abs=1e-4)
        assert list(host_top) == list(head_top) and host_top == pytest.approx(head_top, abs=1e-4)


def test_host_computes_more_log_probabilities_than_the_head(path, one_row, alone):
    """The program also returns logits, so that the host draws the same tokens, with all log probabilities."""
    with api.Engine(one_row) as engine:
        for (prompt, settings), expected in zip(REQUESTS[:5], alone[:5], strict=True):
            with engine.submit(prompt, **options_of(settings, logprobs=2000)) as request:
                assert request.wait() and request.tokens == expected
                assert {len(top) for _, top in request.logprobs} == {1536}
                assert sum(map(math.exp, request.logprobs[0][1].values())) == pytest.approx(1, abs=1e-4)
    message = "logprobs: got 4, expected at most 3, the number that the program was exported with"
    with api.Engine(path) as engine, pytest.raises(api.ApiError, match=message):
        engine.submit([5], logprobs=4)


def test_invalid_scores_are_refused(path):
    with api.Engine(path) as engine:
        for prompt, targets, message in (
            ([], [1], "prompt: got 0 tokens"),
            ([1], [], "targets: got 0 tokens"),
            ([1], [1536], "targets: id 1536"),
            ([1] * 1000, [1] * 26, "expected at most 1025 together"),
        ):
            with pytest.raises(api.ApiError, match=message) as error:
                engine.score(prompt, targets)
            assert error.value.status == api.INVALID_ARGUMENT
        with pytest.raises(api.ApiError, match="top_count: got 4, expected at most 3"):
            engine.score_top([1], [1], 4)


def test_too_many_biased_tokens_are_refused(path):
    with api.Engine(path) as engine, pytest.raises(api.ApiError, match="logit_bias: got 3 tokens, expected at most 2"):
        engine.submit([5], logit_bias={1: 1.0, 2: 1.0, 3: 1.0})


# -- failures ------------------------------------------------------------------------------


def test_failing_mask_ends_its_request_only(path, alone):
    prompt, settings = REQUESTS[1]

    def allowed(answer):
        return range(1536) if len(answer) < 3 else None

    with api.Engine(path) as engine:
        good = [engine.submit(prompt, **options_of(settings)) for _ in range(3)]
        with engine.submit(prompt, allowed_tokens=allowed) as bad:
            assert bad.wait() and bad.finish == api.FINISH_ERROR and len(bad.tokens) == 3
            assert bad.error == "allowed_tokens: the callback returned false"
        for request in good:
            assert request.wait() and request.tokens == alone[1]
            request.free()


def test_mask_sees_possible_answers_only(path):
    """With draft tokens too, the callback gets only answers whose tokens the earlier masks allow."""
    seen = []

    def allowed(answer):
        seen.append(list(answer))
        return [11, 12, 13, 14] if len(answer) % 2 else [20, 21, 22, 23]

    options = options_of({"temperature": 5, "seed": 2}, max_new_tokens=80, allowed_tokens=allowed)
    with api.Engine(path) as engine:
        plain = engine.generate([4], **options, draft=0)
        with engine.submit([4], **options, draft=6) as request:
            assert request.wait() and request.tokens == plain
            assert request.info.drafted_tokens > 0
    assert all(token < 15 if i % 2 else token >= 20 for answer in seen for i, token in enumerate(answer))


def test_drafts_end_before_a_stop_id(path):
    """The mask is never computed for an answer with a stop id, as without drafts."""
    pattern, seen = [31, 32, 1, 33], []  # 1 is the stop id of the program

    def allowed(answer):
        seen.append(list(answer))
        return [pattern[len(answer) % 4]]

    with api.Engine(path) as engine, engine.submit(pattern * 4, allowed_tokens=allowed, draft=4) as request:
        assert request.wait() and request.tokens == [31, 32] and request.finish == api.STOP
        # The first token is drawn with the end of the prompt. The draft is the second one.
        assert (request.info.drafted_tokens, request.info.accepted_tokens, request.info.calls) == (1, 1, 2)
    assert seen == [[], [31], [31, 32]]


def test_draft_tokens_outside_the_vocabulary_are_dropped(path, program):
    """The draft model has a longer vocabulary. It guesses two tokens that the program knows, then one that it lacks."""

    def rule(self, tokens, input_pos, **_):
        position = input_pos + tokens.shape[1]
        return torch.where(position % 3 == 0, torch.full_like(position, 2000), position)

    seen = []

    def allowed(answer):
        seen.extend(answer)
        return range(1536)

    longer = program("longer_vocabulary", rule, vocab_size=2048, vocabulary=None, max_context_len=1000)
    model = api.Model(path, draft=str(longer).encode())
    with api.Engine(path) as plain, api.Engine(model) as engine:
        expected = plain.generate([4], **options_of({}), draft=0)
        for settings in ({}, {"allowed_tokens": allowed}):
            with engine.submit([4], **options_of(settings), draft=7) as request:
                assert request.wait() and request.tokens == expected, request.error
                assert request.info.drafted_tokens > 0
    assert max(seen) < 1536
    model.free()


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

    The rows go on with the tokens of the pending step, and know afterwards which tokens they hold.
    """
    from executorch_mlx import memory

    path = export(tmp_path_factory, "engine_short_ring", batch=2, sliding_window=24, chunk=2, speculation=False)
    options = options_of({"temperature": 1, "seed": 3, "top_k": 20}, draft=0, max_new_tokens=100)
    prompts = [LONG[:40], LONG[40:80]]

    def limit(request):
        if len(request.events) == 2:  # the first token of a step for both rows
            memory.set_memory_limit(idle + 26_000)  # one row takes about 20,000 bytes, both take over 32,000

    before = memory.set_memory_limit(None)
    with api.Engine(path, overlap=1) as engine:
        expected = [engine.generate(prompt, **options) for prompt in prompts]
        steps, idle = engine.stats().steps, memory.get_active_memory()
        requests = [engine.submit(prompts[0], **options), engine.submit(prompts[1], limit, **options)]
        try:
            assert all(request.wait() for request in requests)
            assert [(request.tokens, request.error) for request in requests] == [(tokens, "") for tokens in expected]
            assert engine.stats().steps - steps > 150  # almost all steps are for one row
        finally:
            memory.set_memory_limit(before)
            for request in requests:
                request.free()
        for prompt, tokens in zip(prompts, expected, strict=True):
            with engine.submit([*prompt, *tokens, 5], max_new_tokens=1) as request:
                assert request.wait() and request.info.reused_tokens == len(prompt) + len(tokens) - 1
