"""Which mutable buffers the methods of a program share, and who owns them.

Two methods share a buffer if it is the same tensor of the same module: `torch.export.export` keeps the tensors of the
module. Names do not matter, because a module that wraps another one changes the names of its buffers.

MLX has to own a shared buffer in all methods that use it. If ExecuTorch keeps it in one of them, the methods would not
share it: ExecuTorch gives each method memory of its own.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from .builder.digests import Digests
from .builder.program import stored_tensor
from .builder.registry import target_name

_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
# The remedy for a mutable buffer of ExecuTorch in a program with several methods.
SHARE_BUFFERS = (
    "By default, the methods of a program do not share such a buffer, and may overwrite it: pass "
    "ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True)) to to_executorch"
)
_DIGITS = 16  # of a digest, as in builder/digests.py


# -- one method -------------------------------------------------------------------


def tag_owned_data(program: ExportedProgram, reasons: Mapping[Node, str | None]) -> dict[str, str]:
    """Give each parameter, constant and buffer the tag of the delegate that owns it.

    A delegate owns the data that no other delegate and no undelegated node uses, and that is no output of the program.
    A delegate owns a mutable buffer only if, in addition, it computes the buffer's new value, nothing else reads that
    new value, and the new value is no output of the program. No delegate owns a parameter whose gradient the program
    returns: ExecuTorch's optimizers write it. All other data stays with ExecuTorch, which passes it as arguments.
    Returns why, by the name of each tensor. ExecuTorch starts its mutable buffers with their initial values only if
    they have the metadata that this function adds.

    `reasons` maps each call node to the reason why it is not delegated, or to None.
    """
    signature = program.graph_signature
    names = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind in _STORED}
    new_values = {buffer: value for value, buffer in signature.buffers_to_mutate.items()}
    trained = {spec.target for spec in signature.output_specs if spec.kind == OutputKind.GRADIENT_TO_PARAMETER}
    nodes = {n.name: n for n in program.graph.nodes}
    kept = {}
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in names:
            continue
        name = names[node.name]
        if name in trained:
            kept[name] = "the program returns its gradient"
            continue
        new_value = nodes[new_values[name]] if name in new_values else None
        uses = _uses(node, new_value, new_value is not None and new_value.name in signature.user_outputs)
        tags = {use.meta.get("delegation_tag") for use in uses}  # the output of the graph has no tag
        if len(tags) == 1 and None not in tags:
            node.meta["delegation_tag"] = tags.pop()
        elif tags:
            kept[name] = _why_kept(node, new_value, uses, reasons)
            if new_value is not None:
                node.meta["et_init_buffer"] = True
    return kept


def _uses(node: Node, new_value: Node | None, is_returned: bool) -> list[Node]:
    """Return the nodes that have to be of one delegate if it is to own the buffer `node`.

    `is_returned`: whether the program returns `new_value`, the new value of the buffer.
    """
    if new_value is None:
        return list(node.users)
    readers = [user for user in new_value.users if user.op != "output" or is_returned]
    return [*node.users, new_value, *readers]


def _why_kept(node: Node, new_value: Node | None, uses: list[Node], reasons: Mapping[Node, str | None]) -> str:
    """Return why no delegate owns `node`, of which `uses` are the uses."""
    for use in uses:
        if use is new_value and use.op == "placeholder":
            return f"its new value is {use.name}, an input or a buffer itself"
        if use.op == "output":
            return "the program returns it"
        if "delegation_tag" not in use.meta:
            verb = "computes" if use is new_value else "uses"
            reason = reasons.get(use) or "it is not worth a call of the delegate"
            return f"{use.name} ({target_name(use.target)}) {verb} it and is not delegated: {reason}"
    return "several delegated parts of the graph use it, between which there are nodes that are not delegated"


def refuse_lost_writes(program: ExportedProgram) -> None:
    """Raise RuntimeError if the new value of a buffer is another buffer itself.

    ExecuTorch takes such a value for one that was written in place, and the buffer would keep its old value.
    `MLXPartitioner.transform_for_pre_decomposition` prevents this.
    """
    signature = program.graph_signature
    buffers = signature.inputs_to_buffers
    for value, buffer in signature.buffers_to_mutate.items():
        if buffers.get(value, buffer) != buffer:
            raise RuntimeError(
                f"buffer {buffer}: its new value is the buffer {buffers[value]} itself, and ExecuTorch would not write "
                "it. Use to_edge_transform_and_lower in place of to_edge and to_backend"
            )


# -- all methods ------------------------------------------------------------------


@dataclass(frozen=True)
class _Memory:
    """Where the elements of a tensor are. Equal for two tensors that have the same elements."""

    begin: int  # an address
    end: int
    layout: tuple

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Memory:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return cls(0, 0, (id(tensor),))
        layout = tensor.dtype, tuple(tensor.shape), tensor.stride()
        if tensor.numel() == 0:
            return cls(0, 0, (tensor.untyped_storage()._cdata, *layout))
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        begin = tensor.data_ptr()
        return cls(begin, begin + (last + 1) * tensor.element_size(), layout)

    def overlaps(self, other: _Memory) -> bool:
        return self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class State:
    """The buffers that a method uses, by name with their type, and the names of those that it writes.

    ExecuTorch gives a partitioner fake tensors, so that it cannot know whether two methods have the same tensor.
    """

    used: Mapping[str, tuple]
    written: frozenset[str]

    @classmethod
    def of(cls, program: ExportedProgram) -> State:
        nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder" and n.users}
        buffers = program.graph_signature.inputs_to_buffers
        values = {buffers[name]: node.meta["val"] for name, node in nodes.items() if name in buffers}
        used = {name: (val.dtype, tuple(val.shape)) for name, val in values.items()}
        return cls(used, frozenset(_written(program)))


def shared_names(states: Iterable[State]) -> list[str]:
    """Return the names of the buffers that a method writes, and that another method uses with the same type."""
    states = list(states)
    written = {(name, state.used.get(name)) for state in states for name in state.written}
    return sorted({name for name, kind in written if sum(s.used.get(name) == kind for s in states) > 1})


class KeptBuffers:
    """The buffers that ExecuTorch keeps in the programs of one lowering, which a partitioner has seen one by one.

    ExecuTorch calls the partitioner for each method, and then the backend once for all of them. It passes nothing from
    one call to the next, so this object remembers the programs of the present thread.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def add(self, program: ExportedProgram, reasons: Mapping[str, str]) -> None:
        """Record, for each parameter, buffer and constant of `program` that ExecuTorch keeps, the reason."""
        programs = [*self._programs(), (weakref.ref(program), dict(reasons))]
        self._local.programs = [(p, r) for p, r in programs if p() is not None]  # drops those of a failed lowering

    def take(self) -> list[tuple[ExportedProgram, dict[str, str]]]:
        """Return the programs that were added, with their reasons, and forget them."""
        programs, self._local.programs = self._programs(), []
        return [(program, reasons) for p, reasons in programs if (program := p()) is not None]

    def _programs(self) -> list:
        return getattr(self._local, "programs", [])


KEPT = KeptBuffers()


class SharedBuffers:
    """The buffers of the delegated graphs in `programs` that at least one method writes, and their keys.

    The key of a buffer is equal in all methods that share it. It contains the name in the first of these graphs and the
    digest of the initial contents. If several buffers agree in both, the digests of all but the first are changed.

    `kept` are the buffers that ExecuTorch keeps, by program. Raises RuntimeError if one of them is also a buffer of a
    delegated graph, or if two buffers overlap.
    """

    def __init__(
        self,
        programs: Iterable[ExportedProgram],
        kept: Iterable[tuple[ExportedProgram, Mapping[str, str]]],
        digests: Digests,
    ):
        programs, kept = list(programs), list(kept)
        self._digests = digests
        self._keys: dict[_Memory, str] = {}
        owners = [*programs, *(program for program, _ in kept)]
        self._written = {_Memory.of(stored_tensor(p, name)): name for p in owners for name in _written(p)}
        held = {memory: name for program in programs for name, memory in self._held(program)}
        for program, reasons in kept:
            for name, reason in reasons.items():
                if _Memory.of(stored_tensor(program, name)) in held:
                    raise RuntimeError(
                        f"buffer {name}: {reason}, so that ExecuTorch keeps the buffer in one method, and MLX owns it "
                        "in another. The methods would not share it, because ExecuTorch gives each method buffers of "
                        "its own. Change the model so that MLX runs all operators that read or write the buffer, or "
                        "lower all methods that use it without MLX"
                    )
        if len(kept) > 1:
            _warn_of_mutable(kept)

    def keys_of(self, program: ExportedProgram) -> dict[str, str]:
        """Return the keys of the buffers that `program` shares or writes, by the name that each has in `program`."""
        return {name: self._key(memory, name, stored_tensor(program, name)) for name, memory in self._held(program)}

    def _held(self, program: ExportedProgram) -> Iterator[tuple[str, _Memory]]:
        """Yield the name and the memory of each tensor of `program` that a method writes."""
        for spec in program.graph_signature.input_specs:
            if spec.kind not in _STORED:
                continue
            memory = _Memory.of(stored_tensor(program, spec.target))
            if memory in self._written:
                yield spec.target, memory
            overlapping = (m for m in self._written if m != memory and m.overlaps(memory))
            other = self._written.get(next(overlapping, None))
            if other is not None:
                raise RuntimeError(
                    f"buffer {other}: it shares memory with {spec.target}, which has another shape or begins "
                    "elsewhere, and a write of one would not change the other. Let the methods use the same tensor"
                )

    def _key(self, memory: _Memory, name: str, tensor: torch.Tensor) -> str:
        if memory not in self._keys:
            digest = self._digests.of(tensor.detach().contiguous()).text
            taken, key = set(self._keys.values()), f"{name}.{digest}"
            while key in taken:
                digest = hashlib.sha256(digest.encode()).hexdigest()[:_DIGITS]
                key = f"{name}.{digest}"
            self._keys[memory] = key
        return self._keys[memory]


def _written(program: ExportedProgram) -> Iterable[str]:
    return program.graph_signature.buffers_to_mutate.values()


def _warn_of_mutable(kept: Iterable[tuple[ExportedProgram, Mapping[str, str]]]) -> None:
    """Warn if ExecuTorch keeps a mutable buffer in a program with several methods."""
    names = [name for program, reasons in kept for name in _written(program) if name in reasons]
    if names:
        warnings.warn(
            f"ExecuTorch keeps the mutable buffers {', '.join(dict.fromkeys(names))}: see MLXPartitioner.explain(). "
            f"{SHARE_BUFFERS}",
            UserWarning,
            stacklevel=2,
        )
