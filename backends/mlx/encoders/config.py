"""`EncoderConfig`: what a program with an encoder says about itself, as JSON in its metadata. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

EMBED, RERANK, CLASSIFY = "embed", "rerank", "classify"  # the tasks of encoders
TASKS = {EMBED: "an encoder", RERANK: "a reranker", CLASSIFY: "a classifier"}
CONFIG = "encoder_config"  # the method that returns the JSON
TEXT_METHOD, IMAGE_METHOD = "encode_text", "encode_image"


@dataclass(frozen=True)
class EncoderConfig:
    """The metadata of an encoder. docs/embeddings.md describes the file.

    - `task`: `embed`, `rerank` or `classify`.
    - `model_type`: that of the checkpoint, such as `bert`.
    - `size`: the length of a result: of an embedding, or the number of scores.
    - `max_length`: the largest number of tokens of a text, special tokens included. Longer texts are cut.
    - `max_rows`: the largest number of texts or pictures in a call.
    - `fixed_length`: whether texts are padded to `max_length`, and the model reads the padding.
    - `pad`: the token that pads a text.
    - `types`: whether the method takes the types of tokens, which tell the first text of a pair from the second.
    - `lowercase`: whether texts are lowered before the tokenizer.
    - `normalizes`: whether embeddings have the length 1.
    - `pooling`: how an embedding is made of the vectors of the tokens, for people.
    - `sizes`: the shorter sizes for which the model was trained (Matryoshka), in descending order; empty if unknown.
    - `prompts`: name → text that precedes texts, such as `query`.
    - `default_prompt`: the name of the prompt that is used if none is named, or None.
    - `labels`: the names of the classes of a classifier.
    - `activation`: what makes probabilities of scores: `sigmoid`, `softmax` or `identity`.
    - `pair`: of a reranker, the texts before a query, between it and a document, and behind that; or empty, if the
      tokenizer joins two texts.
    - `images`: the settings of the preprocessing of pictures, as in `llm.vision.preprocess`, or None.
    """

    task: str
    model_type: str
    size: int
    max_length: int = 0
    max_rows: int = 1
    fixed_length: bool = False
    pad: int = 0
    types: bool = False
    lowercase: bool = False
    normalizes: bool = False
    pooling: str = ""
    sizes: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    labels: tuple[str, ...] = ()
    activation: str = "identity"
    pair: tuple[str, ...] = ()
    images: Mapping[str, Any] | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> EncoderConfig:
        """Raises ValueError if the data are no config."""
        try:
            values = json.loads(data)
            known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
            return cls(**known | {name: tuple(known.get(name, ())) for name in ("sizes", "labels", "pair")})
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{CONFIG}: {error}") from error
