"""A draft model: a second program that guesses tokens. The tokens of answers do not depend on it."""

import c_api as api
import llm_programs as programs
import pytest
import torch


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A program with three rows. The token after t is t + 1, plus the lowest 3 bits of the seed if the temperature is
    positive."""
    return programs.export_rows(tmp_path_factory.mktemp("draft") / "counting.pte", 3)


@pytest.fixture(scope="module")
def drafted(counting):
    """An engine that runs `counting` with `counting` as its draft model."""
    model = api.Model(counting, draft=str(counting).encode())
    with api.Engine(model) as engine:
        yield engine
    model.free()


def answer(engine, **options):
    with engine.submit([3, 9], max_new_tokens=41, **options) as request:
        assert request.wait() and request.finish == api.LENGTH, request.error
        return request.tokens, request.info


def test_draft_model_draws_with_the_seeds_of_the_answer(counting, drafted):
    """With the same seeds, every guess is right, also at a positive temperature.

    The first call returns 1 token, and the 5 calls after it return 8 tokens each.
    """
    for options in ({}, {"temperature": 1, "seed": 77}, {"temperature": 1, "seed": 2**63 - 4}):
        with api.Engine(counting) as plain:
            expected = plain.generate([3, 9], max_new_tokens=41, draft=0, **options)
        tokens, info = answer(drafted, draft=7, **options)
        assert tokens == expected
        assert (info.drafted_tokens, info.accepted_tokens, info.calls) == (35, 35, 6)


def test_draft_tokens_behind_the_end_are_not_accepted(drafted):
    """The first call draws A. The second one draws B to I with right guesses, and the answer ends at D."""
    with drafted.submit(b"@", stop=["D"], draft=7) as request:
        assert request.wait() and request.text == b"ABC"
        info = request.info
        assert (info.generated_tokens, info.drafted_tokens, info.accepted_tokens) == (4, 7, 3)


def test_more_requests_than_rows_of_the_draft_model(counting, drafted):
    with api.Engine(counting) as plain:
        expected = [plain.generate([i], max_new_tokens=60, temperature=i % 2, seed=i, draft=0) for i in range(8)]
    requests = [
        drafted.submit([i], max_new_tokens=60, temperature=i % 2, seed=i, draft=(3, -1)[i // 4]) for i in range(8)
    ]
    for request in requests:
        assert request.wait()
    assert [request.tokens for request in requests] == expected
    assert sum(request.info.accepted_tokens for request in requests) > 100
    for request in requests:
        request.free()


@pytest.mark.parametrize("draft", [-1, 2, 7])
def test_wrong_guesses_are_rejected(counting, program, draft):
    """The draft model adds 1 to the token at every temperature. Its context ends at position 40."""
    path = program("short_successor", programs.successor, max_context_len=40)
    model = api.Model(counting, draft=str(path).encode())
    with api.Engine(counting) as plain:
        expected = plain.generate([5] * 12, max_new_tokens=100, temperature=1, seed=5, draft=0)
    with (
        api.Engine(model) as engine,
        engine.submit([5] * 12, max_new_tokens=100, temperature=1, seed=5, draft=draft) as request,
    ):
        assert request.wait() and request.tokens == expected
        if draft > 0:
            assert 0 < request.info.accepted_tokens < request.info.drafted_tokens
    model.free()


def test_failing_draft_model_ends_no_answer(counting, program):
    """The draft model fails at position 6. It is used again after 1024 steps."""

    def out_of_range(self, tokens, input_pos, **_):
        return self.table[input_pos + tokens.shape[1]]

    path = program("fails", out_of_range, state={"table": torch.arange(6)}, max_context_len=1000)
    model = api.Model(counting, draft=str(path).encode())
    with api.Engine(counting) as plain:
        expected = plain.generate([0], max_new_tokens=30, draft=0)
    with api.Engine(model) as engine:
        assert engine.generate([0], max_new_tokens=30, draft=4) == expected
        failed = engine.stats().drafted_tokens
        assert engine.generate([0], max_new_tokens=30, draft=4) == expected
        assert engine.stats().drafted_tokens == failed
        engine.generate([0], max_new_tokens=1024, draft=0)
        assert engine.generate([0], max_new_tokens=30, draft=4) == expected
        assert engine.stats().drafted_tokens > failed
    model.free()


def test_unsuitable_draft_models_are_refused(counting, successor, program):
    def logits(self, tokens, input_pos):
        return torch.zeros(1, 256)

    cases = [
        (successor, counting, f"draft: {successor} was exported without the method verify"),
        (counting, program("no_head", logits, parameters=False, sampling_head=False), "program that returns logits"),
        (
            counting,
            program("shifted", programs.successor, vocabulary=[bytes([i ^ 1]) for i in range(256)]),
            "token 0 is another one than in",
        ),
        (counting, counting.parent / "nowhere.pte", "nowhere.pte: the file is unreadable or empty"),
    ]
    for path, draft, message in cases:
        with pytest.raises(api.ApiError, match="draft|nowhere") as raised:
            api.Model(path, draft=str(draft).encode())
        assert message in str(raised.value)
