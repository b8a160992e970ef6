"""The C API of the engine: requests, events, errors, callbacks, and the sizes of structs."""

import ctypes as c
import itertools
import threading

import c_api as api
import llm_programs as programs
import pytest
import torch

PROMPT = [10]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A program with 4 rows. The token after `t` is `t + 1`."""
    return programs.export_rows(tmp_path_factory.mktemp("rows") / "rows.pte", 4)


@pytest.fixture
def engine(path):
    with api.Engine(path) as engine:
        yield engine


class Gate:
    """Blocks the engine in the first event of a request until `open()`."""

    def __init__(self, engine: api.Engine, **options):
        self.reached, self.opened = threading.Event(), threading.Event()
        self.request = engine.submit(PROMPT, self._wait, max_new_tokens=1, **options)
        assert self.reached.wait(60)

    def _wait(self, _):
        self.reached.set()
        assert self.opened.wait(60)

    def open(self):
        self.opened.set()
        assert self.request.wait()
        self.request.free()


def error_of(function, *arguments, **options) -> tuple[int, str]:
    """Return the status and the message of the error that the function raises."""
    with pytest.raises(api.ApiError) as error:
        function(*arguments, **options)
    return error.value.status, str(error.value)


# -- answers -------------------------------------------------------------------------


def test_events_and_info_of_an_answer(engine):
    with engine.submit(b"abc", max_new_tokens=3, seed=4) as request:
        assert request.wait()
        assert request.events == [
            (100, b"d", api.RUNNING, -1),
            (101, b"e", api.RUNNING, -1),
            (102, b"f", api.LENGTH, -1),
        ]
        info = request.info
        assert (info.finish, info.status, info.seed, info.has_seed, info.stop_id) == (api.LENGTH, api.OK, 4, True, -1)
        assert (info.prompt_tokens, info.reused_tokens, info.generated_tokens) == (3, 0, 3)
        assert info.queue_seconds > 0 and info.prompt_seconds > 0 and info.generation_seconds > 0
        assert request.error == ""


def test_stop_id_is_an_event_but_not_part_of_the_answer(engine):
    with engine.submit(b"a", stop_ids=[100]) as request:
        request.wait()
        assert request.text == b"bc" and request.events[-1] == (100, b"", api.STOP, -1)
        assert request.info.stop_id == 100 and request.info.generated_tokens == 3


def test_last_event_has_the_index_of_the_stop_string(engine):
    with engine.submit(b"a", stop=["zz", "de"]) as request:
        request.wait()
        assert request.text == b"bc" and request.events[-1][2:] == (api.STOP, 1)


def test_last_event_has_the_text_that_was_held_back(engine):
    with engine.submit(b"a", stop=["cdx"], max_new_tokens=3) as request:
        request.wait()
        assert [event[1] for event in request.events] == [b"b", b"", b"cd"]


def test_info_is_complete_in_the_last_event(engine):
    seen = []
    with engine.submit(PROMPT, lambda r: seen.append(r.info.finish), max_new_tokens=2) as request:
        request.wait()
    assert seen == [api.RUNNING, api.LENGTH]


def test_context_ends_an_answer(tmp_path):
    path = programs.export_rows(tmp_path / "short.pte", 2, max_context_len=8)
    with api.Engine(path) as engine, engine.submit([1, 2, 3]) as request:
        request.wait()
        assert request.tokens == [4, 5, 6, 7, 8, 9] and request.finish == api.CONTEXT


def test_many_requests_share_the_rows(engine):
    gate = Gate(engine)  # no step runs before all requests are there
    requests = [engine.submit([i], max_new_tokens=5 + i, temperature=1, seed=i) for i in range(20)]
    gate.open()
    for i, request in enumerate(requests):
        assert request.wait()
        expected, last = [], i
        for step in range(5 + i):
            last = (last + 1 + ((i + step) & 7)) % 256
            expected.append(last)
        assert request.tokens == expected
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.rows, stats.requests, stats.failed) == (0, 0, 4, 21, 0)
    total = sum(range(5, 25)) + 1  # plus the token of the gate's request
    assert stats.generated_tokens == total and stats.prompt_tokens == 20 + len(PROMPT)
    first, fourth = requests[0].info, requests[3].info
    ended = first.queue_seconds + first.prompt_seconds + first.generation_seconds
    assert fourth.queue_seconds < ended, "the requests did not run side by side"
    for request in requests:
        request.free()


# -- order and the end of requests -----------------------------------------------------


def test_requests_begin_by_priority_then_in_order(tmp_path, program):
    order = []
    with api.Engine(program("one_row", programs.successor, max_context_len=10**12)) as engine:
        gate = Gate(engine)
        requests = [
            engine.submit(PROMPT, lambda r, i=i: order.append(i), max_new_tokens=1, priority=priority)
            for i, priority in enumerate([0, 0, 5, -1, 5])
        ]
        gate.open()
        for request in requests:
            assert request.wait()
            request.free()
    assert order == [2, 4, 0, 1, 3]


def test_running_answers_go_on_while_a_prompt_is_read(engine):
    """Chunks of a prompt alternate with steps: the running answer gets a token for each chunk of 8 prompt tokens."""
    events = []
    with engine.submit(PROMPT, events.append, max_new_tokens=10**9) as running:
        while len(events) < 3:
            pass
        ends = []
        gate = Gate(engine)  # no chunk runs before `begin` is read
        with engine.submit([1] * 800, lambda r: ends.append(len(events)), max_new_tokens=1) as long:
            begin = len(events)
            gate.open()
            assert long.wait()
        assert ends[0] - begin >= 800 / 8 - 1
        running.cancel()


def test_cancelled_requests_end_with_an_event(engine):
    running = [engine.submit(PROMPT) for _ in range(4)]
    waiting = engine.submit(PROMPT)
    assert not waiting.wait(0.05)
    waiting.cancel()
    assert waiting.wait() and waiting.events == [(-1, b"", api.CANCELLED, -1)]
    for request in running:
        assert not request.wait(0)
        request.cancel()
        assert request.wait() and request.finish == api.CANCELLED and len(request.tokens) > 0
        request.free()
    waiting.free()


def test_callback_ends_an_answer(engine):
    with engine.submit(PROMPT, lambda r: len(r.events) < 3) as request:
        request.wait()
        assert request.tokens == [11, 12, 13] and request.events[-1] == (-1, b"", api.CANCELLED, -1)


def test_requests_can_be_freed_while_they_run(engine):
    for request in [engine.submit(PROMPT) for _ in range(10)]:
        request.free()
    assert engine.generate(PROMPT, max_new_tokens=2) == [11, 12]


def test_requests_outlive_the_engine(path):
    with api.Engine(path) as engine:
        requests = [engine.submit(PROMPT) for _ in range(8)]
    for request in requests:
        assert request.wait(0) and request.finish == api.CANCELLED
        request.free()


def test_closed_engine_refuses_requests(path):
    """A callback may submit while the engine ends: this fails. Nothing else but the stats can be used afterwards."""
    errors = []

    def resubmit(request):
        if request.finish == api.CANCELLED:
            errors.append(error_of(engine.submit, PROMPT, resubmit))
        elif len(request.events) == 1:
            errors.append(error_of(api.call, "engine_close", engine.handle))

    with api.Engine(path, queue_limit=2**63 - 1) as engine:
        requests = [engine.submit(PROMPT, resubmit) for _ in range(6)]
        while len(errors) < 4:
            pass
        api.call("engine_close", engine.handle)
        api.call("engine_close", engine.handle)
        assert errors[:4] == [(api.INVALID_ARGUMENT, "engine: a callback must not wait for its end")] * 4
        assert errors[4:] == [(api.FAILED, "engine: it is closed")] * 6
        assert error_of(engine.submit, PROMPT)[0] == api.FAILED and engine.stats().requests == 6
    for request in requests:
        request.free()


def test_callbacks_may_submit_cancel_and_free(engine):
    done, second = threading.Event(), []

    def on_event(request):
        if len(request.events) == 2:
            second.append(engine.submit([50], lambda r: done.set(), max_new_tokens=1))
            request.free()  # no event follows

    first = engine.submit(PROMPT, on_event)
    assert done.wait(60)
    assert second[0].wait() and second[0].tokens == [51]
    second[0].free()
    assert len(first.events) == 2
    while engine.stats().running:
        pass


def test_callbacks_do_not_wait_for_their_engine(engine):
    waited = []

    def on_event(request):
        if len(request.events) == 1:
            api.library().engine_free(engine.handle)
            waited.extend([request.wait(-1), other.wait(60)])

    other = engine.submit(PROMPT, max_new_tokens=1000)
    with engine.submit(PROMPT, on_event, max_new_tokens=3) as request:
        assert request.wait() and request.tokens == [11, 12, 13]
    other.free()
    assert waited == [False, False] and engine.generate(PROMPT, max_new_tokens=1) == [11]


def test_full_queue_is_busy(path):
    with api.Engine(path, queue_limit=2) as engine:
        gate = Gate(engine)
        requests = [engine.submit(PROMPT, max_new_tokens=1) for _ in range(3 + 2)]  # 3 free rows, 2 waiting
        status, message = error_of(engine.submit, PROMPT)
        assert status == api.BUSY and message == "the queue is full: 2 requests are waiting"
        assert engine.stats().waiting == 5
        gate.open()
        for request in requests:
            assert request.wait()
            request.free()
        assert engine.generate(PROMPT, max_new_tokens=1) == [11]


# -- errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt: got 0 tokens, expected at least 1"),
        ({"prompt": [256]}, "prompt: id 256 is outside the vocabulary [0, 256)"),
        ({"temperature": float("nan")}, "temperature: got nan, expected a finite number"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0, expected a finite number greater than 0"),
        ({"top_k": 5}, "top_k: the program was exported without this parameter"),
        ({"logprobs": 0}, "logprobs: the program was exported without this parameter; export it with --logprobs K"),
        ({"logprobs": -2}, "logprobs: got -2, expected at least -1"),
        ({"draft": -2}, "draft: got -2, expected at least -1"),
        ({"max_new_tokens": -1}, "max_new_tokens: got -1, expected at least 0"),
        ({"stop": [""]}, "stop: got an empty string, expected at least one character"),
        ({"stop_ids": [-1]}, "stop_ids: id -1 is outside the vocabulary [0, 256)"),
        (
            {"logit_bias": {1: 1.0}},
            "logit_bias: the program was exported without this parameter; export it with --logit-bias K",
        ),
        (
            {"allowed_tokens": lambda answer: [1]},
            "allowed_tokens: the program was exported without this parameter; export it with --allowed-tokens",
        ),
    ],
)
def test_invalid_request_is_refused(engine, options, message):
    prompt = options.pop("prompt", PROMPT)
    assert error_of(engine.submit, prompt, **options) == (api.INVALID_ARGUMENT, message)


def test_failing_step_ends_its_requests_only(tmp_path):
    """Token 199 is followed by 200, which is outside the vocabulary of 200 tokens."""
    path = programs.export_rows(tmp_path / "small.pte", 4, get_vocab_size=200, token_offsets=token_offsets_of(200))
    with api.Engine(path) as engine:
        with engine.submit([190]) as failing:
            assert failing.wait() and failing.finish == api.FINISH_ERROR
            assert failing.info.status == api.FAILED
            assert "returned the token 200, which is outside the vocabulary [0, 200)" in failing.error
            assert failing.tokens == list(range(191, 200))
        assert engine.generate([1], max_new_tokens=3) == [2, 3, 4]
        assert engine.stats().failed == 1


def token_offsets_of(count: int):
    """Return the offsets of `count` tokens in 256 bytes. Each token has one byte, but the last has all that remain."""
    import torch

    return torch.cat([torch.arange(count), torch.tensor([256])])


def test_missing_files_and_values(path, tmp_path):
    assert error_of(api.Model, tmp_path / "none.pte")[0] == api.NOT_FOUND
    (tmp_path / "bad.pte").write_bytes(b"x" * 100)
    assert error_of(api.Model, tmp_path / "bad.pte")[0] == api.INVALID_PROGRAM
    assert error_of(api.Model, path, device=b"tpu") == (api.INVALID_ARGUMENT, "device: got 'tpu', expected cpu or gpu")
    model = api.Model(path)
    assert error_of(model.get_int, "nothing") == (api.NOT_FOUND, "name: the program has no integer nothing")
    assert error_of(model.get_data, "get_vocab_size")[0] == api.NOT_FOUND
    model.free()


def test_null_pointers_are_errors(engine):
    lib = api.library()
    assert lib.model_load(None, None, None) == api.INVALID_ARGUMENT
    assert lib.last_error() == b"path: got null"
    assert lib.engine_submit(engine.handle, None, c.byref(c.c_void_p())) == api.INVALID_ARGUMENT
    assert lib.engine_get_stats(None, None) == api.INVALID_ARGUMENT
    options = api.RequestOptions(prompt_length=3)
    assert lib.engine_submit(engine.handle, c.byref(options), c.byref(c.c_void_p())) != api.OK
    assert lib.last_error() == b"prompt: got null, expected 3 values"
    for count in (2**61, 2**64 - 1):  # the size in bytes overflows
        options = api.RequestOptions(prompt=api.array(c.c_int64, [1]), prompt_length=count)
        assert lib.engine_submit(engine.handle, c.byref(options), c.byref(c.c_void_p())) == api.INVALID_ARGUMENT
        assert lib.last_error().startswith(b"prompt: got %d values, expected at most" % count)
    for name in ("model_free", "engine_free", "request_free", "request_cancel"):
        getattr(lib, name)(None)


def test_model_has_one_engine_at_a_time(path):
    model = api.Model(path)
    with api.Engine(model):
        assert error_of(api.Engine, model) == (api.INVALID_ARGUMENT, "model: it has an engine already")
    api.Engine(model).free()
    model.free()


# -- metadata ------------------------------------------------------------------------


def test_metadata(path, tmp_path):
    model = api.Model(path)
    names = ("get_max_batch_size", "get_vocab_size", "sampling_seed", "has_head", "has_logits", "has_verify")
    assert [model.get_int(name) for name in names] == [4, 256, 1, 1, 0, 1]
    assert model.get_data("token_bytes") == bytes(range(256)) and model.get_data("get_eos_ids") == b""
    model.free()
    model = api.Model(programs.export(tmp_path / "eos.pte", programs.successor, get_eos_ids=[4, 9]))
    assert model.get_data("get_eos_ids") == bytes([4, *[0] * 7, 9, *[0] * 7])
    model.free()


def test_token_bytes_can_be_added(program):
    model = api.Model(program("no_table", programs.successor, vocabulary=None))
    offsets = api.array(c.c_int64, [0, *range(12)])
    api.call("model_set_token_bytes", model.handle, b"abcdefghijk", offsets, c.c_size_t(12))
    with api.Engine(model) as engine:
        with engine.submit([5], max_new_tokens=8, stop=["x"]) as request:
            request.wait()
            assert request.text == b"fghijk"  # the tokens from 12 on have no text
        arguments = (model.handle, b"", api.array(c.c_int64, [0]), c.c_size_t(0))
        assert error_of(api.call, "model_set_token_bytes", *arguments)[0] == api.INVALID_ARGUMENT
    model.free()


# -- ABI -----------------------------------------------------------------------------


def test_older_structs_are_read_to_their_end_only(engine):
    """A smaller `size` means that the caller was built with an older header. The fields beyond it are not touched."""
    options = api.RequestOptions(prompt=api.array(c.c_int64, PROMPT), prompt_length=1, temperature=float("nan"))
    options.size = api.RequestOptions.temperature.offset
    handle = c.c_void_p()
    api.call("engine_submit", engine.handle, c.byref(options), c.byref(handle))
    api.library().request_cancel(handle)
    assert api.library().request_wait(handle, 60)

    info = api.RequestInfo(seed=77)
    info.size = api.RequestInfo.seed.offset
    api.library().request_get_info(handle, c.byref(info))
    assert (info.finish, info.seed, info.size) == (api.CANCELLED, 77, api.RequestInfo.seed.offset)
    api.library().request_free(handle)

    stats = api.Stats(rows=-5)
    stats.size = api.Stats.rows.offset
    api.call("engine_get_stats", engine.handle, c.byref(stats))
    assert stats.rows == -5


def test_newer_structs_are_accepted(engine):
    class Newer(c.Structure):
        _fields_ = [("old", api.RequestOptions), ("more", c.c_int64 * 8)]

    newer = Newer(
        old=api.RequestOptions(prompt=api.array(c.c_int64, PROMPT), prompt_length=1, top_p=1, max_new_tokens=1)
    )
    newer.old.repetition_penalty, newer.old.logprobs, newer.old.size = 1, -1, c.sizeof(Newer)
    handle = c.c_void_p()
    api.call("engine_submit", engine.handle, c.byref(newer.old), c.byref(handle))
    assert api.library().request_wait(handle, 60)
    api.library().request_free(handle)


@pytest.mark.parametrize("size", [0, 4])
def test_struct_without_a_size_is_refused(engine, size):
    options = api.RequestOptions()
    options.size = size
    assert error_of(api.call, "engine_submit", engine.handle, c.byref(options), c.byref(c.c_void_p())) == (
        api.INVALID_ARGUMENT,
        f"options: got size {size}, expected that of the struct",
    )


# -- masks and drafts ------------------------------------------------------------------


def test_drafts_change_nothing(engine):
    """The answer counts to 255, and then from 0 again. From the second round on, 7 of 8 tokens are accepted drafts."""
    plain = engine.generate([0], max_new_tokens=600, draft=0)
    with engine.submit([0], max_new_tokens=600, draft=7) as request:
        request.wait()
        assert request.tokens == plain == [(i + 1) % 256 for i in range(600)]
        info = request.info
        assert info.accepted_tokens == pytest.approx((600 - 258) * 7 / 8, abs=10)
        assert info.drafted_tokens >= info.accepted_tokens
    drawn = engine.generate([0] * 5, max_new_tokens=300, temperature=1, seed=1, draft=0)
    assert engine.generate([0] * 5, max_new_tokens=300, temperature=1, seed=1, draft=4) == drawn


@pytest.mark.parametrize("end", [{"stop_ids": [40]}, {"stop": ["()"]}, {"max_new_tokens": 256 + 31}], ids=str)
def test_answers_end_within_a_draft(engine, end):
    prompt = [*range(256), 0, 1, 2]  # the answer repeats the prompt
    with engine.submit(prompt, draft=0, **end) as plain, engine.submit(prompt, draft=7, **end) as drafted:
        assert plain.wait() and drafted.wait()
        assert drafted.tokens == plain.tokens and drafted.text == plain.text and drafted.finish == plain.finish
        assert drafted.info.accepted_tokens > 5


# -- stress ----------------------------------------------------------------------------


def test_a_thousand_requests_from_16_threads(tmp_path):
    """A third of the requests is cancelled, some fail, and all others are complete. No request or thread is left."""
    path = programs.export_rows(tmp_path / "rows.pte", 4, get_vocab_size=200, token_offsets=token_offsets_of(200))
    numbers, wrong = itertools.count(), []
    with api.Engine(path) as engine:
        threads_before = threading.active_count()

        def client():
            while (number := next(numbers)) < 1000:
                start = number % 150
                fails = number % 7 == 3
                with engine.submit([start], max_new_tokens=300 if fails else 20, draft=number % 3 - 1) as request:
                    if number % 3 == 0:
                        request.cancel()
                    if not request.wait(60):
                        wrong.append((number, "no end"))
                    elif number % 3 == 0:
                        expected = list(range(start + 1, start + 1 + len(request.tokens)))
                        if request.tokens != expected:
                            wrong.append((number, request.tokens))
                    elif fails and request.finish != api.FINISH_ERROR:
                        wrong.append((number, request.finish))
                    elif not fails and request.tokens != list(range(start + 1, start + 21)):
                        # A request may share the failing step of another one.
                        if "outside the vocabulary" not in request.error:
                            wrong.append((number, request.tokens))

        clients = [threading.Thread(target=client) for _ in range(16)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        assert not wrong, wrong[:5]
        stats = engine.stats()
        assert (stats.requests, stats.running, stats.waiting) == (1000, 0, 0)
        assert stats.failed > 90
        assert engine.generate([1], max_new_tokens=3) == [2, 3, 4]
        assert threading.active_count() == threads_before


def test_failed_call_ends_its_request_only(tmp_path, capfd):
    """A prompt that ends with 250 fails behind an update in place: all buffers are then undefined."""
    from executorch_mlx import MLXPartitioner

    def rule(self, tokens, input_pos, **_):
        self.seen.copy_(torch.ops.mlx.cache_update(self.seen, tokens[:, None, :, None], input_pos))
        return programs.summed(self, tokens, input_pos) % 100 + self.table[tokens[0, -1:]]

    state = programs.summed_state(16) | {"table": torch.zeros(200, dtype=torch.int64)}
    state["seen"] = torch.zeros(1, 1, 16, 1, dtype=torch.int64)
    path = programs.export(tmp_path / "failing.pte", rule, state=state, partitioner=MLXPartitioner())
    with api.Engine(path) as engine:
        expected = engine.generate([5, 6], max_new_tokens=6)
        for _ in range(2):
            capfd.readouterr()
            with engine.submit([7, 250], max_new_tokens=6) as request:
                assert request.wait() and request.finish == api.FINISH_ERROR
                assert "forward: 2 tokens at position 0" in request.error
            log = capfd.readouterr().err
            assert "index 250 is out of range" in log and "undefined now" in log
            assert engine.generate([5, 6], max_new_tokens=6) == expected


def test_model_may_be_freed_before_its_engine(tmp_path):
    model = api.Model(programs.export(tmp_path / "successor.pte", programs.successor))
    engine = api.Engine(model)
    model.free()
    assert engine.generate([5], max_new_tokens=3) == [6, 7, 8]
    engine.free()
