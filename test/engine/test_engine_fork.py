"""A process that is forked after MLX was loaded lacks the threads of MLX and of the engine. Its calls are errors."""

import os
import signal
import traceback
from collections.abc import Callable

import pytest
import torch
from c_api import FAILED, ApiError, Engine, Model
from executorch_mlx.llm import LLM
from irprograms import Graph, ir
from loaded_method import LoadedMethod

MESSAGE = "this process was forked after"


def in_fork(body: Callable[[], object]) -> None:
    """Run `body` in a forked process, for at most 20 seconds. Fail if it raises an exception or does not end."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_calls_in_a_fork_are_errors(logprob_program, tmp_path):
    with LLM.load(logprob_program) as llm:
        llm.save_prefix([5, 6], tmp_path / "cache")
        running = llm.generate([5, 6, 7], ignore_eos=True)
        calls = [
            lambda: llm.generate([5]),
            lambda: llm.generate_batch([[5]]),
            lambda: llm.score([5], [[6]]),
            lambda: llm.save_prefix([5], tmp_path / "cache"),
            lambda: llm.load_prefix(tmp_path / "cache"),
            lambda: llm.stats,
            lambda: list(running),
            lambda: LLM.load(logprob_program),
        ]

        def check() -> None:
            for call in calls:
                with pytest.raises(RuntimeError, match=f"{MESSAGE}.*load the model in the child process"):
                    call()
            running.close()
            llm.close()

        in_fork(check)
        running.close()
        assert len(llm.generate([5], max_new_tokens=3, ignore_eos=True).result().tokens) == 3


def test_c_api_in_a_fork(logprob_program, tmp_path):
    model = Model(logprob_program)
    engine = Engine(model)
    request = engine.submit([5, 6, 7], ignore_eos=True)
    calls = [
        lambda: engine.submit([5]),
        lambda: engine.score([5], [6]),
        engine.stats,
        lambda: Model(logprob_program),
        lambda: engine.save_prefix([5], tmp_path / "cache"),
        lambda: engine.load_prefix(tmp_path / "cache"),
    ]

    def check() -> None:
        for call in calls:
            with pytest.raises(ApiError, match=MESSAGE) as caught:
                call()
            assert caught.value.status == FAILED
        request.cancel()
        assert not request.wait(-1)
        for each in (request, engine, model):
            each.free()

    in_fork(check)
    for each in (request, engine, model):
        each.free()


def test_methods_in_a_fork(delegate, capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.input((3,)), out=g.output((3,))))

    def load():
        return LoadedMethod(g.pte())

    method, zeros = load(), [torch.zeros(3)]

    def check() -> None:
        for call in (lambda: method.execute(zeros), load):
            with pytest.raises(RuntimeError):
                call()

    assert method.execute(zeros)[0].tolist() == [1, 1, 1]
    in_fork(check)
    assert capfd.readouterr().err.count(MESSAGE) == 2
    assert method.execute(zeros)[0].tolist() == [1, 1, 1]
