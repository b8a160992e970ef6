"""`Generation`: `async for`, many answers at once, and cancellation of an answer to which nothing refers any more."""

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import small_llm
from executorch_mlx.llm import LLM, BusyError, SettingError
from executorch_mlx.llm.generation import RequestHandle, _requests

PROMPTS = [[n, 300, 12] for n in range(5, 15)]


@pytest.fixture(scope="module")
def llm(chat_program) -> LLM:
    return LLM.load(chat_program)


def wait_until(condition) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def wait_until_idle(llm: LLM) -> None:
    wait_until(lambda: (llm.stats.running, llm.stats.waiting) == (0, 0))


def test_async_for_gives_the_tokens_of_for(llm):
    expected = list(llm.generate(PROMPTS[0], max_new_tokens=20))

    async def collect():
        return [token async for token in llm.generate(PROMPTS[0], max_new_tokens=20)]

    assert asyncio.run(collect()) == expected and len(expected) == 20


def test_many_answers_in_one_event_loop(llm):
    expected = [llm.generate(prompt, max_new_tokens=8, temperature=1.0, seed=3).result().tokens for prompt in PROMPTS]

    async def collect(prompt):
        return [token.id async for token in llm.generate(prompt, max_new_tokens=8, temperature=1.0, seed=3)]

    async def all_of_them():
        return await asyncio.gather(*map(collect, PROMPTS))

    assert asyncio.run(all_of_them()) == expected


def test_several_readers_share_the_tokens_of_an_answer(llm):
    """Each token goes to one of them, and the iteration ends for all."""
    expected = llm.generate(PROMPTS[0], max_new_tokens=20).result().tokens

    async def collect(generation):
        return [token.id async for token in generation]

    async def tasks(generation):
        return await asyncio.wait_for(asyncio.gather(*(collect(generation) for _ in range(3))), 60)

    generation = llm.generate(PROMPTS[0], max_new_tokens=20)
    parts = asyncio.run(tasks(generation))
    assert sorted(itertools.chain(*parts)) == sorted(expected) and generation.tokens == expected
    generation, parts = llm.generate(PROMPTS[0], max_new_tokens=20), []
    threads = [threading.Thread(target=lambda: parts.extend(token.id for token in generation)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(parts) == sorted(expected) and not any(thread.is_alive() for thread in threads)


def test_event_loop_runs_while_the_model_computes(llm):
    """The GIL is free while the model runs."""

    async def main():
        ticks, generation = 0, llm.generate(PROMPTS[0], max_new_tokens=200, ignore_eos=True)

        async def tick():
            nonlocal ticks
            while generation.finish is None:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        tokens = [token async for token in generation]
        await ticking
        return len(tokens), ticks

    count, ticks = asyncio.run(main())
    assert count == 200 and ticks > 3


def test_cancelled_task_ends_its_answer(llm):
    async def main():
        generation = llm.generate(PROMPTS[0], ignore_eos=True)

        async def consume():
            async for _ in generation:
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    wait_until_idle(llm)
    assert llm.stats.generated_tokens < 10 * small_llm.CONTEXT


def test_error_in_async_for(llm):
    def fail(answer):
        if len(answer) == 3:
            raise ZeroDivisionError("mine")

    async def main():
        generation, tokens = llm.generate(PROMPTS[0], allowed_tokens=fail), []
        with pytest.raises(ZeroDivisionError, match="mine"):
            async for token in generation:
                tokens.append(token.id)
        assert generation.finish == "error" and generation.tokens == tokens and len(tokens) == 3

    asyncio.run(main())


def test_exception_of_a_callback_ends_only_its_answer(llm):
    def fail(answer):
        raise OSError("disk")

    bad = llm.generate(PROMPTS[0], allowed_tokens=fail)
    good = llm.generate(PROMPTS[1], max_new_tokens=5)
    with pytest.raises(OSError, match="disk"):
        bad.result()
    assert good.result().tokens == llm.generate(PROMPTS[1], max_new_tokens=5).result().tokens
    assert list(bad) == []


def test_callback_that_waits_for_its_own_engine_fails(chat_program, llm):
    def ask(asked: LLM):
        return lambda answer: asked.generate(PROMPTS[1], max_new_tokens=1, ignore_eos=True).result() and None

    with LLM.load(chat_program) as other:
        with pytest.raises(RuntimeError, match="chat.pte: a callback must not wait for an answer of the engine that"):
            llm.generate(PROMPTS[0], allowed_tokens=ask(llm)).result()
        answer = llm.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True, allowed_tokens=ask(other)).result()
        assert len(answer.tokens) == 2


def test_answer_starts_before_the_first_iteration(llm):
    generation = llm.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True)
    wait_until(lambda: generation.metrics.generated_tokens == 4)
    assert generation.tokens == [] and generation.finish is None
    assert len(generation.result().tokens) == 4


def test_dropped_answer_is_cancelled(llm):
    before = llm.stats.requests
    generation = llm.generate(PROMPTS[0], ignore_eos=True)
    next(generation)
    del generation
    gc.collect()
    wait_until(lambda: llm.stats.requests == before + 1)
    assert llm.stats.running == 0


def test_answer_keeps_its_model(chat_program, llm):
    generation = LLM.load(chat_program).generate(PROMPTS[0], max_new_tokens=5)
    gc.collect()
    assert generation.result().tokens == llm.generate(PROMPTS[0], max_new_tokens=5).result().tokens


def test_given_up_wait_does_not_cancel_the_answer(llm):
    gate = threading.Event()
    generation = llm.generate(PROMPTS[0], allowed_tokens=lambda answer: gate.wait(60) and None, max_new_tokens=3)

    async def first():
        await asyncio.wait_for(anext(generation), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(first())
    gate.set()
    assert generation.result().finish == "length"


def test_close(chat_program):
    with LLM.load(chat_program) as llm:
        generation = llm.generate(PROMPTS[0], ignore_eos=True)
        next(generation)
    assert generation.result().finish == "cancelled"
    llm.close()
    calls = [
        lambda: llm.generate(PROMPTS[0]),
        lambda: llm.score([5], [[6]]),
        lambda: llm.classify([[5]], [" a", " b"]),
        lambda: llm.save_prefix([5], "x"),
        lambda: llm.stats,
        lambda: llm.program.get("get_bos_id"),
        lambda: llm.program.takes("top_k"),
        lambda: llm.program.write_profile(os.devnull),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="chat.pte is closed"):
            call()
    # The tokenizer and the bytes of the tokens stay in memory.
    assert llm.text(llm.encode("Return the", special=False)) == "Return the" and llm.token_bytes(300)


def test_close_while_other_threads_call(chat_program):
    def use(call) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            while True:
                call()

    with LLM.load(chat_program) as llm:
        calls = [
            lambda: llm.generate(PROMPTS[0], max_new_tokens=1).result(),
            lambda: llm.stats,
            lambda: llm.score([5], [[6]]),
        ]
        with ThreadPoolExecutor() as pool:
            users = [pool.submit(use, call) for call in calls * 2]
            wait_until(lambda: llm.stats.requests > 10)
            llm.close()
            for user in users:
                user.result(60)


def test_engine_options_may_be_numbers_of_numpy(chat_program):
    options = {"chunk": np.int64(8), "queue_limit": np.int64(2**63 - 1), "chunk_seconds": np.float32(0.5)}
    with LLM.load(chat_program, **options, overlap=np.bool_(False)) as llm:
        assert len(llm.generate(PROMPTS[0], max_new_tokens=2).result().tokens) == 2
        assert len(llm.score([5], [[6]], logprobs=np.int64(2))[0].top_logprobs[0]) == 2


@pytest.mark.parametrize(
    "option", [{"queue_limit": 2**64}, {"chunk": 2**64}, {"queue_limit": -1}, {"chunk": 1.5}], ids=str
)
def test_engine_options_out_of_range_are_refused(chat_program, option):
    with pytest.raises(SettingError, match=f"{[*option][0]}: got"):
        LLM.load(chat_program, **option)


def test_full_queue(chat_program):
    gate = threading.Event()
    with LLM.load(chat_program, queue_limit=2) as llm:
        # The callback blocks the engine. Then it returns None, which allows every token.
        held = llm.generate(PROMPTS[0], allowed_tokens=lambda answer: gate.wait(60) and None, max_new_tokens=2)
        wait_until(lambda: llm.stats.running == 1)
        waiting = [llm.generate(prompt, max_new_tokens=2) for prompt in PROMPTS[:2]]
        with pytest.raises(BusyError, match="2"):
            llm.generate(PROMPTS[0])
        assert llm.stats.waiting == 2
        gate.set()
        assert all(len(answer.result().tokens) == 2 for answer in (held, *waiting))
        # A batch waits for room in the queue, and raises no BusyError.
        results = llm.generate_batch(PROMPTS, max_new_tokens=3)
        assert [len(result.tokens) for result in results] == [3] * len(PROMPTS)


def test_priority(chat_program):
    gate, order = threading.Event(), []
    with LLM.load(chat_program) as llm:
        held = llm.generate(PROMPTS[0], allowed_tokens=lambda answer: gate.wait(60) and None, max_new_tokens=1)
        wait_until(lambda: llm.stats.running == 1)
        answers = [
            llm.generate(
                PROMPTS[0], priority=priority, max_new_tokens=1, allowed_tokens=lambda _, p=priority: order.append(p)
            )
            for priority in (0, 5, -5, 5)
        ]
        gate.set()
        for answer in (held, *answers):
            answer.result()
    assert order == [5, 5, 0, -5]


def test_stats(chat_program):
    with LLM.load(chat_program) as llm:
        assert llm.rows == llm.stats.rows == 1 and llm.stats.requests == 0
        llm.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True, draft=0).result()
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS[0], allowed_tokens=lambda answer: 1 / 0).result()
        wait_until_idle(llm)
        stats = llm.stats
        assert (stats.requests, stats.failed, stats.generated_tokens) == (2, 1, 4)
        assert stats.prompt_tokens >= 3 and stats.busy_seconds > 0 and stats.steps >= 3


def test_a_request_is_freed_once_when_both_parties_leave_it_at_the_same_time():
    """At each bytecode instruction of the first call of `leave`, another thread may make the second call."""
    for moment in range(40):
        freed, handle, instructions = [], RequestHandle(), itertools.count()
        handle._library = SimpleNamespace(request_free=freed.append)

        def trace(frame, event, _, handle=handle, instructions=instructions, moment=moment):
            frame.f_trace_opcodes = True
            if event == "opcode" and next(instructions) == moment:
                handle.leave()  # not traced
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        handle.leave()
        sys.settrace(before)
        if next(instructions) <= moment:  # the first call was over
            handle.leave()
        assert len(freed) == 1, moment


def test_many_requests_leave_nothing_behind(chat_program):
    """Run 300 requests, 16 at once. A third is cancelled or dropped, and some fail. All others are complete."""

    async def request(number: int, llm: LLM) -> list[int] | None:
        fails = number % 7 == 0
        generation = llm.generate(
            PROMPTS[number % 10],
            seed=number % 20,
            temperature=1.0,
            ignore_eos=True,
            max_new_tokens=10,
            allowed_tokens=(lambda answer: 1 / (3 - len(answer)) and None) if fails else None,
        )
        async for token in generation:
            if number % 3 == 0 and len(generation.tokens) == number % 5 + 1:
                if number % 2:
                    generation.cancel()
                return None
        return generation.tokens

    async def worker(numbers: list[int], llm: LLM) -> list:
        return [await asyncio.gather(request(number, llm), return_exceptions=True) for number in numbers]

    async def main(llm: LLM) -> list:
        answers = await asyncio.gather(*(worker(list(range(first, 300, 16)), llm) for first in range(16)))
        return [answers[number % 16][number // 16][0] for number in range(300)]

    with LLM.load(chat_program) as llm:
        settings = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 10}
        expected = [llm.generate(PROMPTS[n % 10], seed=n, **settings).result().tokens for n in range(20)]
        threads = threading.active_count()
        answers = asyncio.run(main(llm))
        gc.collect()
        wait_until_idle(llm)
        assert threading.active_count() == threads and _requests == {}
    for number, answer in enumerate(answers):
        if number % 3 == 0:
            assert answer is None or isinstance(answer, ZeroDivisionError)
        elif number % 7 == 0:
            assert isinstance(answer, ZeroDivisionError)
        else:
            assert answer == expected[number % 20]


# Processes -----------------------------------------------------------------------------


def python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_an_answer_is_not_freed_at_the_exit_of_the_process(chat_program):
    """A daemon thread may still read it. Functions of atexit run in reverse order: this one runs after finalizers."""
    source = f"""
import atexit
atexit.register(lambda: print(answer._request.handle._is_last, answer.metrics == expected))
from executorch_mlx import LLM
answer = LLM.load({str(chat_program)!r}).generate("Return", max_new_tokens=2)
answer.result()
expected = answer.metrics
"""
    assert python(source) == "[True] True\n"


def test_generation_imports_no_torch(chat_program):
    """A process that generates from a text and answers a chat imports none of the large packages."""
    source = f"""
import sys
from executorch_mlx import LLM
llm = LLM.load({str(chat_program)!r})
llm.generate("Return", max_new_tokens=2, temperature=1.0, stop="x").result()
llm.chat([{{"role": "user", "content": "Return"}}], max_new_tokens=2).result()
large = ("torch", "transformers", "executorch", "mlx", "numpy", "asyncio")
print([name for name in large if name in sys.modules])"""
    assert python(source) == "[]\n"


def test_process_may_end_while_answers_run(chat_program):
    source = f"""
from executorch_mlx import LLM
llm = LLM.load({str(chat_program)!r})
answers = [llm.generate([5, n], ignore_eos=True) for n in range(4)]
print(len([next(answer) for answer in answers[:1]]))"""
    assert python(source) == "1\n"


def test_process_may_end_during_a_callback(chat_program):
    source = f"""
import threading, time
from executorch_mlx import LLM
llm, called = LLM.load({str(chat_program)!r}), threading.Event()
def mask(answer):
    called.set()
    time.sleep(0.2)
answer = llm.generate([5], allowed_tokens=mask)
called.wait()
print("end")"""
    assert python(source) == "end\n"


def test_model_may_be_freed_on_the_thread_of_its_engine(chat_program):
    """As by the garbage collector, which can run while ctypes makes the arguments of a callback."""
    source = f"""
import ctypes, time
from executorch_mlx import memory
from executorch_mlx.llm import binding
from executorch_mlx.llm.program import LLMProgram
program = LLMProgram({str(chat_program)!r})
program.start()
on_event = binding.OnEvent(lambda key, event: program.close() is None)
settings = binding.RequestOptions(prompt=binding.ids([5]), prompt_length=1, on_event=on_event)
request = ctypes.c_void_p()
program.call("engine_submit", ctypes.byref(settings), ctypes.byref(request))
binding.library().request_free(request)
while memory.get_active_memory():
    time.sleep(0.01)
print("end")"""
    assert python(source) == "end\n"


@pytest.mark.parametrize("end", ["del llm", "llm.close()"])
def test_ctrl_c_while_a_model_is_freed(chat_program, end):
    """The memory is freed, and KeyboardInterrupt raised, although Python ignores what a finalizer raises."""
    source = f"""
import os, signal, threading, time
from executorch_mlx import LLM, memory
llm, called = LLM.load({str(chat_program)!r}), threading.Event()
def mask(answer):
    called.set()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
answer = llm.generate([5], allowed_tokens=mask)
called.wait()
del answer
try:
    {end}
    time.sleep(60)
except KeyboardInterrupt:
    print(memory.get_active_memory())"""
    assert python(source) == "0\n"
