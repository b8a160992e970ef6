"""Embeddings, scores and classes by the server, with the clients of OpenAI and Ollama."""

import asyncio
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from executorch_mlx.encoders import Encoder
from executorch_mlx.encoders.export import export_encoder
from executorch_mlx.serve import Settings, create_app
from executorch_mlx.serve.models import Models, load_model
from served import listening

sys.path.insert(0, str(Path(__file__).parents[1] / "encoders"))
import small_encoder

TEXTS = ["the cat sat on the mat", "a dog", "cat " * 60]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The paths of an embedding model, a reranker and a classifier, by name."""
    folder = tmp_path_factory.mktemp("encoders")
    small_encoder.save_sentence_transformer(folder / "bert")
    small_encoder.save(folder / "ranker", labels=1)
    small_encoder.save(folder / "classifier", labels=3)
    paths = {name: folder / f"{name}.pte" for name in ("bert", "ranker", "classifier")}
    for name, path in paths.items():
        export_encoder(folder / name, verify=False).save(path)
    return paths


@pytest.fixture(scope="module")
def url(programs, chat_program):
    """The address of a server with these models and a language model."""
    models = Models()
    for name, path in (programs | {"chat": chat_program}).items():
        models.add(name, lambda path=path: load_model(path), path.stat().st_size)
    models.load_all()
    settings = Settings(host="127.0.0.1", grace_seconds=0)
    with listening(create_app(models, settings=settings), settings) as url:
        yield url
    models.close()


@pytest.fixture(scope="module")
def vectors(programs):
    with Encoder(programs["bert"]) as encoder:
        yield encoder.encode(TEXTS)


def post(url: str, path: str, **fields) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=fields)


def message(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


def test_openai_client(url, vectors, programs):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    answer = client.embeddings.create(model="bert", input=TEXTS)  # the client asks for base64
    assert (np.array([entry.embedding for entry in answer.data], np.float32) == vectors).all()
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 40 and answer.model == "bert"
    plain = client.embeddings.create(model="bert", input=TEXTS[0], encoding_format="float", dimensions=8)
    expected = vectors[0, :8] / np.linalg.norm(vectors[0, :8])
    assert np.allclose(plain.data[0].embedding, expected, atol=1e-6)
    with Encoder(programs["bert"]) as encoder:
        ids = encoder.tokens(TEXTS)
    for given in (ids[0], ids):
        answer = client.embeddings.create(model="bert", input=given)
        assert (np.array(answer.data[0].embedding, np.float32) == vectors[0]).all()
    prompted = client.embeddings.create(model="bert", input="cat", extra_body={"prompt_name": "query"})
    whole = client.embeddings.create(model="bert", input="query: cat")
    assert prompted.data[0].embedding == whole.data[0].embedding
    kinds = {model.id: model.task for model in client.models.list().data if hasattr(model, "task")}
    assert kinds == {"bert": "embedding", "ranker": "rerank", "classifier": "classification"}


def test_ollama(url, vectors):
    answer = post(url, "/api/embed", model="bert:latest", input=TEXTS).json()
    assert (np.array(answer["embeddings"], np.float32) == vectors).all()
    assert answer["prompt_eval_count"] > 40 and answer["total_duration"] > 0 and answer["model"] == "bert"
    one = post(url, "/api/embeddings", model="bert", prompt=TEXTS[0]).json()
    assert (np.array(one["embedding"], np.float32) == vectors[0]).all()
    assert post(url, "/api/embed", model="chat", input="a").json() == {
        "error": "model: got 'chat', expected an encoder"
    }


def test_ollama_client(url, vectors):
    if find_spec("ollama") is None:
        pytest.skip("ollama is not installed")
    import ollama

    client = ollama.Client(url)
    assert np.allclose(client.embed("bert", TEXTS).embeddings, vectors)
    assert np.allclose(client.embeddings("bert", TEXTS[0]).embedding, vectors[0])


def test_rerank(url, programs):
    documents = ["a dog", "the cat sat on the mat", "x y z"]
    answer = post(url, "/v1/rerank", model="ranker", query="cat", documents=documents).json()
    with Encoder(programs["ranker"]) as encoder:
        expected = [(entry.index, entry.score) for entry in encoder.rerank("cat", documents)]
    assert [(entry["index"], entry["relevance_score"]) for entry in answer["results"]] == expected
    objects = [{"text": text} for text in documents]
    fields = {"top_n": 1, "return_documents": True}
    (best,) = post(url, "/rerank", model="ranker", query="cat", documents=objects, **fields).json()["results"]
    assert best["document"] == {"text": documents[best["index"]]} and best["index"] == expected[0][0]


def test_classify(url):
    answer = post(url, "/classify", model="classifier", input=["the cat", "a"]).json()
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    first = answer["data"][0]
    assert first["num_classes"] == 3 and abs(sum(first["probs"]) - 1) < 1e-5
    assert first["label"] == f"LABEL_{np.argmax(first['probs'])}"


@pytest.mark.parametrize(
    "path, fields, expected",
    [
        ("/v1/embeddings", {"model": "chat", "input": "a"}, "model: got 'chat', expected an encoder"),
        ("/v1/embeddings", {"model": "ranker", "input": "a"}, "model: got 'ranker', a reranker, expected an encoder"),
        ("/v1/embeddings", {"model": "bert", "input": []}, "input: got 0 inputs, expected 1 to 2048"),
        ("/v1/embeddings", {"model": "bert", "input": [[1, 99999]]}, "input: got the token id 99999, expected ids in"),
        ("/v1/embeddings", {"model": "bert", "input": [[]]}, "input: got 0 token ids, expected 1 to 40"),
        ("/v1/embeddings", {"model": "bert", "input": "a", "dimensions": 99}, "dimensions: got 99, expected 1 to 32"),
        ("/v1/embeddings", {"model": "bert", "input": "a", "prompt_name": "x"}, "prompt_name: got 'x', expected query"),
        (
            "/v1/embeddings",
            {"model": "bert", "input": "cat " * 60, "truncate": False},
            "input: got more than 40 tokens",
        ),
        ("/v1/embeddings", {"model": "bert", "input": [{"text": "a", "image": "b"}]}, "input: got an object without"),
        ("/v1/embeddings", {"model": "bert"}, "input: Field required"),
        ("/v1/rerank", {"model": "bert", "query": "a", "documents": ["b"]}, "model: got 'bert', an encoder, expected"),
        ("/v1/rerank", {"model": "ranker", "query": "a", "documents": []}, "documents: got 0 items, expected at least"),
        ("/v1/chat/completions", {"model": "bert", "messages": []}, "messages: got 0 items"),
        (
            "/v1/chat/completions",
            {"model": "bert", "messages": [{"role": "user", "content": "a"}]},
            "model: got 'bert', expected a language model",
        ),
    ],
)
def test_errors(url, path, fields, expected):
    assert message(post(url, path, **fields)).startswith(expected)


def test_requests_at_the_same_time(url, vectors):
    """Texts of several requests share calls. Each gets its own embeddings."""
    found = {}

    def ask(index: int) -> None:
        answer = post(url, "/v1/embeddings", model="bert", input=[TEXTS[(index + i) % 3] for i in range(40)]).json()
        found[index] = np.array([entry["embedding"] for entry in answer["data"]], np.float32)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(6):
        assert (found[index] == vectors[[(index + i) % 3 for i in range(40)]]).all()


def test_a_closed_encoder_ends_its_requests(programs):
    from executorch_mlx.serve.encoder_queue import EncoderQueue

    with Encoder(programs["bert"]) as encoder:
        queue = EncoderQueue(encoder)
        cancelled = queue.submit([[1, 2]] * 2000)
        cancelled.cancel()
        assert queue.submit([[1, 2]]).result(60).shape == (1, 32)
        broken = queue.submit([[1, 2], ["x"]])
        with pytest.raises(ValueError):
            broken.result(60)
        waiting = [queue.submit([[1, 2, 3]] * 500) for _ in range(3)]
        queue.close()
        assert all(future.done() for future in waiting)
        with pytest.raises(RuntimeError, match="is closed"):
            queue.submit([[1]])


def test_an_app_with_one_encoder(programs, vectors):
    from executorch_mlx.serve.in_process import post as post_to_app

    app = create_app(Encoder(programs["bert"]), name="small")
    response = asyncio.run(post_to_app(app, "/v1/embeddings", b'{"input": "a dog"}'))
    assert response.status == 200 and b'"small"' in response.body
