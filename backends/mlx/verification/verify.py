"""`verify`: compares a finished program with eager torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only

from ..inspect.pte import read_payloads
from ..partitioner import MLXPartitioner
from ..quiet import quiet_lowering
from ..workarounds.dynamic_steps import dynamic_steps
from ..workarounds.program_caches import forget_programs
from .cost import Cost
from .load import load
from .locate import CannotLocate, locate
from .noise import RoundingNoise
from .origins import has_extensions
from .report import Departure, OutputCheck, VerificationReport
from .rounding import compare

_NOISY_RUNS = 4

Args = tuple[Any, ...]


def verify(
    pte: str | Path | bytes,
    module: torch.nn.Module | ExportedProgram,
    inputs: Args | list[Args],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> VerificationReport:
    """Run the method `forward` of a finished program and eager torch on the same inputs, and compare all outputs.

    - `pte`: a path, or the bytes of the program.
    - `module`: the model in eager torch, or the exported program that was lowered. Its buffers
      have the same contents afterwards as before.
    - `inputs`: the positional arguments of a call, as a tuple; or a list with such a tuple for each of several calls,
      which run in order. Use several calls for a module with mutable buffers.
    - `kwargs`: the keyword arguments of every call, in the order in which the program takes them.
    - `dynamic_shapes`: the argument of `torch.export.export` with which the program was exported. Without it,
      the report cannot name the first departing instruction of a program with dynamic shapes. Not needed if `module`
      is an exported program.

    The tolerance follows how much `module` amplifies rounding errors. It comes from eager runs in which every
    intermediate value has a random rounding error of its dtype: the further their outputs lie from those of a plain
    eager run, the larger is the tolerance. If an output differs by more than the tolerance, the module is exported and
    lowered again, with the default options of `MLXPartitioner`, except that extensions are allowed if the program has
    any. The report names the first instruction whose value differs. If lowering does not give the same instructions
    again, no instruction is named, and the note of the report says why.

    Raises TypeError or ValueError that names the argument, FileNotFoundError if the file is missing, and RuntimeError
    if ExecuTorch rejects the program or its inputs.
    """
    cost = Cost()
    calls = _checked_calls(inputs, kwargs)
    data = _checked_bytes(pte)
    eager = _Eager(module)
    run = load(data)
    actual = [run(_flat(call)) for call in calls]
    expected = eager.run(calls)
    noisy = [eager.run(calls, seed) for seed in range(_NOISY_RUNS)]
    checks = tuple(_compare(actual, expected, noisy))
    departure, note = None, None
    if not all(check.ok for check in checks):
        departure, note = _locate(data, module, calls, dynamic_shapes)
    return VerificationReport(checks, departure, note, cost.seconds, cost.added_memory)


def _checked_calls(inputs: Any, kwargs: Mapping[str, Any] | None) -> list[tuple[tuple, dict]]:
    calls = inputs if isinstance(inputs, list) else [inputs]
    if not calls:
        raise ValueError("verify: inputs: got an empty list, expected a tuple for each call")
    for call in calls:
        if not isinstance(call, tuple):
            raise TypeError(
                f"verify: inputs: got {type(call).__name__}, expected a tuple of arguments or a list of such tuples"
            )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"verify: kwargs: got {type(kwargs).__name__}, expected a dict")
    return [(call, dict(kwargs or {})) for call in calls]


def _checked_bytes(pte: Any) -> bytes:
    if isinstance(pte, (str, Path)):
        return Path(pte).read_bytes()
    if not isinstance(pte, (bytes, bytearray, memoryview)):
        raise TypeError(f"verify: pte: got {type(pte).__name__}, expected a path or the bytes of a .pte file")
    return bytes(pte)


def _flat(call: tuple[tuple, dict]) -> list[Any]:
    """Return the inputs of the program in a call: copies of its arguments, without those that are None."""
    return [_copied(leaf) for leaf in tree_leaves(call) if leaf is not None]


def _copied(value: Any) -> Any:
    return value.detach().clone(memory_format=torch.contiguous_format) if isinstance(value, torch.Tensor) else value


class _Eager:
    """The model in eager torch. Every run starts with the same contents of the buffers and restores them at its end."""

    def __init__(self, module: Any):
        if isinstance(module, ExportedProgram):
            module = module.module()
        elif not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"verify: module: got {type(module).__name__}, expected a torch.nn.Module or an ExportedProgram"
            )
        elif module.training:
            raise ValueError("verify: module: it is in training mode, expected module.eval()")
        self.module = module

    def run(self, calls: Sequence[tuple[tuple, dict]], noise_seed: int | None = None) -> list[list[Any]]:
        """Return the outputs of each call. With a `noise_seed`, the run has rounding noise of this seed."""
        buffers = [(b, b._version, b.clone()) for b in self.module.buffers()]
        try:
            with torch.no_grad():
                if noise_seed is None:
                    return [self._call(*call) for call in calls]
                with RoundingNoise(noise_seed):
                    return [self._call(*call) for call in calls]
        finally:
            with torch.no_grad():
                for buffer, version, value in buffers:
                    if buffer._version != version:
                        buffer.copy_(value)

    def _call(self, args: tuple, kwargs: dict) -> list[Any]:
        args, kwargs = tree_map_only(torch.Tensor, _copied, (args, kwargs))
        return [_copied(leaf) for leaf in tree_leaves(self.module(*args, **kwargs)) if leaf is not None]


def _compare(actual: list[list], expected: list[list], noisy: list[list[list]]):
    for call, (got, wanted) in enumerate(zip(actual, expected)):
        if len(got) != len(wanted):
            raise ValueError(
                f"verify: pte: got {len(got)} outputs in call {call}, expected {len(wanted)} as in the module"
            )
        for output, (a, e) in enumerate(zip(got, wanted)):
            yield OutputCheck(call, output, compare(a, e, [run[call][output] for run in noisy]))


@forget_programs()
def _locate(data: bytes, module: Any, calls: list, dynamic_shapes: Any) -> tuple[Departure | None, str | None]:
    """Return the first departure and None, or None and a note that says why no departure is named."""
    contents = read_payloads(data)
    delegates = [d for d in contents.delegates if d.method == "forward"]
    if not delegates:
        return None, "the method has no MLX program, so there is no instruction to name"
    allow_extensions = any(has_extensions(delegate.graph) for delegate in contents.delegates)
    offsets = contents.named_data_offsets
    constants = {key: data[offsets[key] : offsets[key] + size] for key, size in contents.named_data.items()}
    inputs = [_flat(call) for call in calls]
    # The file does not say whether float64 tensors were replaced.
    for legalize in (("complex",), ("complex", "float64")):
        edge = _lower(module, calls[0], dynamic_shapes, allow_extensions=allow_extensions, legalize=legalize)
        try:
            return locate(edge, delegates, constants, inputs, noisy_runs=_NOISY_RUNS), None
        except CannotLocate as error:
            reason = error
    return None, f"the intermediate values cannot be compared: {reason}"


def _lower(module: Any, call: tuple[tuple, dict], dynamic_shapes: Any, **options: Any) -> ExportedProgram:
    """Return the lowered graph of the module. `call` has the example inputs, and `options` are the partitioner's."""
    with quiet_lowering(), torch.no_grad():
        exported = module
        if not isinstance(module, ExportedProgram):
            with dynamic_steps():
                exported = torch.export.export(module, *call, dynamic_shapes=dynamic_shapes)
        partitioner = MLXPartitioner(**options)
        config = EdgeCompileConfig(_check_ir_validity=False)
        lowered = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
        return lowered.exported_program()
