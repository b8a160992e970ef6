"""Requests that fail, clients that misbehave, and the limits of the server. None of them harms another request."""

import asyncio
import json
import logging
import socket
import threading
import time

import httpx
import openai
import pydantic
import pytest
import served
import small_llm
from executorch_mlx.serve import Settings
from executorch_mlx.serve.chat_request import ChatRequest
from executorch_mlx.serve.middleware import is_loopback
from executorch_mlx.serve.request import CompletionRequest
from executorch_mlx.serve.responses_request import ResponsesRequest
from executorch_mlx.serve.server import configuration
from executorch_mlx.serve.tokenize_request import DetokenizeRequest, TokenizeRequest
from served import NAME

BODY = {"model": NAME, "prompt": [5, 6], "max_tokens": 3, "seed": 1, "ignore_eos": True}


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "text, param, message",
    [
        ('"temperature": NaN', "temperature", "expected a finite number"),
        ('"temperature": 1e999', "temperature", "expected a finite number"),
        ('"top_p": -Infinity', "top_p", "expected a finite number"),
        (f'"user": "{"a" * 70_000}", "top_p": 1e999', "top_p", "expected a finite number"),  # a large body
        (f'"seed": {2**64}', "seed", "expected an integer of 64 bits"),
        (r'"prompt": "\ud800"', "prompt", "character 0 is a lone surrogate, expected Unicode text"),
        (
            r'"messages": [{"role": "user", "content": "a\udfff"}]',
            "messages.0.content",
            "character 1 is a lone surrogate",
        ),
        (r'"metadata": {"\ud800": ""}', "metadata", "a lone surrogate"),
    ],
)
def test_values_that_cannot_be_represented_return_400(server, text, param, message):
    for path in ("completions", "chat/completions"):
        headers = {"Content-Type": "application/json"}
        response = httpx.post(f"{server.url}/v1/{path}", content=f'{{"model": "{NAME}", {text}}}', headers=headers)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param and message in error["message"]


MANY = range(1000)
MESSAGE = {"role": "user", "content": "x"}
CHAT = {"model": NAME, "messages": [MESSAGE]}


@pytest.mark.parametrize(
    "kind, body",
    [
        *((CompletionRequest, {"model": NAME, "prompt": [item for _ in MANY]}) for item in (1.5, [], [None], {})),
        (ChatRequest, CHAT | {"messages": [0 for _ in MANY]}),
        (ChatRequest, CHAT | {"messages": [{"role": "assistant", "tool_calls": [0 for _ in MANY]}]}),
        (ChatRequest, CHAT | {"tools": [{} for _ in MANY]}),
        (ChatRequest, CHAT | {"stop": [0 for _ in MANY]}),
        (ChatRequest, CHAT | {"logit_bias": {str(i): "" for i in MANY}}),
        (ChatRequest, CHAT | {"metadata": {str(i): 0 for i in MANY}}),
        (ResponsesRequest, {"model": NAME, "input": [0 for _ in MANY]}),
        (ResponsesRequest, {"model": NAME, "input": "x", "include": [0 for _ in MANY]}),
        (TokenizeRequest, {"model": NAME, "tools": [0 for _ in MANY], "messages": [0 for _ in MANY]}),
        (DetokenizeRequest, {"model": NAME, "tokens": ["" for _ in MANY]}),
    ],
)
def test_body_with_many_errors_reports_few(kind, body):
    """A body of 1 MiB could have a million of them, which would take all memory."""
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate(body)
    assert 0 < caught.value.error_count() <= 8


def test_the_log_names_a_few_of_many_unknown_fields(server, caplog):
    unknown = {f"field{i}\n{'x' * 200}": 1 for i in MANY}
    body = CHAT | {"messages": [MESSAGE | unknown], "max_tokens": 1} | unknown
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "executorch_mlx.serve"]
    assert line.count("field") == 17 and "\n" not in line and len(line) < 3000  # one of them in "unknown fields"


@pytest.mark.parametrize("fault", ["exception", "empty mask", "wrong mask"])
def test_failing_request_ends_alone(server, client, llm, fault):
    """A mask function that fails while another answer runs."""
    import numpy

    def fail(answer):
        if len(answer) < 2:
            return None
        if fault == "exception":
            raise RuntimeError("the mask is broken")
        return numpy.zeros(1 if fault == "wrong mask" else small_llm.VOCABULARY // 32, numpy.int32)

    expected = llm.generate([5, 6], seed=1, temperature=1.0, max_new_tokens=12, ignore_eos=True).result().text
    generate = server.llm.generate

    def generate_with_fault(ids, **options):
        if ids == [9]:
            options["allowed_tokens"] = fail
        return generate(ids, **options)

    server.llm.generate = generate_with_fault
    try:
        results = {}

        def complete(prompt):
            body = BODY | {"prompt": prompt, "max_tokens": 12}
            results[str(prompt)] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        threads = [threading.Thread(target=complete, args=(prompt,)) for prompt in ([9], [5, 6])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results["[9]"].status_code == 500 and results["[9]"].json()["error"]["type"] == "server_error"
        assert results["[5, 6]"].json()["choices"][0]["text"] == expected
    finally:
        server.llm.generate = generate


def test_overlong_lines_and_bodies_are_refused(chat_program):
    with served.serve(chat_program, max_body_bytes=1000) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for text in (b"GET /" + b"x" * 200_000, b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000):
            with socket.create_connection(address, timeout=30) as connection:
                try:
                    connection.sendall(text)
                    answer = connection.recv(100)
                except OSError:  # the server has closed the connection
                    answer = b""
                assert answer[:12] in (b"HTTP/1.1 400", b"")
        body = json.dumps(BODY | {"prompt": "x" * 1000})
        headers = {"Content-Type": "application/json"}
        for content in (body, iter([body[:500].encode(), body[500:].encode()])):  # with a length, and in chunks
            response = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
            assert response.status_code == 413 and "expected at most 1000 bytes" in response.json()["error"]["message"]
        assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200


def test_body_that_does_not_arrive(chat_program):
    with served.serve(chat_program, body_seconds=0.3) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            connection.sendall(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_answer_that_takes_too_long(chat_program):
    with served.serve(chat_program, request_seconds=0.5) as server:
        server.delay = 0.05
        body = {"model": NAME, "prompt": [5], "max_tokens": 500, "extra_body": {"ignore_eos": True}}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="took too long") as caught:
                client.completions.create(**body)
            assert caught.value.status_code == 504 and caught.value.code == "timeout"
            with pytest.raises(openai.APIError, match="took too long"):
                list(client.completions.create(**body, stream=True))
        until(lambda: server.llm.stats.running == 0)


def test_stream_without_events_gets_comments(chat_program):
    """Clients close a connection on which nothing comes. They skip comments."""
    body = {"model": NAME, "prompt": [5], "max_tokens": 3, "seed": 1, "stream": True}
    with served.serve(chat_program, ping_seconds=0.02) as server:
        server.delay = 0.2
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            read = [chunk.model_dump(exclude_unset=True) for chunk in client.completions.create(**body)]
        *events, done, end = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text.split("\n\n")
    comments = [event for event in events if event.startswith(":")]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event not in comments]
    assert comments and (done, end) == ("data: [DONE]", "")
    assert [chunk["choices"] for chunk in chunks] == [chunk["choices"] for chunk in read]


def test_client_that_stops_reading_ends_its_answer_alone(chat_program):
    """The stream is larger than the buffers of the connection."""
    with served.serve(chat_program, send_seconds=0.5) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        body = {"model": NAME, "prompt": [[5]] * 30, "max_tokens": 900, "stream": True, "ignore_eos": True}
        body = json.dumps(body | {"logprobs": 20})
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(address)
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            until(lambda: len(server.generations) == 30)
            # This request waits until the 30 answers are dropped.
            other = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
            assert other.json()["usage"]["completion_tokens"] == 3
            dropped = server.generations[:30]
            assert sum(len(generation.tokens) for generation in dropped) < 30 * 900
            until(lambda: all(generation.finish for generation in dropped))


def test_api_key(chat_program):
    with served.serve(chat_program, api_key="secret-ä") as server:
        paths = {"/v1/models": 401, "/metrics": 401, "/tokenize": 401, "/health": 200, "/": 200, "/openapi.json": 401}
        assert {path: httpx.get(server.url + path).status_code for path in paths} == paths
        for header in ("Bearer wrong", "secret-ä", "Basic secret-ä", "Bearer", "Bearer secret"):
            response = httpx.get(f"{server.url}/v1/models", headers={"Authorization": header.encode()})
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer secret-ä".encode()}
        assert httpx.get(f"{server.url}/v1/models", headers=good).status_code == 200


def test_only_loopback_addresses_are_local():
    hosts = ("127.0.0.1", "127.8.0.1", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "example.org", "")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 5


def test_health_fails_without_progress(chat_program):
    with served.serve(chat_program, stall_seconds=0.3) as server:
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
        gate = threading.Event()
        answer = server.llm.generate([5], allowed_tokens=lambda answer: gate.wait(60) and None, max_new_tokens=3)
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        report = httpx.get(f"{server.url}/health").json()
        assert report["status"] == "stalled" and report["running"] == 1 and report["stalled_seconds"][NAME] >= 0.3
        gate.set()
        answer.result()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)


def test_access_log_has_numbers_and_no_text(server, caplog):
    with caplog.at_level(logging.INFO, "executorch_mlx.access"):
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "a secret word"}],
            "max_tokens": 4,
            "user": "me",
        }
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"seed": 1, "ignore_eos": True})
        httpx.post(f"{server.url}/v1/chat/completions", json=body | {"messages": "a secret word"})
        until(lambda: len(caplog.records) == 2)
    lines = [json.loads(record.message) for record in caplog.records]
    assert "secret" not in caplog.text and response.json()["choices"][0]["message"]["content"] not in caplog.text
    assert [line["status"] for line in lines] == [200, 400]
    assert {"method": "POST", "path": "/v1/chat/completions", "model": NAME, "completion_tokens": 4}.items() <= lines[
        0
    ].items()
    assert lines[0]["request_id"] == response.headers["x-request-id"] and lines[0]["finish"] == ["length"]


def test_graceful_shutdown_finishes_running_answers(chat_program):
    """The server takes no more requests, and the answer that runs comes to its end."""
    with served.serve(chat_program, grace_seconds=60) as server:
        server.delay = 0.01
        body = BODY | {"max_tokens": 100, "stream": True}

        async def run():
            async with httpx.AsyncClient(timeout=60) as http:
                async with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                    lines = response.aiter_lines()
                    await anext(lines)
                    server.app.state.service.is_draining = True
                    refused = await http.post(f"{server.url}/v1/completions", json=BODY)
                    assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
                    return [line async for line in lines if line]

        assert asyncio.run(run())[-1] == "data: [DONE]"
        assert len(server.generations[0].tokens) == 100


def test_settings_have_safe_defaults():
    settings = Settings()
    assert configuration(None, settings).timeout_keep_alive > 60  # proxies keep idle connections for up to 60 s
    assert settings.max_body_bytes <= 64 * 2**20 and settings.body_seconds and settings.send_seconds
