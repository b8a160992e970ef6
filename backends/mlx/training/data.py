"""Training data: JSON lines with chats, completions or text, as OpenAI and mlx-lm write them, → batches of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Example:
    """Token ids, and for each of them whether the model learns to predict it."""

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


def read_examples(path: Path, tokenizer: Any, *, mask_prompt: bool = True) -> list[Example]:
    """Read a `.jsonl` file. Each line is an object of one of these kinds:

    - `messages`, and optionally `tools`: a chat. The model learns the messages of the assistant, except those with the
      `weight` 0.
    - `prompt` and `completion`: the model learns the completion. With a chat template, they are a chat of two messages.
    - `text`: the model learns all of it.

    Without `mask_prompt`, the model learns all tokens of every kind. Raises ValueError, with the line, for anything
    else.
    """
    examples = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text, spans = _text(json.loads(line), tokenizer)
                examples.append(_example(text, spans if mask_prompt else [(0, len(text))], tokenizer))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not examples:
        raise ValueError(f"{path}: expected lines of JSON with messages, prompt and completion, or text")
    return examples


def _text(line: Any, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a line, and the spans of characters that the model learns."""
    if not isinstance(line, dict):
        raise ValueError(f"got {type(line).__name__}, expected an object")
    if "messages" in line:
        return _chat_text(line["messages"], line.get("tools"), tokenizer)
    if "prompt" in line and "completion" in line:
        prompt, completion = line["prompt"], line["completion"]
        if tokenizer.chat_template:
            roles = zip(("user", "assistant"), (prompt, completion))
            return _chat_text([{"role": role, "content": content} for role, content in roles], None, tokenizer)
        text = prompt + completion + (tokenizer.eos_token or "")
        return text, [(len(prompt), len(text))]
    if "text" in line:
        text = line["text"] + (tokenizer.eos_token or "")
        return text, [(0, len(text))]
    raise ValueError(f"got {', '.join(line) or 'no key'}, expected messages, prompt and completion, or text")


def _chat_text(messages: Sequence[Mapping], tools: Any, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    if not tokenizer.chat_template:
        raise ValueError("messages: the model has no chat template; use prompt and completion, or text")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages: expected a message of the assistant")

    def render(count: int, prompt: bool = False) -> str:
        part = [{k: v for k, v in m.items() if k != "weight"} for m in messages[:count]]
        return tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt)

    text, spans = render(len(messages)), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("weight", 1):
            begin, end = render(index, prompt=True), render(index + 1)
            if not (text.startswith(end) and end.startswith(begin)):
                # The template writes earlier messages in another way, for example without their reasoning.
                begin = _common(begin, text)
                end = text if index + 1 == len(messages) else _common(end, text)
            spans.append((len(begin), len(end)))
    return text, spans


def _common(a: str, b: str) -> str:
    """Return the longest common beginning of two texts."""
    return a[: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))]


def _example(text: str, spans: Sequence[tuple[int, int]], tokenizer: Any) -> Example:
    # A chat template writes the special tokens itself.
    encoded = tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_offsets_mapping=True)
    learned = [any(first < end and last > begin for begin, end in spans) for first, last in encoded["offset_mapping"]]
    return Example(tuple(encoded["input_ids"]), tuple(learned))


@dataclass(frozen=True)
class Batch:
    """`tokens` and `targets`, int64 `[B, T]`, and `mask`, float32 `[B, T]`, 1 where the model learns the target."""

    tokens: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor

    @property
    def count(self) -> int:
        """The number of targets."""
        return int(self.mask.sum())


class Batches:
    """Cuts examples into rows of `length` tokens, and gives batches of `size` rows for each step.

    The order of the rows depends only on `seed` and on the epoch, so that `at(step)` is the same in every run. With
    `pack`, a row has as many whole examples as fit. The tokens of an example then also attend to the examples before it
    in the row.
    """

    def __init__(self, examples: Sequence[Example], size: int, length: int, *, pack: bool = False, seed: int = 0):
        parts = [_targets(example, length) for example in examples]
        rows = _packed(parts, length) if pack else [[part] for part in parts]
        self.rows = [row for row in rows if any(any(learned) for _, _, learned in row)]
        if not self.rows:
            raise ValueError(f"expected an example with something to learn in its first {length + 1} tokens")
        self.size, self.length, self.seed = size, length, seed

    @property
    def per_epoch(self) -> int:
        """The number of batches in which every row occurs. The last one may be filled up with empty rows."""
        return -(-len(self.rows) // self.size)

    def at(self, index: int) -> Batch:
        """Return the batch number `index`, from 0. The rows are in a new order in every epoch."""
        epoch, index = divmod(index, self.per_epoch)
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        return self._batch(order[index * self.size : (index + 1) * self.size])

    def all(self) -> Iterator[Batch]:
        """Yield all batches once, in the order of the examples."""
        for first in range(0, len(self.rows), self.size):
            yield self._batch(range(len(self.rows))[first : first + self.size])

    def _batch(self, indices: Sequence[int]) -> Batch:
        columns = torch.zeros(3, self.size, self.length, dtype=torch.int64)
        for row, index in enumerate(indices):
            for column, parts in zip(columns, zip(*self.rows[index])):
                flat = [value for part in parts for value in part]
                column[row, : len(flat)] = torch.tensor(flat)
        return Batch(columns[0], columns[1], columns[2].float())


_Part = tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]]


def _targets(example: Example, length: int) -> _Part:
    """Return the tokens of an example, at most `length`, their targets, and which of them the model learns."""
    return example.tokens[:-1][:length], example.tokens[1 : length + 1], example.learned[1 : length + 1]


def _packed(parts: Sequence[_Part], length: int) -> list[list[_Part]]:
    rows: list[list[_Part]] = []
    used = length
    for part in parts:
        if used + len(part[0]) > length:
            rows.append([])
            used = 0
        rows[-1].append(part)
        used += len(part[0])
    return rows
