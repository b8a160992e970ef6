"""What an app needs beside answers: the progress of a load, the log, prefill, clones, suspension, freed memory."""

import ctypes
import threading

import c_api as api
import pytest
from engine_rows import LONG, answer, one_row, path  # noqa: F401 (fixtures)
from executorch_mlx.loader import load_delegate

OPTIONS = dict(max_new_tokens=8, ignore_eos=True)


def test_load_reports_its_progress(path):
    parts = []
    callback = api.OnProgress(lambda _, part: parts.append(part) or True)
    model = api.Model(path, on_progress=callback)
    model.free()
    assert parts == sorted(parts) and len(parts) > 3
    assert 0 < parts[0] < 0.5 and parts[-1] == 1


def test_load_can_be_aborted(path):
    parts = []
    callback = api.OnProgress(lambda _, part: parts.append(part) or len(parts) < 3)
    with pytest.raises(api.ApiError, match="the load was aborted") as error:
        api.Model(path, on_progress=callback)
    assert (error.value.status, len(parts)) == (api.ABORTED, 3)
    api.Model(path).free()  # a later load has no callback
    assert len(parts) == 3


def test_prompt_is_read_before_its_request(path):
    with api.Engine(path) as engine:
        expected = answer(engine, [*LONG, 5])[0]
    with api.Engine(path) as engine:
        engine.prefill(LONG)
        assert engine.stats().generated_tokens == 0
        assert answer(engine, [*LONG, 5]) == (expected, len(LONG))
        with pytest.raises(api.ApiError, match="prompt: got 0 tokens, expected at least 1"):
            engine.prefill([])


def test_clone_goes_on_beside_its_original(path):
    first, second = [*LONG, 5], [*LONG, 9]
    with api.Engine(path) as engine:
        expected = [answer(engine, prompt)[0] for prompt in (first, second)]
    with api.Engine(path) as engine:
        engine.prefill(LONG)
        engine.clone(LONG)
        steps = engine.stats().prompt_tokens
        answers = [answer(engine, prompt) for prompt in (first, second)]
    assert steps == 0 and answers == [(tokens, len(LONG)) for tokens in expected]


def test_clone_errors(path, one_row):
    with api.Engine(one_row) as engine, pytest.raises(api.ApiError, match="clone: the program has one row"):
        engine.clone(LONG)
    with api.Engine(path) as engine:
        rows = engine.stats().rows
        running = [engine.submit([3], max_new_tokens=400, ignore_eos=True) for _ in range(rows - 1)]
        with pytest.raises(api.ApiError, match="clone: no other row is free") as error:
            engine.clone([5, 6])
        assert error.value.status == api.BUSY
        for request in running:
            request.cancel()
            request.free()


def test_logits_are_those_of_the_next_token(one_row):
    """This program returns tokens and logits."""
    with api.Engine(one_row) as engine:
        count = engine.loaded_model.get_int("get_vocab_size")
        logits = engine.logits(LONG, count)
        token = answer(engine, LONG, temperature=0)[0][0]
        assert logits.index(max(logits)) == token
        assert engine.logits(LONG, count) == logits  # from the cache
        assert len(engine.logits([7], count)) == count
        with pytest.raises(api.ApiError, match="count: got 3, expected .*, the size of the vocabulary"):
            engine.logits(LONG, 3)


def test_logits_need_a_program_that_returns_them(path):
    with api.Engine(path) as engine, pytest.raises(api.ApiError, match="logits: the program does not return logits"):
        engine.logits(LONG, 512)


@pytest.mark.parametrize("overlap", [0, 1])
def test_suspended_engine_makes_no_step(path, overlap):
    seen = threading.Event()
    options = dict(max_new_tokens=60, ignore_eos=True)
    with api.Engine(path) as engine:
        expected = engine.generate(LONG, **options)
    model = api.Model(path)
    with api.Engine(model, overlap=overlap) as engine:
        with engine.submit(LONG, lambda request: seen.set(), **options) as request:
            seen.wait()
            engine.suspend()
            engine.suspend()
            count = len(request.events)
            with engine.submit(LONG, **options) as waiting, engine.submit(LONG, **options) as cancelled:
                cancelled.cancel()
                assert cancelled.wait() and cancelled.finish == api.CANCELLED
                assert not request.wait(0.05) and not waiting.events
                assert len(request.events) == count < 60
                engine.resume()
                assert request.wait() and waiting.wait()
                assert request.tokens == waiting.tokens == expected
    model.free()


def test_suspended_engine_can_be_closed(path):
    with api.Engine(path) as engine:
        engine.suspend()
        with engine.submit([3], **OPTIONS) as request:
            api.call("engine_close", engine.handle)
            assert request.finish == api.CANCELLED
        with pytest.raises(api.ApiError, match="engine: it is closed"):
            engine.suspend()


def active_memory() -> int:
    library = ctypes.CDLL(load_delegate())
    library.executorch_mlx_get_active_memory.restype = ctypes.c_size_t
    return library.executorch_mlx_get_active_memory()


@pytest.mark.parametrize("suspended", [False, True])
def test_idle_engine_frees_the_program(path, suspended):
    before = active_memory()
    with api.Engine(path) as engine:
        expected = answer(engine, LONG)[0]
        loaded = active_memory() - before
        if suspended:
            engine.suspend()
        engine.release_memory()
        assert active_memory() - before < loaded / 4
        if suspended:
            engine.resume()
        assert answer(engine, LONG) == (expected, 0)
        assert answer(engine, LONG) == (expected, len(LONG) - 1)


def test_memory_is_freed_beside_an_answer(path):
    seen = threading.Event()
    with api.Engine(path) as engine:
        options = dict(max_new_tokens=60, ignore_eos=True)
        expected = engine.generate(LONG, **options)
        with engine.submit(LONG, lambda request: seen.set(), **options) as request:
            seen.wait()
            engine.release_memory()
            assert request.wait() and request.tokens == expected


def test_log_goes_to_a_callback(tmp_path, capfd):
    lines = []
    type_ = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char, ctypes.c_void_p, ctypes.c_size_t)
    callback = type_(lambda _, level, text, length: lines.append((level, ctypes.string_at(text, length).decode())))
    set_log = ctypes.CDLL(load_delegate()).executorch_mlx_set_log
    set_log.argtypes = [type_, ctypes.c_void_p]
    file = tmp_path / "no.pte"
    file.write_bytes(b"no program, but long enough to be read as one" * 10)
    set_log(callback, None)
    try:
        with pytest.raises(api.ApiError, match="not an ExecuTorch program"):
            api.Model(file)
    finally:
        set_log(type_(), None)
    assert lines and lines[-1][0] == b"E" and capfd.readouterr().err == ""
    with pytest.raises(api.ApiError):
        api.Model(file)
    assert lines[-1][1] in capfd.readouterr().err
