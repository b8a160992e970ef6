"""`Encoder`: embeddings, scores and classes of texts and pictures by an exported encoder. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..llm.errors import FieldError
from ..llm.tokenizer import Tokenizer
from .batches import batches
from .config import CLASSIFY, CONFIG, EMBED, IMAGE_METHOD, RERANK, TASKS, TEXT_METHOD, EncoderConfig
from .program import ArrayProgram

if TYPE_CHECKING:
    import tokenizers

TEXTS_AT_A_TIME = 4096  # texts that are tokenized and sorted by length together
PICTURES_AT_A_TIME = 16  # pictures that are decoded together

Text = str | Sequence[int]


class NotAnEncoder(ValueError):
    """Raised if a program is no encoder."""


@dataclass(frozen=True)
class Ranked:
    """A document with its score: `index` is its place in the list that was given."""

    index: int
    score: float


class Encoder:
    """A program that `export_encoder` wrote, loaded.

        with Encoder("minilm.pte") as encoder:
            vectors = encoder.encode(["A cat sits on a mat.", "Stocks fell."])

    - `device`: `cpu`, `gpu`, or None for the default.

    Attributes: `config`, an `EncoderConfig`; `tokenizer`, or None for a model of pictures only; `program`, the loaded
    program.

    All methods may be called from any thread. Raises FileNotFoundError if `path` does not exist, NotAnEncoder, which is
    a ValueError, if it is another program, and RuntimeError if ExecuTorch rejects it.
    """

    def __init__(self, path: str | Path, *, device: str | None = None):
        self.program = ArrayProgram(path, device=device)
        config = self.program.data(CONFIG)
        if config is None:
            raise NotAnEncoder(f"{path}: got {_described(self.program)}, expected an encoder")
        self.config = EncoderConfig.from_json(config)
        self.tokenizer = _tokenizer_in(self.program)
        if self.tokenizer is not None and not self.config.pair:
            self.tokenizer.backend.enable_truncation(self.config.max_length)

    @property
    def name(self) -> str:
        return self.program.path.name

    @property
    def takes_images(self) -> bool:
        return IMAGE_METHOD in self.program.methods

    def close(self) -> None:
        """Free the program. Later calls raise RuntimeError."""
        self.program.close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Embeddings --------------------------------------------------------------------------

    def encode(
        self,
        texts: str | Iterable[Text] | None = None,
        *,
        images: Any = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> np.ndarray:
        """Return the embeddings of `texts` or `images`, float32: [N, D], or [D] for a single text or picture.

        - `texts`: a text, or several, each a string or a list of token ids with the special tokens.
        - `images`: a picture, or several, each a path, the bytes of a file, or a picture of PIL.
        - `prompt`: precedes each text. By default, the prompt named `prompt_name`, or else the model's default prompt.
        - `dimensions`: keep this number of the first values (Matryoshka).
        - `normalize`: divide each embedding by its length. By default if the model does so, also after `dimensions`.

        Raises FieldError, a ValueError, with the name of the argument.
        """
        self._check_task(EMBED)
        if (texts is None) == (images is None):
            raise FieldError("texts", "both or neither of texts and images", "one of them")
        size = self._checked_size(dimensions)
        if images is not None:
            is_single = isinstance(images, (str, bytes, Path)) or hasattr(images, "convert")
            vectors = self.run_images([images] if is_single else images)
        else:
            is_single = isinstance(texts, str)
            several: Iterable[Text] = [texts] if isinstance(texts, str) else texts
            parts = [self.run(ids) for ids in self._ids(several, self.prompt(prompt, prompt_name))]
            vectors = np.concatenate([np.zeros((0, self.config.size), np.float32), *parts])
        vectors = self.finish(vectors, size, normalize)
        return vectors[0] if is_single else vectors

    def prompt(self, prompt: str | None = None, name: str | None = None) -> str:
        """Return the text that precedes texts; see `encode`. Raises FieldError for an unknown name."""
        if prompt is not None:
            return prompt
        name = self.config.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.config.prompts:
            known = ", ".join(self.config.prompts) or "none: the model has no prompts"
            raise FieldError("prompt_name", repr(name), known)
        return self.config.prompts[name]

    def finish(self, vectors: np.ndarray, dimensions: int | None = None, normalize: bool | None = None) -> np.ndarray:
        """Return embeddings of the model cut and normalized; see `encode`."""
        size = self._checked_size(dimensions)
        is_cut = size < vectors.shape[-1]
        wanted = self.config.normalizes if normalize is None else normalize
        vectors = vectors[..., :size]
        if wanted and (is_cut or not self.config.normalizes):
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors

    def _checked_size(self, dimensions: int | None) -> int:
        if dimensions is None:
            return self.config.size
        if not 1 <= dimensions <= self.config.size:
            raise FieldError("dimensions", dimensions, f"1 to {self.config.size}")
        return int(dimensions)

    # Pairs and classes -------------------------------------------------------------------

    def scores(self, pairs: Sequence[tuple[str, str]], *, raw: bool = False) -> np.ndarray:
        """Return the scores of pairs of a query and a document, float32 [N], each in [0, 1] unless `raw`."""
        self._check_task(RERANK)
        results = self.run(*self.pair_ids(list(pairs)))[:, 0]
        return results if raw else self.activated(results)

    def activated(self, results: np.ndarray) -> np.ndarray:
        """Return the probabilities of raw scores."""
        return _ACTIVATIONS[self.config.activation](results)

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """Return the documents by their scores for a query, the best first. `top_n`: return only so many."""
        scores = self.scores([(query, document) for document in documents])
        order = np.argsort(-scores, kind="stable")[:top_n]
        return [Ranked(int(index), float(scores[index])) for index in order]

    def classify(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """Return the probability of each class for each text, by label, the most likely class first."""
        self._check_task(CLASSIFY)
        ids = [ids for part in self._ids(texts, "") for ids in part]
        results = self.activated(self.run(ids))
        return [
            {self.config.labels[place]: float(row[place]) for place in np.argsort(-row, kind="stable")}
            for row in results
        ]

    # Texts and tokens --------------------------------------------------------------------

    def tokens(self, texts: Sequence[str], prompt: str = "", *, truncate: bool = True) -> list[list[int]]:
        """Return the token ids of texts with the special tokens, cut to the longest text that the model takes.

        Without `truncate`, raises FieldError for a longer text.
        """
        if self.tokenizer is None:
            raise FieldError("texts", "texts", f"images: {self.name} has no encoder of texts")
        encodings = self._encodings([prompt + text for text in texts])
        if not truncate and (place := next((i for i, e in enumerate(encodings) if e.overflowing), None)) is not None:
            raise FieldError("texts", f"more than {self.config.max_length} tokens in text {place}", "a shorter text")
        return [encoding.ids for encoding in encodings]

    def checked_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of a text. Raises FieldError for ids, or for more of them, than the model takes."""
        if TEXT_METHOD not in self.program.methods:
            raise FieldError("texts", "token ids", f"images: {self.name} has no encoder of texts")
        vocabulary = self.program.get("get_vocab_size", 0)
        if not 1 <= len(ids) <= self.config.max_length:
            raise FieldError("texts", f"{len(ids)} token ids", f"1 to {self.config.max_length}")
        if wrong := [id for id in ids if not 0 <= id < vocabulary]:
            raise FieldError("texts", f"the token id {wrong[0]}", f"ids in [0, {vocabulary})")
        return [int(id) for id in ids]

    def _ids(self, texts: Iterable[Text], prompt: str) -> Iterator[list[list[int]]]:
        """Yield the token ids of texts, `TEXTS_AT_A_TIME` texts at a time."""
        remaining = iter(texts)
        while part := list(islice(remaining, TEXTS_AT_A_TIME)):
            strings = [text for text in part if isinstance(text, str)]
            tokenized = iter(self.tokens(strings, prompt) if strings else [])
            yield [next(tokenized) if isinstance(text, str) else self.checked_ids(text) for text in part]

    def _encodings(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[tokenizers.Encoding]:
        """Return what the tokenizer makes of texts or pairs."""
        for text in (part for entry in texts for part in ((entry,) if isinstance(entry, str) else entry)):
            self.tokenizer.check_unicode(text)
        if self.config.lowercase:
            lowered = [text.lower() if isinstance(text, str) else tuple(map(str.lower, text)) for text in texts]
            return self.tokenizer.backend.encode_batch(lowered)
        return self.tokenizer.backend.encode_batch(texts)

    def pair_ids(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the token ids of pairs of texts, and the types of the tokens."""
        if self.config.pair:
            ids = [self._joined(query, document) for query, document in pairs]
            return ids, [[0] * len(text) for text in ids]
        encodings = self._encodings(pairs)
        return [encoding.ids for encoding in encodings], [encoding.type_ids for encoding in encodings]

    def _joined(self, query: str, document: str) -> list[int]:
        """Return the token ids of a query and a document in the text of the model. A long document is cut.

        Special tokens that a text contains are text.
        """
        before, between, after = self.config.pair
        query, document = self.tokenizer.special_text.cut([query, document])
        text = f"{before}{query}{between}{document}"
        ids = self.tokenizer.encode_chat(text + after)
        if len(ids) > self.config.max_length:
            end = self.tokenizer.encode_chat(after)
            ids = self.tokenizer.encode_chat(text)[: max(0, self.config.max_length - len(end))] + end
        return ids[: self.config.max_length]

    def run(self, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> np.ndarray:
        """Return what the model computes of texts as token ids, float32 [N, size]: embeddings, or raw scores.

        `types`: those of the tokens, of pairs.
        """
        ids = [text or [self.config.pad] for text in ids]  # some tokenizers make no tokens of an empty text
        results = np.zeros((len(ids), self.config.size), np.float32)
        for indices in batches([len(text) for text in ids], self.config.max_rows):
            inputs = self._inputs([ids[index] for index in indices], types and [types[index] for index in indices])
            results[indices] = self.program.call(TEXT_METHOD, inputs)[0]
        return results

    def _inputs(self, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None) -> list[np.ndarray]:
        """Return the inputs of a call: tokens and mask [B, L], and the types of the tokens if the method takes them."""
        longest = self.config.max_length if self.config.fixed_length else max(map(len, ids))
        tokens = np.full((len(ids), longest), self.config.pad, np.int64)
        mask, kinds = np.zeros_like(tokens), np.zeros_like(tokens)
        for row, text in enumerate(ids):
            tokens[row, : len(text)] = text
            mask[row, : len(text)] = 1
            if types is not None:
                kinds[row, : len(text)] = types[row]
        inputs = [tokens] if self.config.fixed_length else [tokens, mask]
        return [*inputs, kinds] if self.config.types else inputs

    # Pictures ----------------------------------------------------------------------------

    def run_images(self, images: Iterable[Any]) -> np.ndarray:
        """Return the embeddings of pictures, as the model has them."""
        from ..llm.vision import Preprocessor, open_picture

        if not self.takes_images:
            raise FieldError("images", "pictures", f"texts: {self.name} has no encoder of pictures")
        prepare, found, remaining = Preprocessor(self.config.images), [], iter(images)
        while part := [prepare(open_picture(image)) for image in islice(remaining, PICTURES_AT_A_TIME)]:
            rows = self.config.max_rows
            for begin in range(0, len(part), rows):
                found += self.program.call(IMAGE_METHOD, [np.stack(part[begin : begin + rows])])
        return np.concatenate([np.zeros((0, self.config.size), np.float32), *found])

    def _check_task(self, task: str) -> None:
        if self.config.task != task:
            raise FieldError("model", f"{self.name}, {TASKS[self.config.task]}", TASKS[task])


def encode(model: str | Path | Encoder, texts: str | Iterable[Text] | None = None, **options: Any) -> np.ndarray:
    """Return the embeddings of texts or pictures by `model`, a `.pte` file or an `Encoder`.

    `options` are the arguments of `Encoder.encode`. For several calls, load an `Encoder` once.
    """
    if isinstance(model, Encoder):
        return model.encode(texts, **options)
    with Encoder(model) as encoder:
        return encoder.encode(texts, **options)


def _described(program: ArrayProgram) -> str:
    """Return what a program is that is no encoder, as a part of a message."""
    if "speech_sample_rate" in program.methods:
        return "a speech model, which executorch-mlx transcribe runs"
    if "get_vocab_size" in program.methods:
        return "a language model, which executorch-mlx run runs"
    return f"a program with the methods {', '.join(program.methods)}"


def _tokenizer_in(program: ArrayProgram) -> Tokenizer | None:
    import json

    data = program.data("tokenizer_json")
    config = json.loads(program.data("tokenizer_config") or b"{}")
    return None if data is None else Tokenizer(data.decode(), config)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -values))


def _softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "identity": lambda values: values,
}
