"""Calls the methods of a program. docs/llm-program.md has their interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from executorch_mlx.llm.export import HeadConfig


@dataclass
class RowProgram:
    """The methods of the program at `path`. `head` is the `HeadConfig` of the export."""

    path: Path
    head: HeadConfig
    vocab_size: int
    methods: dict = field(init=False, default_factory=dict)

    def __post_init__(self):
        from executorch_mlx import Runtime

        self.program = Runtime.get().load_program(self.path)
        self.rows = self.number("get_max_batch_size")
        self.chunk = self.number("get_max_seq_len")

    def number(self, name: str) -> int:
        return self.program.load_method(name).execute([])[0]

    def call(self, name: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if name not in self.methods:
            self.methods[name] = self.program.load_method(name)
        return [output.clone() for output in self.methods[name].execute([x.contiguous() for x in inputs])]

    def _row(self, row: int) -> list[torch.Tensor]:
        return [torch.tensor([row])] if self.rows > 1 else []

    def _parameters(self, batch: int, given: dict, per_row: bool = False) -> list[torch.Tensor]:
        values = self.head.inputs(batch, self.vocab_size, per_row=per_row)
        unknown = set(given) - set(values)
        assert not unknown, unknown
        given = {name: torch.as_tensor(given.get(name, off), dtype=off.dtype) for name, off in values.items()}
        adjusts = [torch.tensor(True)] if self.head.logits_processors() else []
        return [given[name].reshape(off.shape) for name, off in values.items()] + adjusts

    def prefill(self, tokens: Sequence[int], position: int, row: int = 0, name: str | None = None, **parameters):
        """The outputs of a call of `prefill`, or of `forward` if there is one row. `allowed_tokens` has W words."""
        inputs = [torch.tensor([list(tokens)]), torch.tensor([position]), *self._row(row)]
        name = name or ("prefill" if self.rows > 1 else "forward")
        return self.call(name, [*inputs, *self._parameters(1, parameters)])

    def draft(self, tokens: Sequence[int], position: int, row_length: int, row: int = 0, **parameters):
        """The outputs of one call of `draft`. The model has computed `row_length` tokens in the row."""
        inputs = [torch.tensor([list(tokens)]), torch.tensor([position]), *self._row(row), torch.tensor([row_length])]
        return self.call("draft", [*inputs, *self._parameters(1, parameters)])

    def logits(self, tokens: Sequence[int], position: int, row: int = 0, name: str = "logits") -> torch.Tensor:
        """The logits [V] after the tokens."""
        inputs = [torch.tensor([list(tokens)]), torch.tensor([position]), *self._row(row)]
        return self.call(name, inputs)[0][0, 0]

    def decode(self, items: Sequence[tuple], width: int | None = None, **parameters):
        """The outputs of one call of `decode`, or of the method for `width` rows. An item is (token, position, row).

        A parameter is a list with a value for each item. If there are fewer items than the method takes, the call
        repeats the first item. The outputs of the repetitions are dropped.
        """
        count, name = len(items), "decode" if width is None else f"decode_{width}"
        width = width or self.rows
        picked = [i if i < count else 0 for i in range(width)]
        tokens, positions, rows = (torch.tensor([items[i][field] for i in picked]) for field in range(3))
        given = {name: torch.stack([torch.as_tensor(v[i]) for i in picked]) for name, v in parameters.items()}
        outputs = self.call(name, [tokens[:, None], positions, rows, *self._parameters(width, given, True)])
        return [output[:count] for output in outputs]

    def verify(self, tokens: Sequence[int], position: int, row: int = 0, targets=None, **parameters):
        """The outputs of one call of `verify`. `allowed_tokens` has W words for each of the S tokens: [S, W]."""
        inputs = [torch.tensor([list(tokens)]), torch.tensor([position]), *self._row(row)]
        inputs += self._parameters(len(tokens), parameters)
        if self.head.logprobs:
            inputs.append(torch.tensor([targets or [0] * len(tokens)]))
        return self.call("verify", inputs)

    def answer(self, prompt: Sequence[int], steps: int, row=0, chunk: int | None = None, **parameters) -> list[int]:
        """The tokens of a request that runs alone, by calls of `prefill`. The seed advances with each token."""
        chunk, drawn, position = chunk or self.chunk, [], 0
        pending, seed = list(prompt), parameters.pop("seed", None)
        while len(drawn) < steps:
            part, pending = pending[:chunk], pending[chunk:]
            step = {} if seed is None else {"seed": seed + len(drawn)}
            token = int(self.prefill(part, position, row, **parameters, **step)[0])
            position += len(part)
            if not pending:
                drawn.append(token)
                pending = [token]
        return drawn
