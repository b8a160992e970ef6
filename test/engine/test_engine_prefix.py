"""Prompt caches on disk: `save_prefix` and `load_prefix`."""

import os
import random
import shutil
import struct
import time

import c_api as api
import pytest
from engine_rows import LONG, PROMPTS, answer, one_row, path, windowed  # noqa: F401 (fixtures)


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
