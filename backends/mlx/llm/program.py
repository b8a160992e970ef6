"""The `.pte` of a language model: what it says about itself, and its steps."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.runtime import Runtime

from .._load import load_delegate

# The scalar inputs of the method that returns tokens, in its order: the value that is off, and the
# metadata that says whether it is there. See docs/llm-program.md.
SCALARS = (
    ("temperature", torch.float32, 0.0, None),
    ("top_p", torch.float32, 1.0, None),
    ("seed", torch.int64, 0, "sampling_seed"),
    ("top_k", torch.int64, 0, "sampling_top_k"),
    ("min_p", torch.float32, 0.0, "sampling_min_p"),
    ("repetition_penalty", torch.float32, 1.0, "sampling_penalties"),
    ("presence_penalty", torch.float32, 0.0, "sampling_penalties"),
    ("frequency_penalty", torch.float32, 0.0, "sampling_penalties"),
)
METHODS = {"forward", "sample"}
WORD = 32  # tokens in a word of the mask


class LLMProgram:
    """A `.pte` made by `export_llm`.

    `metadata` holds the values of its metadata methods by name. Its calls all work on the one
    KV cache inside: `Context` knows what that holds. With `profile` every instruction is timed,
    for `write_profile`, and waits for the one before. Raises FileNotFoundError where there is no
    file, ValueError if it is no language model, RuntimeError where ExecuTorch refuses it.
    """

    def __init__(self, path: str | Path, *, profile: bool = False):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        load_delegate()
        # The program has to outlive its methods.
        self._program = Runtime.get().load_program(self.path, enable_etdump=profile)
        names = self._program.method_names
        if not {"forward", "get_max_seq_len", "get_vocab_size"} <= names:
            raise ValueError(
                f"{path} is no language model: its methods are {', '.join(sorted(names))}, "
                "expected forward, get_max_seq_len and get_vocab_size among them"
            )
        self.metadata = {name: self._constant(name) for name in names - METHODS}
        self.max_seq_len: int = self.get("get_max_seq_len")
        self.context_len: int = self.get("get_max_context_len", self.max_seq_len)
        self.max_rewind: int = self.get("get_max_rewind", self.context_len)
        self.batch: int = self.get("get_max_batch_size", 1)
        self.vocab_size: int = self.get("get_vocab_size")
        self.has_head: bool = self.get("sampling_head", False)
        self.has_logits: bool = not self.has_head or "sample" in names
        self._drawing = "sample" if "sample" in names else "forward"
        self._program.load_method(self._drawing)  # now, and not while somebody waits for a token

    def write_profile(self, path: str | Path) -> None:
        """The times of all steps so far, as an ETDump for ExecuTorch's Inspector. OSError if
        `path` cannot be written."""
        open(path, "wb").close()  # ExecuTorch would not say so
        self._program.write_etdump_result_to_file(str(path), "")

    def _constant(self, name: str) -> Sequence[Any]:
        return self._program.load_method(name).execute([])

    def get(self, name: str, default: Any = None) -> Any:
        """The single value of a metadata method, or `default` where there is none."""
        values = self.metadata.get(name)
        return values[0] if values else default

    @property
    def eos_ids(self) -> set[int]:
        return set(self.metadata.get("get_eos_ids", ()))

    def takes(self, name: str) -> bool:
        """Whether the method that returns tokens has the parameter `name`."""
        if not self.has_head:
            return False
        if name in ("logit_bias", "allowed_tokens"):
            return bool(self.get(f"sampling_{name}", False))
        told_by = {scalar: metadata for scalar, *_, metadata in SCALARS}[name]
        return told_by is None or bool(self.get(told_by, False))

    def logits(self, tokens: torch.Tensor, position: int, start: Sequence[int] | None = None):
        """Writes `tokens` `[B, S]` to the cache from `position` on; logits `[B, V]` after them.

        `start` counts the padding of every row, where B is more than 1; None is none of it.
        """
        method = self._program.load_method("forward")
        return method.execute(self._inputs(tokens, position, start))[0][:, -1]

    def tokens(
        self,
        tokens: torch.Tensor,
        position: int,
        start: Sequence[int] | None = None,
        *,
        scalars: Mapping[str, float] = {},
        bias: Mapping[int, float] = {},
        allowed: torch.Tensor | None = None,
    ) -> list[int]:
        """The same, with the tokens drawn, one for every row.

        `scalars` holds values of SCALARS, where those that are not there are off; `allowed` is
        int32 `[B, ceil(V / 32)]`, or None for all.
        """
        inputs = self._inputs(tokens, position, start)
        for name, dtype, off, _ in SCALARS:
            if self.takes(name):
                inputs.append(torch.tensor(scalars.get(name, off), dtype=dtype))
        if self.takes("logit_bias"):
            inputs += self._bias(bias)
        if self.takes("allowed_tokens"):
            words = -(-self.vocab_size // WORD)
            everything = torch.full((self.batch, words), -1, dtype=torch.int32)
            inputs.append(everything if allowed is None else allowed)
        return self._program.load_method(self._drawing).execute(inputs)[0].tolist()

    def step(self, tokens: Sequence[int], position: int, **scalars: float) -> int:
        """`tokens` for one row of ids: a step by hand."""
        rows = torch.tensor([list(tokens)], dtype=torch.int64).expand(self.batch, -1)
        return self.tokens(rows, position, scalars=scalars)[0]

    def _inputs(self, tokens, position, start) -> list[torch.Tensor]:
        inputs = [tokens.contiguous(), torch.tensor([position], dtype=torch.int64)]
        if self.batch > 1:
            inputs.append(torch.tensor(start or [0] * self.batch, dtype=torch.int64))
        return inputs

    def _bias(self, bias: Mapping[int, float]) -> list[torch.Tensor]:
        # -1 is no token: places that are not needed.
        unused = self.get("sampling_logit_bias") - len(bias)
        tokens = torch.tensor([*bias, *[-1] * unused], dtype=torch.int64)
        return [tokens, torch.tensor([*bias.values(), *[0.0] * unused], dtype=torch.float32)]
