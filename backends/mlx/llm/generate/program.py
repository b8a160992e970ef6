"""`LLMProgram`: the `.pte` of a language model, its metadata and its methods."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...loader import load_delegate
from ...memory import out_of_memory
from ...quiet import quiet_imports
from ..sampling_parameters import PARAMETERS, SCALARS, SamplingParameters, mask_word_count

MODEL_METHODS = {"forward", "sample", "prefill", "decode", "verify", "logits"}


class LLMProgram:
    """A program made by `export_llm`. docs/llm-program.md describes the methods of the file.

    `metadata` holds the values of the metadata methods by name. All calls share the KV cache of the
    program; the class `Context` tracks what the cache holds. `profile` times every instruction for
    `write_profile`, which makes calls slower.

    Raises FileNotFoundError if `path` does not exist, ValueError if the file is not a language model,
    RuntimeError if ExecuTorch rejects the file or another library registered an MLXBackend first, and
    OutOfMemoryError, which is a RuntimeError, if the program does not fit into memory. `logits` and `tokens`
    raise OutOfMemoryError if a step does not fit; the cache then keeps what it held before the step.
    """

    def __init__(self, path: str | Path, *, profile: bool = False):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        load_delegate()
        with quiet_imports():
            from executorch.runtime import Runtime  # not at the top: the delegate must be registered first

        # The program must outlive its methods.
        self._program = Runtime.get().load_program(self.path, enable_etdump=profile)
        names = self._program.method_names
        if not {"forward", "get_max_seq_len", "get_vocab_size"} <= names:
            raise ValueError(
                f"{path} is not a language model: got methods {', '.join(sorted(names))}, "
                "expected forward, get_max_seq_len and get_vocab_size among them"
            )
        self.metadata = {name: self._program.load_method(name).execute([]) for name in names - MODEL_METHODS}
        self.chunk: int = self.get("get_max_seq_len")
        self.max_context_len: int = self.get("get_max_context_len", self.chunk)
        self.max_rewind: int = self.get("get_max_rewind", self.max_context_len)
        self.batch: int = self.get("get_max_batch_size", 1)
        self.vocab_size: int = self.get("get_vocab_size")
        self.has_head: bool = self.get("sampling_head", False)
        self.has_logits: bool = not self.has_head or "sample" in names
        self._head_method = "sample" if "sample" in names else "forward"
        with _memory_errors():
            self._program.load_method(self._head_method)  # loaded now, so that the first call does not have to

    def write_profile(self, path: str | Path) -> None:
        """Write the times of all calls so far as an ETDump for ExecuTorch's Inspector.

        Raises OSError if `path` cannot be written.
        """
        open(path, "wb").close()  # raises OSError; ExecuTorch itself does not report that it cannot write the file
        self._program.write_etdump_result_to_file(str(path), "")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the first value of a metadata method, or `default` if the program lacks the method."""
        values = self.metadata.get(name)
        return values[0] if values else default

    @property
    def eos_ids(self) -> set[int]:
        return set(self.metadata.get("get_eos_ids", ()))

    def takes(self, name: str) -> bool:
        """Whether the head takes the sampling parameter `name`."""
        metadata = PARAMETERS[name].metadata
        return self.has_head and (metadata is None or bool(self.get(metadata, False)))

    def logits(self, tokens: torch.Tensor, position: int, start: Sequence[int] | None = None) -> torch.Tensor:
        """Write `tokens` `[B, S]` to the cache from `position` on, and return logits `[B, V]`.

        The logits are those after the last of the tokens. `start` is the number of padding tokens at the
        beginning of each sequence, by default 0.
        """
        return self._execute("forward", self._inputs(tokens, position, start))[:, -1]

    def tokens(
        self,
        tokens: torch.Tensor,
        position: int,
        start: Sequence[int] | None = None,
        *,
        parameters: SamplingParameters = SamplingParameters(),
        seed: int | None = None,
        allowed: torch.Tensor | None = None,
    ) -> list[int]:
        """Write `tokens` like `logits`, and return the next token of each sequence, which the head draws.

        Parameters that the program does not take have no effect. `seed` determines this draw; by default it
        is `parameters.seed`. `allowed` is the mask of allowed tokens, int32 `[B, ceil(V / 32)]`, or None to
        allow all. `parameters.allowed_tokens` is not called; pass its result as `allowed`.
        """
        inputs = self._inputs(tokens, position, start)
        for name, spec in SCALARS.items():
            if self.takes(name):
                value = seed if name == "seed" and seed is not None else getattr(parameters, name)
                inputs.append(spec.tensor(value))
        if self.takes("logit_bias"):
            inputs += self._bias(parameters.logit_bias)
        if self.takes("allowed_tokens"):
            everything = torch.full((self.batch, mask_word_count(self.vocab_size)), -1, dtype=torch.int32)
            inputs.append(everything if allowed is None else allowed)
        return self._execute(self._head_method, inputs).tolist()

    def step(self, tokens: Sequence[int], position: int, **parameters: Any) -> int:
        """Write the same token ids to every sequence, and return the token that is drawn for the first sequence."""
        repeated = torch.tensor([list(tokens)], dtype=torch.int64).expand(self.batch, -1)
        return self.tokens(repeated, position, parameters=SamplingParameters(**parameters))[0]

    def _execute(self, method: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Execute `method`, which is loaded on first use, and return its output."""
        with _memory_errors():
            return self._program.load_method(method).execute(inputs)[0]

    def _inputs(self, tokens, position, start) -> list[torch.Tensor]:
        inputs = [tokens.contiguous(), torch.tensor([position], dtype=torch.int64)]
        if self.batch > 1:
            inputs.append(torch.tensor(start or [0] * self.batch, dtype=torch.int64))
        return inputs

    def _bias(self, bias: Mapping[int, float]) -> list[torch.Tensor]:
        unused = self.get("sampling_logit_bias") - len(bias)
        tokens = torch.tensor([*bias, *[-1] * unused], dtype=torch.int64)  # the head ignores token -1
        return [tokens, torch.tensor([*bias.values(), *[0.0] * unused], dtype=torch.float32)]


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn a failure for want of memory into OutOfMemoryError."""
    try:
        yield
    except RuntimeError as error:
        failure = out_of_memory(error)
        if failure is None:
            raise
        raise failure from error
