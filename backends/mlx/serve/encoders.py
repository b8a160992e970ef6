"""Encoders in the server: embeddings, scores of documents, and classes of texts."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..encoders.config import CLASSIFY, EMBED, RERANK, TASKS
from ..llm.errors import FieldError
from .encoder_queue import EncoderQueue
from .encoder_requests import (
    MOST,
    ClassifyRequest,
    EmbeddingRequest,
    Item,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    RerankRequest,
)
from .errors import argument_error, field_error

if TYPE_CHECKING:
    import numpy as np

    from ..encoders import Encoder

# What `/v1/models` calls the tasks.
_TASKS = {EMBED: "embedding", RERANK: "rerank", CLASSIFY: "classification"}
_FIELDS = {"texts": "input", "text": "input", "images": "input", "image": "input"}  # arguments → fields of a request


class ServedEncoder:
    """An encoder with the name that it has in the API."""

    def __init__(self, encoder: Encoder, name: str):
        self.encoder, self.name, self.base = encoder, name, name
        self.queue = EncoderQueue(encoder)

    def close(self) -> None:
        self.queue.close()
        self.encoder.close()

    def description(self) -> dict[str, Any]:
        """Return the fields of the model's object in `/v1/models` that are known once it is loaded."""
        config = self.encoder.config
        fields: dict[str, Any] = {"task": _TASKS[config.task], "has_chat_template": False}
        if config.max_length:
            fields |= {"max_model_len": config.max_length, "context_window": config.max_length}
        if config.task == EMBED:
            fields |= {"embedding_size": config.size, "prompts": [*config.prompts], "images": self.encoder.takes_images}
        if config.task == CLASSIFY:
            fields["labels"] = [*config.labels]
        return fields

    def run(self, ids: Sequence[list[int]], types: Sequence[list[int]] | None = None) -> np.ndarray:
        return self.queue.submit(ids, types).result()

    def check_task(self, task: str) -> None:
        """Raise ApiError if the model has another task."""
        got = self.encoder.config.task
        if got != task:
            raise field_error("model", f"got {self.name!r}, {TASKS[got]}, expected {TASKS[task]}")


# OpenAI --------------------------------------------------------------------------------


def embeddings(model: ServedEncoder, body: EmbeddingRequest) -> dict[str, Any]:
    """Return the response to a request for embeddings. Raises ApiError."""
    model.check_task(EMBED)
    with _renamed():
        vectors, tokens = _embed(model, body)
        vectors = model.encoder.finish(vectors, body.dimensions)
    encode: Callable[[np.ndarray], Any] = (
        _base64 if body.encoding_format == "base64" else lambda vector: vector.tolist()
    )
    data = [
        {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model or model.name, "usage": usage}


def _embed(model: ServedEncoder, body: EmbeddingRequest) -> tuple[np.ndarray, int]:
    """Return the embeddings of the inputs as the model has them, and the number of tokens."""
    import numpy as np

    encoder, given = model.encoder, body.input
    inputs: Sequence[Any] = [given] if isinstance(given, str) or _is_ids(given) else given
    if not 1 <= len(inputs) <= MOST:
        raise field_error("input", f"got {len(inputs)} inputs, expected 1 to {MOST}")
    items = [part if isinstance(part, Item) else None for part in inputs]
    if any(item is not None and (item.text is None) == (item.image is None) for item in items):
        raise field_error("input", "got an object without text or image, or with both, expected one")
    texts = [item.text if item else part for item, part in zip(items, inputs)]
    images = [index for index, item in enumerate(items) if item and item.image is not None]
    rest = [index for index in range(len(inputs)) if index not in set(images)]
    ids = _ids(encoder, [texts[index] for index in rest], encoder.prompt(name=body.prompt_name), body.truncate)
    vectors = np.zeros((len(inputs), encoder.config.size), np.float32)
    if rest:
        vectors[rest] = model.run(ids)
    if images:
        if wrong := next((items[i].image for i in images if not items[i].image.startswith("data:")), None):
            raise field_error("input", f"image: got {wrong[:40]!r}, expected a data URL")
        vectors[images] = encoder.run_images(items[index].image for index in images)
    return vectors, sum(map(len, ids))


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and isinstance(given[0], int)


def _ids(encoder: Encoder, texts: Sequence[str | list[int]], prompt: str, truncate: bool | None) -> list[list[int]]:
    strings = [text for text in texts if isinstance(text, str)]
    tokenized = iter(encoder.tokens(strings, prompt, truncate=truncate is not False) if strings else [])
    return [next(tokenized) if isinstance(text, str) else encoder.checked_ids(text) for text in texts]


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


# Scores and classes --------------------------------------------------------------------


def rerank(model: ServedEncoder, body: RerankRequest) -> dict[str, Any]:
    """Return the documents of a request by their scores, the best first. Raises ApiError."""
    model.check_task(RERANK)
    documents = [part if isinstance(part, str) else part.text for part in body.documents]
    if None in documents:
        raise field_error(f"documents.{documents.index(None)}", "got an object without text, expected text")
    with _renamed():
        ids, types = model.encoder.pair_ids([(body.query, document) for document in documents])
        scores = model.encoder.activated(model.run(ids, types)[:, 0])
    results = []
    for index in (-scores).argsort(kind="stable")[: body.top_n]:
        entry: dict[str, Any] = {"index": int(index), "relevance_score": float(scores[index])}
        results.append(entry | ({"document": {"text": documents[index]}} if body.return_documents else {}))
    usage = {"total_tokens": sum(map(len, ids)), "prompt_tokens": sum(map(len, ids))}
    return {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model or model.name, "results": results, "usage": usage}


def classify(model: ServedEncoder, body: ClassifyRequest) -> dict[str, Any]:
    """Return the classes of texts. Raises ApiError."""
    model.check_task(CLASSIFY)
    texts = [body.input] if isinstance(body.input, str) else body.input
    with _renamed():
        ids = model.encoder.tokens(texts)
        rows = model.encoder.activated(model.run(ids))
    labels = model.encoder.config.labels
    data = [
        {"index": i, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
        for i, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    return {
        "id": f"classify-{uuid.uuid4().hex}",
        "object": "list",
        "model": body.model or model.name,
        "data": data,
        "usage": usage,
    }


# Ollama --------------------------------------------------------------------------------


def ollama_embed(model: ServedEncoder, body: OllamaEmbedRequest) -> dict[str, Any]:
    """Return the response of `/api/embed`. Raises ApiError."""
    started = time.monotonic()
    model.check_task(EMBED)
    texts = [body.input] if isinstance(body.input, str) else body.input
    with _renamed():
        ids = _ids(model.encoder, texts, model.encoder.prompt(), body.truncate)
        vectors = model.encoder.finish(model.run(ids), body.dimensions)
    times = {"total_duration": int((time.monotonic() - started) * 1e9), "load_duration": 0}
    return {"model": body.model, "embeddings": vectors.tolist(), **times, "prompt_eval_count": sum(map(len, ids))}


def ollama_embeddings(model: ServedEncoder, body: OllamaEmbeddingsRequest) -> dict[str, Any]:
    """Return the response of `/api/embeddings`. Raises ApiError."""
    request = OllamaEmbedRequest(model=body.model, input=body.prompt)
    return {"embedding": ollama_embed(model, request)["embeddings"][0]}


@contextmanager
def _renamed():
    """Within the context, an error about an argument names the field of the request."""
    try:
        yield
    except FieldError as error:
        raise argument_error(error, _FIELDS) from error
    except ValueError as error:
        raise field_error("input", str(error)) from error
