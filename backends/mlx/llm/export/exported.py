"""`ExportedLLM`: the result of `export_llm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executorch.exir import ExecutorchProgramManager

from ...partitioner import Report
from ...weights_file import staged
from .check import ProgramCheck, VerificationError
from .quantization.calibration import Perplexity
from .quantization.kv_caches import KVQuantization


@dataclass
class ExportedLLM:
    """The result of `export_llm`.

    - `report`: the nodes that were delegated and those that were not.
    - `cache_bytes`: the size of the KV caches in bytes.
    - `cache_values_per_token`: for each layer with a cache, the number of numbers that it keeps for a token.
    - `unquantized`: the paths of the layers that stay in full precision, because the length of their weights' rows is
      not a multiple of any group size.
    - `perplexity`: the perplexity before and after the quantization, or None.
    - `notes`: a line for each format of a GGUF file whose conversion was not exact, with the error; and the reason, if
      a head for multi-token prediction was left out.
    - `kv_quantization`: what quantized KV caches change, or None.
    - `check`: the result of the check that `save` made, or None.
    """

    program: ExecutorchProgramManager
    report: Report
    metadata: dict[str, Any]
    methods: tuple[str, ...]
    cache_bytes: int
    cache_values_per_token: tuple[int, ...]
    unquantized: tuple[str, ...] = ()
    perplexity: Perplexity | None = None
    notes: tuple[str, ...] = ()
    kv_quantization: KVQuantization | None = None
    check: ProgramCheck | None = None
    _checker: Callable[[Path], ProgramCheck] | None = field(default=None, repr=False)

    def save(self, path: str | Path) -> int:
        """Write the `.pte`, and its weights file if it has one, and return the size of the `.pte` in bytes.

        Unless the model was exported with `verify=False`, a temporary file is compared with the eager model before it
        is moved to `path`. Raises VerificationError if they differ by more than rounding. An existing file at `path`
        then stays unchanged.
        """
        with staged(self.program, Path(path)) as unchecked:
            size = unchecked.stat().st_size
            if self._checker is not None:
                self.check = self._checker(unchecked)
                if not self.check.ok:
                    raise VerificationError(self.check)
        return size
