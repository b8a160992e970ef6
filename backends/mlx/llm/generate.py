"""Run an exported LLM from Python, on ExecuTorch's own runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.runtime import Runtime, Verification

from .._load import load_delegate


class LLMProgram:
    """A `.pte` made by `export_llm` with its sampling head.

    `metadata` holds the values of the program's metadata methods by name.
    """

    def __init__(self, path: str | Path):
        load_delegate()
        # The program has to outlive its methods.
        self._program = Runtime.get().load_program(Path(path), verification=Verification.Minimal)
        names = self._program.method_names
        self.metadata = {
            name: self._program.load_method(name).execute([]) for name in names - {"forward"}
        }
        if not self.get("sampling_head"):
            raise ValueError(f"{path}: the program has no sampling head; export it with one")
        self._forward = self._program.load_method("forward")

    def get(self, name: str, default: Any = None) -> Any:
        """The single value of a metadata method."""
        values = self.metadata.get(name)
        return values[0] if values else default

    @property
    def eos_ids(self) -> set[int]:
        return set(self.metadata.get("get_eos_ids", ()))

    def step(
        self,
        tokens: Sequence[int],
        position: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        top_k: int = 0,
        min_p: float = 0.0,
    ) -> int:
        """Write `tokens` to the cache from `position` on; returns the token drawn after them."""
        inputs = [
            torch.tensor([list(tokens)], dtype=torch.int64),
            torch.tensor([position], dtype=torch.int64),
            torch.tensor(temperature, dtype=torch.float32),
            torch.tensor(top_p, dtype=torch.float32),
        ]
        for name, value, dtype in (
            ("seed", seed, torch.int64),
            ("top_k", top_k, torch.int64),
            ("min_p", min_p, torch.float32),
        ):
            if self.get(f"sampling_{name}"):
                inputs.append(torch.tensor(value, dtype=dtype))
        return int(self._forward.execute(inputs)[0])

    def generate(
        self, prompt: Sequence[int], *, max_new_tokens: int, seed: int = 0, **parameters: float
    ) -> Iterator[int]:
        """The tokens that follow `prompt`, one by one, up to and without an end token.

        The draw of step i uses `seed + i`; `parameters` are those of `step`.
        """
        capacity = self.get("get_max_seq_len")
        if not 0 < len(prompt) <= capacity:
            raise ValueError(f"generate: the prompt has {len(prompt)} tokens, expected 1 to {capacity}")
        tokens, position = list(prompt), 0
        for index in range(max_new_tokens):
            if position + len(tokens) > capacity:
                return
            token = self.step(tokens, position, seed=seed + index, **parameters)
            if token in self.eos_ids:
                return
            yield token
            position += len(tokens)
            tokens = [token]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, by the program's own table."""
        ends, data = self.get("token_offsets").tolist(), self.get("token_bytes").numpy().tobytes()
        return b"".join(data[ends[t] : ends[t + 1]] for t in tokens).decode(errors="replace")
