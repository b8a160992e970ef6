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
from served import NAME

STREAMS = 20
TOKENS = 12


def until(condition) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def threads_outside_pool() -> int:
    """The number of threads besides those of asyncio's pool, which starts them on demand up to a fixed number."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


async def stream(client: openai.AsyncOpenAI, number: int) -> str | None:
    """Return the text of stream `number`. If `number` is odd, disconnects after three chunks and returns None."""
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
        return await asyncio.gather(*(stream(client, number) for number in range(STREAMS)))


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no /proc, from which the test reads its memory")
def test_disconnected_streams_are_dropped_and_the_others_complete(chat_program):
    alone = LLM.load(chat_program)
    expected = [
        alone.generate([5, n + 10], seed=n, temperature=1.0, max_new_tokens=TOKENS, ignore_eos=True).result().text
        for n in range(0, STREAMS, 2)
    ]
    assert all(expected)
    with served.serve(chat_program) as server:
        server.delay = 0.003
        threads, memory = [], []
        for _ in range(3):
            texts = asyncio.run(streams(server.url))
            assert texts[::2] == expected and texts[1::2] == [None] * (STREAMS // 2)
            until(lambda: running_and_waiting(server.llm) == (0, 0))
            dropped = [g for g in server.generations if g.finish == "cancelled"]
            assert len(server.generations) == STREAMS and len(dropped) == STREAMS // 2
            assert all(3 <= g.metrics.generated_tokens < small_llm.CONTEXT - 10 for g in dropped)
            threads.append(threads_outside_pool())
            # The server has released all answers.
            answers = [weakref.ref(generation) for generation in server.generations]
            server.generations.clear()
            del dropped
            gc.collect()
            assert [answer() for answer in answers] == [None] * STREAMS
            memory.append(served.resident_bytes())
    assert threads[0] == threads[1] == threads[2]
    # Typical growth is 0.2 MB. A leak of one KV cache (0.5 MB) per stream would be 20 MB.
    assert memory[2] - memory[0] < 4e6


def running_and_waiting(llm: LLM) -> tuple[int, int]:
    """The numbers of running and of waiting requests."""
    return llm.stats.running, llm.stats.waiting


def held_answer(llm: LLM, gate: threading.Event) -> Generation:
    """An answer that waits for `gate` before every token."""
    return llm.generate([5], allowed_tokens=lambda answer: gate.wait(60) and None, max_new_tokens=50)


def test_disconnected_client_leaves_the_queue(server):
    """The client does not stream, so the server sends it nothing before the answer is complete."""

    async def disconnect():
        gate = threading.Event()
        running = held_answer(server.llm, gate)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            waiting = asyncio.create_task(client.completions.create(model=NAME, prompt=[7, 8]))
            while running_and_waiting(server.llm) != (1, 1):
                await asyncio.sleep(0.01)
            waiting.cancel()
            while server.generations[-1].finish is None:  # while `gate` still holds the model
                await asyncio.sleep(0.01)
        running.cancel()
        gate.set()
        assert running.result().finish == "cancelled"
        until(lambda: running_and_waiting(server.llm) == (0, 0))
        assert server.generations[-1].metrics.generated_tokens == 0

    asyncio.run(asyncio.wait_for(disconnect(), 60))


def test_shutdown_cancels_running_and_waiting_answers(chat_program):
    gate, results = threading.Event(), []

    def request(url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="the server is shutting down") as caught:
                client.completions.create(model=NAME, prompt=[7, 8])
            results.append(caught.value.status_code)

    with served.serve(chat_program) as server:
        running = held_answer(server.llm, gate)
        threads = [threading.Thread(target=request, args=(server.url,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: running_and_waiting(server.llm) == (1, 2))
        server.app.state.answers.close()
        gate.set()
        for thread in threads:
            thread.join()
        running.close()
    assert results == [503, 503]


def test_full_queue_returns_503(chat_program):
    gate = threading.Event()
    with served.serve(chat_program, queue=1) as server:
        answers = [held_answer(server.llm, gate)]
        until(lambda: running_and_waiting(server.llm) == (1, 0))
        answers.append(held_answer(server.llm, gate))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="queue") as caught:
                client.completions.create(model=NAME, prompt=[5])
            assert caught.value.status_code == 503 and caught.value.code == "overloaded"
            for answer in answers:
                answer.cancel()
            gate.set()
            until(lambda: running_and_waiting(server.llm) == (0, 0))
            assert client.completions.create(model=NAME, prompt=[5], max_tokens=2).usage.completion_tokens <= 2


@pytest.mark.parametrize("stream", [False, True])
def test_choices_that_find_the_queue_full_wait_for_earlier_ones(chat_program, llm, stream):
    """One answer runs and one waits in the queue. The other five wait in the server."""
    body = {"model": NAME, "seed": 1, "max_tokens": 8, "stream": stream, "extra_body": {"ignore_eos": True}}
    with served.serve(chat_program, queue=1) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for fields in ({"prompt": [5, 6], "n": 7}, {"prompt": [[token] for token in range(5, 12)]}):
                answer, texts = client.completions.create(**body, **fields), [""] * 7
                for choice in (choice for part in answer for choice in part.choices) if stream else answer.choices:
                    texts[choice.index] += choice.text
                for index, text in enumerate(texts):
                    prompt, seed = ([5, 6], 1 + index * 2**32) if "n" in fields else ([5 + index], 1)
                    options = {"seed": seed, "temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
                    assert text == llm.generate(prompt, **options).result().text
            with pytest.raises(openai.BadRequestError, match="prompt: id -1 is outside the vocabulary"):
                client.completions.create(**body, prompt=[[5]] * 6 + [[-1]])


def test_choices_that_wait_end_with_their_request(chat_program):
    """While choices of a request wait, others get HTTP 503. If its client disconnects, the choices never start."""

    async def disconnect():
        gate = threading.Event()
        with served.serve(chat_program, queue=2) as server:
            running = held_answer(server.llm, gate)
            until(lambda: running_and_waiting(server.llm) == (1, 0))
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                waiting = asyncio.create_task(client.completions.create(model=NAME, prompt=[7, 8], n=5))
                while running_and_waiting(server.llm) != (1, 2):
                    await asyncio.sleep(0.01)
                with pytest.raises(openai.InternalServerError, match="queue") as caught:
                    await client.completions.create(model=NAME, prompt=[5])
                assert caught.value.status_code == 503 and caught.value.code == "overloaded"
                assert not waiting.done()
                waiting.cancel()
                while not all(generation.finish == "cancelled" for generation in server.generations[1:]):
                    await asyncio.sleep(0.01)
            running.cancel()
            gate.set()
            until(lambda: running_and_waiting(server.llm) == (0, 0))
            assert len(server.generations) == 3 and server.llm.stats.requests == 3

    asyncio.run(asyncio.wait_for(disconnect(), 60))


def test_choices_that_wait_end_at_the_shutdown(chat_program):
    gate = threading.Event()
    with served.serve(chat_program, queue=2) as server:
        running = held_answer(server.llm, gate)
        until(lambda: running_and_waiting(server.llm) == (1, 0))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            results = []

            def request():
                with pytest.raises(openai.InternalServerError, match="the server is shutting down") as caught:
                    client.completions.create(model=NAME, prompt=[7, 8], n=5)
                results.append(caught.value.status_code)

            thread = threading.Thread(target=request)
            thread.start()
            until(lambda: running_and_waiting(server.llm) == (1, 2))
            server.app.state.answers.close()
            running.close()
            gate.set()
            thread.join()
        until(lambda: running_and_waiting(server.llm) == (0, 0))
        assert results == [503] and len(server.generations) == 3
