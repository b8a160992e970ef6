"""Compiles programs as a user does: torch.export, then ExecuTorch with the partitioner.

All programs are exported as one module, which is faster than one export per program.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from loaded_method import LoadedMethod

from .programs import EXTENTS, Batch, Program
from .route import CaptureRefused, NotDelegated


class ExportedRoute:
    """Exports the programs as one method. See `route.Route`."""

    def __init__(self, programs: Sequence[Program]):
        self.failures: dict[int, Exception] = {}
        self._programs = dict(enumerate(programs))
        lowered, declined = _lower(Batch(programs).eval())
        if declined:
            self.failures = {index: NotDelegated(reason) for index, reason in declined.items()}
            self._programs = {i: p for i, p in self._programs.items() if i not in declined}
            if self._programs:
                lowered, _ = _lower(Batch(list(self._programs.values())).eval())
        self._method = _load(lowered) if self._programs else None

    def run(self, extent: int) -> dict[int, Sequence[torch.Tensor] | Exception]:
        if self._method is None:
            return {}
        arguments = [t for p in self._programs.values() for t in p.arguments(extent)]
        actual = iter(self._method.execute(arguments))
        return {index: [next(actual) for _ in program.outputs] for index, program in self._programs.items()}


def _lower(batch: Batch):
    """Return the lowered module, and a dict from the index of each program that was not delegated completely to the
    reason."""
    example = tuple(t for p in batch.programs for t in p.arguments(EXTENTS[0]))
    with _quiet():
        try:
            with torch.no_grad():
                exported = torch.export.export(batch, example, dynamic_shapes=batch.dynamic_shapes())
        except Exception as error:  # torch's own refusals have many types
            raise CaptureRefused(f"{type(error).__name__}: {error}") from error
        partitioner = _Partitioner()
        try:
            lowered = _to_edge(exported, partitioner)
        except Exception as error:
            _check_portable(exported, type(error))
            raise
    owners = dict(enumerate(i for i, program in enumerate(batch.programs) for _ in program.outputs))
    owners |= {f"{name}_{i}": i for i, program in enumerate(batch.programs) for name, _ in program.state}
    return lowered, {owners[output]: reason for output, reason in partitioner.declined.items()}


@contextlib.contextmanager
def _quiet():
    """Hide the warnings of torch and ExecuTorch about the programs."""
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)


def _to_edge(exported, *partitioners: MLXPartitioner):
    config = EdgeCompileConfig(_check_ir_validity=False)
    return to_edge_transform_and_lower(exported, partitioner=list(partitioners), compile_config=config)


def _check_portable(exported, kind: type[Exception]) -> None:
    """Raise CaptureRefused if ExecuTorch's own passes fail on the program with an error of type `kind`.

    They fail on `w[i]` with an index tensor of rank 0, which torch.export turns into a `select` by `i.item()`, and on
    `addcmul` of integers with a float as `value`.
    """
    try:
        _to_edge(exported)
    except kind as error:
        raise CaptureRefused(f"{type(error).__name__}: {error}") from error


class _Partitioner(MLXPartitioner):
    """A partitioner that records which outputs of the graph depend on a declined node.

    `declined` maps the index of such an output, or the name of such a buffer, to the reason why the node was declined.
    """

    def __init__(self):
        super().__init__(allow_extensions=True)
        self.declined: dict[int | str, str] = {}

    def partition(self, exported_program):
        result = super().partition(exported_program)
        reasons = {d.node: f"{d.target}: {d.reason}" for d in self.explain().refused}
        output = exported_program.graph.output_node()
        written = [s.target for s in exported_program.graph_signature.output_specs if s.target is not None]
        for node in exported_program.graph.nodes:
            if node.name in reasons:
                for index in _outputs_of(node, output):
                    is_buffer = index < len(written)
                    self.declined[written[index] if is_buffer else index - len(written)] = reasons[node.name]
        return result


def _outputs_of(node, output) -> set[int]:
    """Return the indices of the outputs that depend on `node`."""
    reached, open_nodes = {node}, [node]
    while open_nodes:
        users = [u for u in open_nodes.pop().users if u not in reached]
        reached.update(users)
        open_nodes += users
    return {i for i, value in enumerate(output.args[0]) if value in reached}


def _load(lowered):
    return LoadedMethod(bytes(lowered.to_executorch().buffer))
