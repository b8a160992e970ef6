"""Several choices, log probabilities, echoes, the tokens of texts, and metrics."""

import asyncio
import threading
import time

import numpy
import openai
import pytest
import served
import small_llm
from executorch_mlx.serve.delta import Offsets
from scripted import (
    MESSAGES,
    chat,
    scripted_server,  # noqa: F401 (fixture)
)
from served import NAME


def test_choices_draw_with_different_seeds(client):
    answer = chat(client, tools=[], n=3, max_tokens=6, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in answer.choices]
    assert len({*texts}) == 3 and [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts[0] == chat(client, tools=[], max_tokens=6).choices[0].message.content
    assert answer.usage.completion_tokens <= 18
    chunks = [chunk.choices[0] for chunk in chat(client, tools=[], n=3, max_tokens=6, stream=True)]
    for index, text in enumerate(texts):
        assert "".join(chunk.delta.content or "" for chunk in chunks if chunk.index == index) == text


@pytest.mark.parametrize(
    "text, content",
    [
        ("<think>\nIt < rains.\n</think>\n\nRain < </b> it.", "Rain < </b> it."),
        ('I call:<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>', "I call:"),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call> x', None),
        ("<think>It rains.", ""),
    ],
    ids=["reasoning", "call", "malformed call", "only reasoning"],
)
def test_log_probabilities_are_those_of_the_content(client, says, text, content):
    """The tags are several tokens each. In a stream, a token comes with the beginning of its text."""
    says(text)
    choice = chat(client, logprobs=True).choices[0]
    content = text if content is None else content
    assert "".join(entry.token for entry in choice.logprobs.content) == (choice.message.content or "") == content
    tokens = text = ""
    for chunk in chat(client, logprobs=True, stream=True):
        entries = chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
        tokens += "".join(entry.token for entry in entries)
        text += chunk.choices[0].delta.content or ""
        assert tokens.startswith(text)  # the text after "<" may be held back
    assert tokens == text == content


def test_log_probabilities(client, server):
    choice = chat(client, tools=[], max_tokens=5, logprobs=True, top_logprobs=3, temperature=0).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    streamed = [
        entry
        for chunk in chat(client, tools=[], max_tokens=5, logprobs=True, temperature=0, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]
    answer = client.completions.create(model=NAME, prompt=["Return", "The"], n=2, max_tokens=3, logprobs=2, seed=1)
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [3] * 4
    assert answer.choices[0].logprobs.text_offset[0] == 0
    for token, top in zip(answer.choices[0].logprobs.tokens, answer.choices[0].logprobs.top_logprobs):
        assert token in top and len(top) in (2, 3)  # the two most likely tokens, and the drawn one


def test_names_and_places_of_tokens_that_are_parts_of_characters(client, server, says):
    text = "a é😀<s>b\n"
    says(text)
    fields = {"model": NAME, "prompt": "Return", "max_tokens": 40, "logprobs": 20}
    (choice,) = client.completions.create(**fields).choices
    given = choice.logprobs
    assert choice.text == "a é😀b\n"  # a special token has no text
    data, place = b"", {}  # the first byte of each character -> its place
    for index, character in enumerate(choice.text):
        place |= dict.fromkeys(range(len(data), len(data) + len(character.encode())), index)
        data += character.encode()
    position, pieces = 0, []
    for token, offset in zip(given.tokens, given.text_offset, strict=True):
        if token == "<s>":
            assert offset == place[position]
            continue
        is_part = token.startswith("bytes:")
        piece = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if is_part else token.encode()
        assert offset == place[position] and (is_part or choice.text[offset:].startswith(token))
        position += len(piece)
        pieces.append(piece)
    assert b"".join(pieces) == data and any(token.startswith("bytes:\\x") for token in given.tokens)
    assert {len(top) for top in given.top_logprobs} <= {20, 21}
    chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**fields, stream=True)]
    assert [offset for chunk in chunks if chunk for offset in chunk.text_offset] == given.text_offset
    assert [token for chunk in chunks if chunk for token in chunk.tokens] == given.tokens


def test_places_of_tokens_with_invalid_bytes():
    random = numpy.random.default_rng(0)
    for _ in range(200):
        offsets, before = Offsets(), b""
        for _ in range(20):
            data = bytes(random.choice([0x41, 0xC3, 0xA9, 0xE0, 0x9F, 0xF0, 0x98, 0x80, 0xFF], random.integers(4)))
            whole = len((before + data[:1]).decode(errors="replace"))
            assert not data or offsets.take(data) == whole - 1
            before += data


def test_answer_that_begins_with_the_stop_id_has_empty_log_probabilities(client, server, says):
    says("")
    (choice,) = chat(client, tools=[], logprobs=True, top_logprobs=2).choices
    assert choice.message.content == "" and choice.logprobs.content == []
    (choice,) = client.completions.create(model=NAME, prompt="Return", logprobs=2).choices
    assert choice.text == "" and choice.logprobs.tokens == choice.logprobs.text_offset == []
    assert client.completions.create(model=NAME, prompt="Return").choices[0].logprobs is None


def test_more_log_probabilities_than_those_of_the_head_return_400(logprob_program):
    with served.serve(logprob_program) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        message = "logprobs: got 5, expected at most 4, the number that the program was exported with"
        for field, request in (
            ("top_logprobs", lambda k: chat(client, tools=[], max_tokens=1, logprobs=True, top_logprobs=k)),
            ("top_logprobs", lambda k: client.responses.create(model=NAME, input="x", top_logprobs=k)),
            ("logprobs", lambda k: client.completions.create(model=NAME, prompt="x", max_tokens=1, logprobs=k)),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                request(5)
            assert caught.value.param == field and caught.value.message.endswith(message)
            assert caught.value.body["message"].startswith(f"{field}: ")
            request(4)


def test_echo(client, server):
    (choice,) = client.completions.create(model=NAME, prompt="Return", max_tokens=2, echo=True, seed=1).choices
    assert choice.text.startswith("Return") and len(choice.text) > len("Return")
    ids = server.llm.encode("Return")
    (choice,) = client.completions.create(model=NAME, prompt=ids, max_tokens=2, echo=True, seed=1).choices
    assert choice.text.startswith("Return") and len(choice.text) > len("Return")


@pytest.mark.parametrize("program", ["logprob_program", "chat_program"])  # scores in one call; token by token
def test_echo_with_log_probabilities(program, request):
    settings = {"model": NAME, "echo": True, "logprobs": 2, "temperature": 0}
    text = "Return the value of\n"
    with served.serve(request.getfixturevalue(program)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            ids = server.llm.encode(text)
            (whole,) = client.completions.create(prompt=text, max_tokens=3, **settings).choices
            choices = client.completions.create(prompt=[ids, [5]], n=2, max_tokens=0, **settings)
            stream = [*client.completions.create(prompt=ids, max_tokens=3, stream=True, **settings)]
        (score,) = server.llm.score(ids[:1], [ids[1:]], logprobs=2)
        names = [server.llm.text([id]) for id in ids[1:]]
    given = whole.logprobs
    assert given.tokens[1 : len(ids)] == names and whole.text.startswith(text) and given.top_logprobs[0] is None
    assert given.token_logprobs[: len(ids)] == pytest.approx([None, *score.logprobs], abs=1e-4)
    for top, pairs in zip(given.top_logprobs[1:], score.top_logprobs):
        assert [*top.values()][:2] == pytest.approx([value for _, value in pairs], abs=1e-4)
    # The draws are greedy: each token of the answer is the first of the most likely ones.
    answer = range(len(ids), len(ids) + 3)
    assert [max(given.top_logprobs[i], key=given.top_logprobs[i].get) for i in answer] == given.tokens[len(ids) :]
    for token, offset in zip(given.tokens[1:], given.text_offset[1:]):
        assert token.startswith("bytes:") or whole.text.startswith(token, offset)
    assert [choice.text for choice in choices.choices] == [text, text] + [server.llm.text([5])] * 2
    assert [len(choice.logprobs.tokens) for choice in choices.choices] == [len(ids), len(ids), 1, 1]
    assert (choices.usage.prompt_tokens, choices.usage.completion_tokens) == (len(ids) + 1, 0)
    assert choices.choices[0].finish_reason == "length"
    pieces = [chunk.choices[0] for chunk in stream]
    assert "".join(piece.text for piece in pieces) == whole.text
    joined = [value for piece in pieces if piece.logprobs for value in piece.logprobs.token_logprobs]
    assert joined == pytest.approx(given.token_logprobs, abs=1e-4)


def test_prompt_logprobs(logprob_program):
    """vLLM's field. Of the tokens of a prompt, the first one has no values."""
    text, body = "Return the value of\n", {"prompt_logprobs": 2}
    with served.serve(logprob_program) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            ids = server.llm.encode(text)
            settings = {"model": NAME, "extra_body": body, "n": 2, "max_tokens": 1}
            answer = client.completions.create(prompt=[ids, [5]], **settings, echo=True, logprobs=1)
            chatted = client.chat.completions.create(messages=MESSAGES, **settings)
            with pytest.raises(openai.BadRequestError, match="prompt_logprobs: got it with stream") as caught:
                client.completions.create(prompt=text, stream=True, **settings)
            assert caught.value.param == "prompt_logprobs"
            with pytest.raises(openai.BadRequestError, match="prompt_logprobs: got 5, expected at most 4") as caught:
                client.completions.create(model=NAME, prompt=text, extra_body={"prompt_logprobs": 5})
        (score,) = server.llm.score(ids[:1], [ids[1:]], logprobs=2)
        first, *entries = answer.choices[0].prompt_logprobs
        assert first is None and answer.choices[1].prompt_logprobs == [None, *entries]
        assert answer.choices[2].prompt_logprobs == [None]
        assert {*map(len, answer.choices[0].logprobs.top_logprobs[1:])} <= {1, 2}  # the echo has fewer
        for id, value, top, entry in zip(ids[1:], score.logprobs, score.top_logprobs, entries, strict=True):
            assert {*entry} == {str(id), *(str(token) for token, _ in top)} and next(iter(entry)) == str(id)
            assert entry[str(id)]["logprob"] == pytest.approx(value, abs=1e-4)
            assert entry[str(id)]["decoded_token"] == server.llm.text([id])
            assert [entry[str(token)]["rank"] for token, _ in top] == [1, 2]
    assert len(chatted.prompt_logprobs) == chatted.usage.prompt_tokens and chatted.prompt_logprobs[0] is None


def test_deadline_ends_the_computation_of_an_echo(chat_program):
    """Here, each token of the prompts takes a call."""
    import httpx

    body = {"model": NAME, "prompt": [[5] * 900] * 16, "echo": True, "logprobs": 1, "max_tokens": 0}
    with served.serve(chat_program, request_seconds=0.5) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 504
        server.app.state.service.models.loaded[NAME].scoring_threads.shutdown()  # waits for it
        assert 0 < server.llm.stats.requests < 16 * 900


@pytest.mark.parametrize("program", ["logprob_program", "chat_program"])  # scores in one call; token by token
def test_a_client_that_leaves_ends_the_scores_of_its_prompt(program, request, monkeypatch):
    with served.serve(request.getfixturevalue(program)) as server:
        score, begun, ended = server.llm.score, threading.Event(), threading.Event()

        def held_score(*args, is_cancelled=None, **options):
            if is_cancelled is None:  # the check of the request
                return score(*args, **options)
            begun.set()
            while not is_cancelled():
                time.sleep(0.001)
            try:
                return score(*args, is_cancelled=is_cancelled, **options)
            finally:
                ended.set()

        monkeypatch.setattr(server.llm, "score", held_score)

        async def leave():
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                fields = {"prompt": [5] * 900, "max_tokens": 0, "echo": True, "logprobs": 1}
                asking = asyncio.create_task(client.completions.create(model=NAME, **fields))
                assert await asyncio.to_thread(begun.wait, 60)
                asking.cancel()
                assert await asyncio.to_thread(ended.wait, 60)

        asyncio.run(leave())
        assert server.llm.stats.running == server.llm.stats.waiting == 0


def test_echo_of_a_model_that_cannot_score_returns_400(mask_program):
    with served.serve(mask_program) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for field, fields in {
            "logprobs": {"echo": True, "logprobs": 1, "max_tokens": 0},
            "prompt_logprobs": {"extra_body": {"prompt_logprobs": 0}},
        }.items():
            with pytest.raises(openai.BadRequestError, match=f"{field}: .* export it with --logprobs") as caught:
                client.completions.create(model=NAME, prompt="Return", **fields)
            assert caught.value.param == field


def test_text_of_tokens_without_bytes_returns_400(logits_program):
    with served.serve(logits_program) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for field, value in (("echo", True), ("logprobs", 0)):
            with pytest.raises(openai.BadRequestError, match=f"{field}: .* has neither token bytes nor a") as caught:
                client.completions.create(model=NAME, prompt=[5], max_tokens=1, **{field: value})
            assert caught.value.param == field
        assert client.completions.create(model=NAME, prompt=[5], max_tokens=1).usage.completion_tokens == 1


def test_tokens_of_texts_and_chats(server):
    import httpx

    text = "Return the value"
    given = httpx.post(f"{server.url}/tokenize", json={"model": NAME, "prompt": text, "return_token_strs": True}).json()
    ids = given["tokens"]
    assert ids == server.llm.encode(text) and given["count"] == len(ids) and given["max_model_len"] == small_llm.CONTEXT
    assert "".join(given["token_strs"][1:]) == text
    back = httpx.post(f"{server.url}/detokenize", json={"model": NAME, "tokens": ids[1:]}).json()
    assert back == {"prompt": text}
    chat = httpx.post(f"{server.url}/tokenize", json={"model": NAME, "messages": MESSAGES}).json()
    assert server.llm.text(chat["tokens"]).startswith("[user]What is")
    for path, body, param in (
        ("tokenize", {}, None),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, None),
        ("detokenize", {"tokens": [99999]}, "tokens"),
    ):
        response = httpx.post(f"{server.url}/{path}", json={"model": NAME} | body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_metrics(server, client):
    import httpx

    chat(client, tools=[], max_tokens=3)
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values[f'executorch_mlx_time_to_first_token_seconds_count{{model="{NAME}"}}']) >= 1
    assert float(values[f'executorch_mlx_engine_generated_tokens_total{{model="{NAME}"}}']) >= 3
    assert float(values[f'executorch_mlx_engine_rows{{model="{NAME}"}}']) == 1
