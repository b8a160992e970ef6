"""The token law on a small model.

Other requests, chunk sizes, prompt reuse and speculation do not change the tokens of a request.
"""

import math
import random
import threading

import c_api as api
import pytest
import torch
from engine_rows import LONG, PROMPTS, REQUESTS, ROWS, answer, one_row, options_of, path, windowed  # noqa: F401 (fixtures)


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
    source = random.Random(6)
    others = [[source.randrange(2, 1500) for _ in range(30)] for _ in range(ROWS)]
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


@pytest.mark.parametrize("program", ["path", "one_row"])
def test_other_requests_have_turns_while_a_score_is_computed(program, request):
    """In a program with one row, they get the row between two calls."""
    prompt, targets = PROMPTS[4], [*range(2, 502)]
    begun, has_scored, scores, seen = threading.Event(), threading.Event(), [], []

    def score(engine) -> None:
        scores.append(engine.score(prompt, targets))
        has_scored.set()

    with api.Engine(request.getfixturevalue(program), chunk_seconds=1e-9) as engine:
        expected = engine.score(prompt, targets)
        options = {"max_new_tokens": 1, "ignore_eos": True}
        # The callback holds the engine until both requests wait.
        first = engine.submit([7], allowed_tokens=lambda _: begun.wait(60) and range(2, 9), **options)
        thread = threading.Thread(target=score, args=[engine])
        thread.start()
        while engine.stats().waiting < 1:
            pass
        # The score has not ended when the token is drawn, not even after some time.
        short = engine.submit(
            [8, 9], allowed_tokens=lambda _: seen.append(has_scored.wait(0.3)) or range(2, 9), **options
        )
        begun.set()
        for other in (first, short):
            assert other.wait() and other.finish != api.FINISH_ERROR, other.error
            other.free()
        thread.join()
    assert seen == [False] and scores[0][0] == pytest.approx(expected[0], abs=1e-4)


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
