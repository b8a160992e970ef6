"""Damaged request bodies: none gives HTTP 500, and none hangs.

A seeded generator replaces, removes and adds values in valid bodies. The valid bodies have every field of the OpenAPI
schema. `LONG=1 pytest` sends 10,000 bodies instead of 300, and also tests 200 clients with streams.
"""

import asyncio
import copy
import json
import os
import random
import sys
import time
from collections import Counter

import openai
import pytest
import served
from executorch_mlx.llm import LLM
from executorch_mlx.serve import create_app
from executorch_mlx.serve.in_process import post, running
from served import NAME

LONG = bool(os.environ.get("LONG"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
COMMON = {
    "model": NAME,
    "stream": False,
    "stop": ["x"],
    "n": 2,
    "metadata": {"a": "b"},
    "ignore_eos": False,
    "priority": 0,
    "temperature": 1.0,
    "top_p": 0.9,
    "seed": 3,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.0},
    "user": "u",
    "stream_options": None,
    "store": True,
    "prompt_cache_options": {"mode": "implicit"},
    "structured_outputs": None,
    "min_tokens": 0,
    "stop_token_ids": [7],
    "allowed_token_ids": None,
    "bad_words": [],
    "guided_json": None,
    "guided_regex": "a",
    "guided_choice": None,
    "guided_grammar": None,
    "prompt_logprobs": None,
    "grammar": "",
    "ebnf": None,
    "regex": "",
    "json_schema": None,
    "enable_thinking": False,
    "parse_special": False,
    "keep_alive": "5m",
}
BODIES = {
    "/v1/chat/completions": COMMON
    | {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "d"},
        ],
        "max_tokens": 2,
        "max_completion_tokens": 2,
        "thinking": {"type": "disabled"},
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        "chat_template_kwargs": {"hint": "x"},
        "reasoning_effort": None,
        "add_generation_prompt": None,
        "continue_final_message": False,
    },
    "/v1/completions": COMMON
    | {
        "prompt": ["a", "b"],
        "max_tokens": 2,
        "logprobs": 1,
        "best_of": None,
        "echo": False,
        "suffix": None,
        "add_special_tokens": True,
        "response_format": {"type": "json_object"},
        "structured_outputs": {"json": SCHEMA, "regex": None, "choice": ["a"], "grammar": 'root ::= "a"'},
    },
    "/v1/responses": {
        "model": NAME,
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"type": "reasoning"},
        ],
        "instructions": "i",
        "max_output_tokens": 2,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_logprobs": 1,
        "stream": False,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "metadata": {"a": "b"},
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "seed": 1,
        "parallel_tool_calls": True,
        "include": ["message.output_text.logprobs"],
        "stop": ["x"],
        "truncation": "disabled",
        "min_tokens": 1,
        "bad_words": ["a"],
        "allowed_token_ids": None,
    },
    "/v1/messages": {
        "model": NAME,
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "d", "is_error": True}],
            },
            {"role": "system", "content": "e"},
        ],
        "system": "s",
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 1,
        "stop_sequences": ["x"],
        "stream": False,
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "min_tokens": 1,
        "bad_words": ["a"],
        "stop_token_ids": [7],
        "structured_outputs": None,
    },
    "/tokenize": {
        "model": NAME,
        "prompt": "a",
        "messages": None,
        "tools": None,
        "add_special_tokens": True,
        "return_token_strs": True,
        "chat_template_kwargs": None,
        "add_generation_prompt": None,
        "continue_final_message": False,
    },
    "/detokenize": {"model": NAME, "tokens": [5, 6]},
}
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    2**31,
    2**63,
    -(2**63),
    2**64 - 1,
    2**70,
    0.5,
    -0.5,
    1e-300,
    1e300,
    1e38,
    "",
    "a",
    "\0",
    "\ud800",
    "a" * 5000,
    "é漢\U0001f600",
    "auto",
    "required",
    [],
    {},
    [[]],
    [None],
    ["a", 5],
    {"a": None},
    {"type": "text"},
    {"type": "object"},
    {"$ref": "#"},
    {"type": "string", "pattern": "("},
    {"5": 1e300},
    {"99999": 1},
    {"type": "function"},
    [0] * 2000,
    [{"role": "user", "content": "x"}],
]
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def places(value, path=()):
    """The paths to all parts of a value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def damaged(path: str, draw: random.Random) -> dict:
    """Return a copy of the body for `path` with random changes."""
    body = copy.deepcopy(BODIES[path])
    for key in draw.sample(sorted(body), draw.randint(0, len(body) - 2)):
        if key not in ("model", "messages", "prompt", "input"):
            del body[key]
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        found = [place for place in places(body) if place]
        if not found:
            break
        *parents, last = draw.choice(found)
        target = body
        for key in parents:
            target = target[key]
        action = draw.random()
        if action < 0.7:
            target[last] = copy.deepcopy(draw.choice(VALUES))
        elif action < 0.85:
            del target[last]
        elif isinstance(target, dict):
            target[draw.choice(("extra", "type", "name", "content", "x" * 300))] = copy.deepcopy(draw.choice(VALUES))
    for key in LENGTHS:  # answers stay short
        is_long = body.get(key) in (None, -1) or (isinstance(body[key], (int, float)) and body[key] > 4)
        if key in BODIES[path] and is_long:
            body[key] = 2
    return body


def test_valid_bodies_have_every_field_of_the_openapi_schema(chat_program):
    app = create_app(LLM.load(chat_program), name=NAME)
    schemas = app.openapi()["components"]["schemas"]
    for path, name in (("/v1/chat/completions", "ChatRequest"), ("/v1/completions", "CompletionRequest")):
        assert set(schemas[name]["properties"]) <= {*BODIES[path], "stream_options"}


def test_damaged_bodies_get_an_answer_or_a_clear_error(chat_program):
    draw, statuses = random.Random(5), {}
    count = 10_000 if LONG else 300

    async def send_all():
        async with running(create_app(LLM.load(chat_program), name=NAME)) as app:
            for number in range(count):
                path = draw.choice(sorted(BODIES))
                body = damaged(path, draw)
                response = await asyncio.wait_for(post(app, path, json.dumps(body).encode()), 120)
                statuses[response.status] = statuses.get(response.status, 0) + 1
                assert response.status in (200, 400, 404), (number, path, body, response.body)
                if response.status != 200:
                    error = json.loads(response.body)["error"]
                    kinds = ("invalid_request_error", "not_found_error")  # the second one is Anthropic's for 404
                    assert error["message"] and error["type"] in kinds, (number, path, body)

    asyncio.run(send_all())
    print(statuses)
    assert statuses[200] > count / 20 and statuses[400] > count / 4


@pytest.mark.skipif(not LONG or sys.platform == "darwin", reason="takes a minute, and reads /proc")
def test_200_streams_for_30_seconds_of_which_half_are_dropped(chat_program):
    """Each of 200 clients opens one stream after the other. Those with odd numbers disconnect after five chunks."""
    begin, seconds = time.monotonic(), 30
    completed, dropped, memory = Counter(), Counter(), []

    async def stream(client, number):
        chunks = await client.completions.create(
            model=NAME, prompt=[5, number], seed=number, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        count = 0
        async for _ in chunks:
            count += 1
            if number % 2 and count == 5:
                await chunks.close()
                return dropped.update([number])
        assert count > 10, number
        completed.update([number])

    async def one_after_the_other(client, number):
        while time.monotonic() < begin + seconds:
            await stream(client, number)

    async def watch():
        while time.monotonic() < begin + seconds:
            await asyncio.sleep(1)
            memory.append(served.resident_bytes())
            server.generations.clear()

    async def run(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            await asyncio.gather(watch(), *(one_after_the_other(client, number) for number in range(200)))

    with served.serve(chat_program, queue=400) as server:
        asyncio.run(run(server.url))
    megabytes = [bytes // 2**20 for bytes in memory]
    print(f"{completed.total()} streams complete, {dropped.total()} dropped, MiB by second: {megabytes}")
    assert set(completed) == set(range(0, 200, 2)) and set(dropped) == set(range(1, 200, 2))
    assert megabytes[-1] - megabytes[len(megabytes) // 3] < 16
