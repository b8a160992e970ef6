"""Training data: JSON lines with chats, completions or text, as OpenAI and mlx-lm write them, → batches of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..llm.chat_template import render
from ..llm.chat_turns import Messages, Turns


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
    examples, chats = [], _Chats(tokenizer)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text, spans, is_chat = _text(json.loads(line), chats)
                examples.append(_example(text, spans if mask_prompt else [(0, len(text))], is_chat, tokenizer))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not examples:
        raise ValueError(f"{path}: expected lines of JSON with messages, prompt and completion, or text")
    return examples


_Spans = list[tuple[int, int]]


def _text(line: Any, chats: _Chats) -> tuple[str, _Spans, bool]:
    """Return the text of a line, the spans of characters that the model learns, and whether it is a chat."""
    if not isinstance(line, dict):
        raise ValueError(f"got {type(line).__name__}, expected an object")
    if "messages" in line:
        return *chats.text(line["messages"], line.get("tools")), True
    end = chats.tokenizer.eos_token or ""
    if "prompt" in line and "completion" in line:
        prompt, completion = _string(line, "prompt"), _string(line, "completion")
        if chats.tokenizer.chat_template:
            roles = zip(("user", "assistant"), (prompt, completion))
            return *chats.text([{"role": role, "content": content} for role, content in roles], None), True
        text = prompt + completion + end
        return text, [(len(prompt), len(text))], False
    if "text" in line:
        text = _string(line, "text") + end
        return text, [(0, len(text))], False
    raise ValueError(f"got {', '.join(line) or 'no key'}, expected messages, prompt and completion, or text")


def _string(values: Any, key: str) -> str:
    value = values.get(key) if isinstance(values, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(f"{key}: got {type(value).__name__}, expected a string")
    return value


class _Chats:
    """Writes chats as `LLM.chat` does, with the template of `tokenizer`."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._turns: dict[str, Turns] = {}

    def text(self, messages: Any, tools: Any) -> tuple[str, _Spans]:
        """Return the text of a chat, and the spans of the assistant's messages that the model learns."""
        if not self.tokenizer.chat_template:
            raise ValueError("messages: the model has no chat template; use prompt and completion, or text")
        if not isinstance(messages, list):
            raise ValueError(f"messages: got {type(messages).__name__}, expected a list")
        messages = [_message(message, place) for place, message in enumerate(messages)]
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("messages: expected a message of the assistant")
        template = self.tokenizer.get_chat_template(tools=tools)
        if template not in self._turns:
            self._turns[template] = Turns.of(partial(self._render, template))
        messages = self._turns[template].fit(messages)

        def render(count: int, prompt: bool = False) -> str:
            part = [{k: v for k, v in m.items() if k != "weight"} for m in messages[:count]]
            return self._render(template, part, {"tools": tools}, prompt)

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

    def _render(self, template: str, messages: Messages, options: Mapping[str, Any], prompt: bool = False) -> str:
        return render(template, messages, {**self.tokenizer.special_tokens_map, **options}, prompt)


def _message(message: Any, place: int) -> dict[str, Any]:
    """Return a message as templates take it: parts of text as one, and the arguments of calls as JSON values."""
    if not isinstance(message, dict):
        raise ValueError(f"messages[{place}]: got {type(message).__name__}, expected an object")
    _string(message, "role")
    content = message.get("content")
    if isinstance(content, list):
        message = message | {"content": "".join(_string(part, "text") for part in content)}
    elif content is not None:
        _string(message, "content")
    if calls := message.get("tool_calls"):
        message = message | {"tool_calls": [_call(call) for call in calls]}
    return message


def _call(call: Any) -> dict[str, Any]:
    """Return a call of a tool with its arguments as a JSON value. OpenAI's format has the text of this value."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError("tool_calls: expected objects with a function")
    if isinstance(arguments := function.get("arguments"), str):
        function = function | {"arguments": json.loads(arguments or "{}")}
    return call | {"function": function}


def _common(a: str, b: str) -> str:
    """Return the longest common beginning of two texts."""
    return a[: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))]


def _example(text: str, spans: _Spans, is_chat: bool, tokenizer: Any) -> Example:
    # A chat template writes the special tokens itself.
    encoded = tokenizer(text, add_special_tokens=not is_chat, return_offsets_mapping=True)
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
