"""`/v1/files`, `/v1/batches` and `/v1/audio/transcriptions`, called with the `openai` package."""

import io
import json
import time

import httpx
import openai
import pytest
import served
from executorch_mlx.serve.uploads import Files
from served import NAME

COMPLETIONS = "/v1/completions"


def lines(*requests: dict) -> bytes:
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def request(id: str, url: str = COMPLETIONS, **fields) -> dict:
    body = {"model": NAME, "prompt": "Return", "max_tokens": 3, "seed": 1} | fields
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def finished(client, batch):
    deadline = time.monotonic() + 60
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return batch


def test_files(client, server):
    data = bytes(range(256)) * 3 + b"\r\n--x\r\n\r\n"
    file = client.files.create(file=("a b.jsonl", data), purpose="batch")
    assert (file.filename, file.bytes, file.purpose, file.status) == ("a b.jsonl", len(data), "batch", "processed")
    assert client.files.content(file.id).content == data
    assert client.files.retrieve(file.id) == file
    assert [entry.id for entry in client.files.list(purpose="batch")] == [file.id]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.content(file.id)
    for content, headers in (
        (b"{}", {"Content-Type": "application/json"}),
        (b"--x\r\n", {"Content-Type": "multipart/form-data; boundary=x"}),
    ):
        response = httpx.post(f"{server.url}/v1/files", content=content, headers=headers)
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("key", [None, "k"])
def test_batch(chat_program, key):
    with served.serve(chat_program, api_key=key) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or "none", max_retries=0)
        data = lines(request("a"), request("b", n=2), request("c", model="other"), request("d", url="/v1/responses"))
        file = client.files.create(file=io.BytesIO(data + b"{"), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h", metadata={"a": "b"}
        )
        done = finished(client, batch)
        assert (done.status, done.metadata) == ("completed", {"a": "b"}) and done.completed_at >= done.created_at
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (5, 2, 3)
        answers = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
        expected = client.completions.create(model=NAME, prompt="Return", max_tokens=3, seed=1)
        assert bodies["a"]["choices"][0]["text"] == expected.choices[0].text and len(bodies["b"]["choices"]) == 2
        errors = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
        assert {entry["custom_id"] for entry in errors} == {"c", "d", None}
        assert [entry.id for entry in client.batches.list()] == [done.id]
        with pytest.raises(openai.NotFoundError, match="there is no file") as caught:
            client.batches.create(input_file_id="file-1", endpoint=COMPLETIONS, completion_window="24h")
        assert caught.value.param == "input_file_id"


def test_a_batch_can_be_cancelled(client, server, monkeypatch):
    monkeypatch.setattr(server, "delay", 0.01)
    data = lines(*(request(str(i), max_tokens=200, ignore_eos=True) for i in range(20)))
    file = client.files.create(file=io.BytesIO(data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelled" and cancelled.cancelled_at and cancelled.request_counts.completed < 20
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_files_and_batches_survive_a_restart(chat_program, tmp_path):
    data = lines(*(request(str(i), max_tokens=20, ignore_eos=True) for i in range(30)))
    with served.serve(chat_program, files_folder=tmp_path / "files") as server:
        server.delay = 0.005
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            file = client.files.create(file=("a.jsonl", data), purpose="batch")
            other = client.files.create(file=("b", b"b"), purpose="batch")
            client.files.delete(other.id)
            batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
            while client.batches.retrieve(batch.id).request_counts.completed < 3:
                time.sleep(0.01)
            with pytest.raises(OSError, match="another server uses the folder"):
                Files(2**20, tmp_path / "files")
    (output,) = (path for path in (tmp_path / "files").iterdir() if b'"status_code": 200' in path.read_bytes())
    known = output.read_bytes()
    assert 3 <= known.count(b"\n") < 30
    output.write_bytes(known + b'{"id": "batch_')  # as after a kill
    with served.serve(chat_program, files_folder=tmp_path / "files") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert [entry.id for entry in client.files.list(purpose="batch")] == [file.id]
            assert client.files.content(file.id).content == data
            done = finished(client, batch)
            assert (done.status, done.request_counts.completed, done.request_counts.total) == ("completed", 30, 30)
            answers = client.files.content(done.output_file_id).content
            assert (
                answers.startswith(known)
                and len({json.loads(line)["custom_id"] for line in answers.splitlines()}) == 30
            )
            assert len(server.generations) == 30 - known.count(b"\n")
    with served.serve(chat_program, files_folder=tmp_path / "files") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert client.batches.retrieve(batch.id) == done and not server.generations
            assert client.files.content(done.output_file_id).content == answers


def test_sound_needs_a_speech_model(client):
    with pytest.raises(openai.BadRequestError, match="model: got 'small', expected a speech model"):
        client.audio.transcriptions.create(model=NAME, file=b"x")


def test_embeddings_say_what_is_missing(client):
    with pytest.raises(openai.BadRequestError, match="embeddings: no model of this server computes embeddings"):
        client.embeddings.create(model=NAME, input="x")
