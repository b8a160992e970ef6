"""`PartitionedLLM`: a tensor-parallel model, written as one program for each process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ....custom_ops.distributed import simulated_group
from ...processes import part_path
from ..attention.cached import use_cached_attention
from ..decoder import CachedDecoder
from ..exported import ExportedLLM, folder_beside
from ..head_config import HeadConfig
from ..lowering import lower
from ..methods import MethodKind, example_inputs
from ..reference import difference_beyond_rounding
from ..serialize import serialize
from .plan import Plan, plan, tensors_of
from .rewriter import part_of, rewritten

_SEED = 22
_LENGTH = 8  # tokens of the prompt of the check


@dataclass
class PartitionedLLM(ExportedLLM):
    """The result of `export_llm` with `tensor_parallel`.

    `parts` is the number of files. `whole` maps the name of a weight that every process has as a whole to the reason.
    `cache_bytes` is the size of the KV caches of a process. `report` is that of the last part written, or None.
    """

    parts: int = 1
    whole: dict[str, str] = field(default_factory=dict)
    _lower: Callable[[int], Any] | None = field(default=None, repr=False)

    def save(self, path: str | Path) -> int:
        """Write a `.pte` for each process, such as `model-0-of-2.pte` for `model.pte`. Return the total size in bytes.

        Only one program is in memory at a time. The files get their names when all of them are complete.
        """
        path = Path(path)
        size = 0
        with folder_beside(path) as folder:
            names = [part_path(path, rank, self.parts) for rank in range(self.parts)]
            for rank, name in enumerate(names):
                program, self.report = self._lower(rank)
                with open(folder / name.name, "wb") as file:
                    program.write_to_file(file)
                    size += file.tell()
                del program
            for name in names:
                os.replace(folder / name.name, name)
        return size


def partition(
    decoder: CachedDecoder,
    methods: Mapping[str, ExportedProgram],
    kinds: Mapping[str, MethodKind],
    head: HeadConfig,
    constants: dict[str, Any],
    processes: int,
    *,
    verify: bool,
    **fields: Any,
) -> PartitionedLLM:
    """Split the exported methods of `decoder` among `processes`. `fields` are further fields of the result.

    With `verify`, the parts run together in eager torch, and their logits are compared with those of `decoder`. Raises
    ValueError if the model cannot be split, or if these logits differ by more than rounding.
    """
    if decoder.has_state:
        raise ValueError("export_llm: tensor_parallel: got a model with states, expected layers with KV caches only")
    found = plan(methods, processes, decoder.model.config.get_text_config().vocab_size)
    if verify:
        _check(found, decoder, methods, kinds, head)
    export_id = _export_id(methods, constants, processes)
    constants |= {"tensor_parallel_size": processes, "tensor_parallel_export": export_id}

    def lower_part(rank: int):
        lowered, report = lower(
            _part(found, methods, rank), constants | {"tensor_parallel_rank": rank}, allow_extensions=True
        )
        return serialize(lowered), report

    tensors = tensors_of(next(iter(methods.values())))
    # The difference between the caches of a process and those of the whole model: negative if caches are split.
    cache_difference = sum(
        part_of(tensors[name], split, 0, processes).nbytes - tensors[name].nbytes
        for name, split in found.tensors.items() if "_cache_" in name.rpartition(".")[2]
    )  # fmt: skip
    return PartitionedLLM(
        program=None, report=None, metadata=constants, methods=tuple(methods),
        cache_bytes=decoder.cache.bytes + cache_difference,
        cache_values_per_token=tuple(decoder.cache.numbers_per_token), parts=processes, whole=found.whole,
        _lower=lower_part, **fields,
    )  # fmt: skip


def _export_id(methods: Mapping[str, ExportedProgram], constants: Mapping[str, Any], processes: int) -> int:
    """Return a number of 62 bits that identifies the export. It depends only on what the parts are made from."""
    digest = hashlib.sha256(f"{processes}\n".encode())
    tensors: dict[str, torch.Tensor] = {}
    for name, program in methods.items():
        digest.update(f"{name}\n{program.graph}\n".encode())
        tensors |= tensors_of(program)
    for values in (constants, tensors):
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                digest.update(f"{name} {value!r}\n".encode())
                continue
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy())
    return int.from_bytes(digest.digest()[:8], "little") >> 2


def _part(found: Plan, methods: Mapping[str, ExportedProgram], rank: int) -> dict[str, ExportedProgram]:
    """Return the methods of the process `rank`."""
    tensors = {}
    for program in methods.values():
        tensors |= tensors_of(program)
    parts = {name: part_of(tensors[name], split, rank, found.processes) for name, split in found.tensors.items()}
    return {
        name: rewritten(program, found.analyses[name], parts, rank, found.processes)
        for name, program in methods.items()
    }


def _check(
    found: Plan, decoder: CachedDecoder, methods: Mapping[str, ExportedProgram], kinds: Mapping[str, MethodKind],
    head: HeadConfig,
) -> None:  # fmt: skip
    """Raise ValueError if the parts together give other logits than the decoder, beyond rounding.

    The logits are those of the output projection. The parts gather them before the model scales or caps them.
    """
    name = next(name for name, kind in kinds.items() if kind.form == "chunk")
    length = min(_LENGTH, decoder.chunk)
    inputs = example_inputs(kinds[name], decoder, head, length)
    vocab_size = decoder.model.config.get_text_config().vocab_size
    inputs["tokens"] = torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(_SEED))
    places = [inputs[each] for each in ("input_pos", "row") if each in inputs]
    small = CachedDecoder(decoder.model, rows=decoder.rows, max_context_len=length, specs=decoder.specs).eval()
    projected: list[torch.Tensor] = []
    handle = decoder.model.get_output_embeddings().register_forward_hook(lambda _, __, y: projected.append(y))
    with torch.no_grad():
        small(inputs["tokens"], *places)
    handle.remove()
    use_cached_attention(decoder.model, decoder.cache)  # in place of the small caches
    first = {name: methods[name]}
    modules = [_part(found, first, rank)[name].module() for rank in range(found.processes)]
    arguments, options = (inputs.pop("tokens"), inputs.pop("input_pos")), inputs
    gathered: list[torch.Tensor] = []
    simulated_group([lambda m=module: m(*arguments, **options) for module in modules], gathered)
    logits, expected = (each[-1].flatten(0, -2)[-1, :vocab_size].float() for each in (gathered, projected))
    if difference := difference_beyond_rounding(logits, expected, decoder.model):
        raise ValueError(
            f"export_llm: tensor_parallel: {found.processes} parts of {type(decoder.model).__name__} give other logits "
            f"than the whole model: {difference}"
        )
