"""Many clients at once, some of which disconnect."""

import asyncio
import gc
import sys
import threading
import time
import weakref

import openai
import pytest
import served
import small_llm
from executorch_mlx.llm import LLM, Generation
from executorch_mlx.serve.worker import Busy, Job, Worker
from served import NAME

COUNT = 20
TOKENS = 12


def until(condition) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def stream(client: openai.AsyncOpenAI, number: int) -> str | None:
    """Returns the text of stream `number`. If it is odd, the client disconnects after three chunks: returns None."""
    disconnects = number % 2 == 1
    chunks = await client.completions.create(
        model=NAME,
        prompt=[5, number + 10],
        seed=number,
        max_tokens=small_llm.CONTEXT if disconnects else TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    texts = []
    async for chunk in chunks:
        texts.append(chunk.choices[0].text)
        if disconnects and len(texts) == 3:
            await chunks.close()
            return None
    return "".join(texts)


async def streams(url: str) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(stream(client, number) for number in range(COUNT)))


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no /proc, from which the test reads its memory")
def test_disconnected_streams_are_dropped_and_the_others_complete(chat_program):
    alone = LLM.load(chat_program)
    expected = [
        alone.generate([5, n + 10], seed=n, temperature=1.0, max_new_tokens=TOKENS, ignore_eos=True).result().text
        for n in range(0, COUNT, 2)
    ]
    assert all(expected)
    with served.serve(chat_program) as server:
        threads, memory = [], []
        for _ in range(3):
            texts = asyncio.run(streams(server.url))
            assert texts[::2] == expected and texts[1::2] == [None] * (COUNT // 2)
            until(lambda: server.worker.count() == (0, 0))
            dropped = [g for g in server.generations if g.finish == "cancelled"]
            assert len(server.generations) == COUNT and len(dropped) == COUNT // 2
            assert all(3 <= len(g.tokens) < small_llm.CONTEXT - 10 for g in dropped)
            threads.append(threading.active_count())
            # The server has released all answers.
            answers = [weakref.ref(generation) for generation in server.generations]
            server.generations.clear()
            del dropped
            gc.collect()
            assert [answer() for answer in answers] == [None] * COUNT
            memory.append(resident_bytes())
    assert threads[0] == threads[1] == threads[2]
    # Typical growth is 0.2 MB. A leak of one KV cache (0.5 MB) per stream would be 20 MB.
    assert memory[2] - memory[0] < 4e6


def test_disconnected_client_leaves_the_queue(server, llm):
    """A request without streaming."""

    async def disconnect():
        gate = threading.Event()
        running = server.worker.submit(held(llm, gate))
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            waiting = asyncio.create_task(client.completions.create(model=NAME, prompt=[7, 8]))
            while server.worker.count() != (1, 1):
                await asyncio.sleep(0.01)
            waiting.cancel()
            while server.worker.count() != (1, 0):  # while the model is still held
                await asyncio.sleep(0.01)
        running.cancel()
        gate.set()
        await collected(running)

    asyncio.run(asyncio.wait_for(disconnect(), 60))


# The queue -----------------------------------------------------------------------------


def held(llm: LLM, gate: threading.Event) -> Generation:
    """A generation that waits for `gate` before every token."""
    return llm.generate([5], allowed_tokens=lambda answer: gate.wait(60) and None, max_new_tokens=50)


async def collected(job: Job) -> list[int]:
    return [token.id async for token in job.tokens()]


def test_queue(llm):
    """One job runs, `limit` jobs wait, and one more is rejected. A cancelled job makes room at once."""

    async def submit_jobs():
        gate, worker = threading.Event(), Worker(limit=2)
        try:
            running = worker.submit(held(llm, gate))
            until(lambda: worker.count() == (1, 0))
            second, third = (worker.submit(llm.generate([6, n], max_new_tokens=3)) for n in (1, 2))
            with pytest.raises(Busy, match="the queue is full: 2 requests are waiting"):
                worker.submit(llm.generate([7]))
            second.cancel()
            assert worker.count() == (1, 1)
            assert await collected(second) == [] and second.generation.finish == "cancelled"
            fourth = worker.submit(llm.generate([8], max_new_tokens=3))
            running.cancel()
            gate.set()
            assert await collected(running) == [] and running.generation.finish == "cancelled"
            for job, prompt in ((third, [6, 2]), (fourth, [8])):
                expected = llm.generate(prompt, max_new_tokens=3).result().tokens
                assert len(expected) == 3 and await collected(job) == expected
        finally:
            gate.set()
            worker.close()
        with pytest.raises(Busy, match="shutting down"):
            worker.submit(llm.generate([7]))

    asyncio.run(submit_jobs())


def test_close_cancels_running_and_waiting_jobs(llm):
    async def closing():
        gate, worker = threading.Event(), Worker(limit=2)
        running, waiting = (worker.submit(held(llm, gate)) for _ in range(2))
        until(lambda: worker.count() == (1, 1))
        worker.close()
        gate.set()
        assert await collected(running) == [] and await collected(waiting) == []
        assert running.generation.finish == waiting.generation.finish == "cancelled"

    asyncio.run(closing())


def test_failed_step_raises_for_its_client_only(llm):
    async def failing():
        worker = Worker(limit=1)
        job = worker.submit(llm.generate([5], allowed_tokens=lambda answer: [1.5]))
        with pytest.raises(ValueError, match="allowed_tokens: got"):
            await collected(job)
        assert job.generation.finish == "error"
        next_job = worker.submit(llm.generate([5], max_new_tokens=2))
        expected = llm.generate([5], max_new_tokens=2).result().tokens
        assert len(expected) == 2 and await collected(next_job) == expected
        worker.close()

    asyncio.run(failing())


def test_full_queue_returns_503(chat_program):
    with served.serve(chat_program, queue=0) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="the queue is full: 0 requests are waiting") as caught:
                client.completions.create(model=NAME, prompt=[5])
    assert caught.value.status_code == 503 and caught.value.code == "overloaded"
