"""The requests for embeddings, scores and classes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .parts import RequestPart, Several

MOST = 2048  # inputs of a request, as in OpenAI's API
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST, fail_fast=True)]


class Item(RequestPart):
    """A text or a picture, as Jina's API has it. A picture is a data URL."""

    text: str | None = None
    image: str | None = None


class EmbeddingRequest(RequestPart):
    """The body of `/v1/embeddings`.

    A text that is longer than the model takes is cut, or an error without `truncate`.
    """

    model: str | None = None
    input: str | Several[str] | Several[int] | Several[list[int]] | Several[Item]
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] | None = "float"
    prompt_name: str | None = None
    truncate: bool | None = True
    user: str | None = None


class RerankRequest(RequestPart):
    """The body of `/v1/rerank`, as Cohere and Jina have it."""

    model: str | None = None
    query: str
    documents: Annotated[list[str | Item], Field(min_length=1, max_length=MOST, fail_fast=True)]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = False


class ClassifyRequest(RequestPart):
    """The body of `/classify`, as vLLM has it."""

    model: str | None = None
    input: str | Texts


class OllamaEmbedRequest(RequestPart):
    """The body of `/api/embed`. The server unloads models by its own rules, so `keep_alive` has no effect."""

    model: str
    input: str | list[str]
    truncate: bool | None = True
    dimensions: int | None = Field(None, ge=1)
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaEmbeddingsRequest(RequestPart):
    """The body of `/api/embeddings`, the older form for one text."""

    model: str
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: Any = None
