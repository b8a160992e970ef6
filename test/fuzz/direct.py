"""Compiles programs without torch.export and without ExecuTorch's passes, about five times as fast as `exported.py`.

torch traces each program to a core ATen graph, and the builder lowers this graph. All programs of a list become the
methods of one `.pte`. The partitioner and the edge dialect are not used.

`PortableRoute` makes portable programs, and runs them in the interpreter as ExecuTorch's own MLX delegate does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from executorch_mlx import ops as _  # noqa: F401  (fills the registry)
from executorch_mlx.builder.assemble import assemble
from executorch_mlx.builder.program import ProgramBuilder
from executorch_mlx.builder.registry import REGISTRY
from executorch_mlx.extents import bounds
from executorch_mlx.serialization.pack import pack_payload
from interpreter import OFFICIAL, Refused
from interpreter import Program as OfficialProgram
from irprograms.graph import load, pte
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.export import default_decompositions
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from .programs import DYNAMIC, EXTENTS, LARGEST_EXTENT, Program
from .route import CaptureRefused, NotDelegated

# The smallest extent for which programs are traced. A program may refuse a smaller extent, for example because the size
# of a slice depends on whether the extent is 1.
_SMALLEST_EXTENT = 2


class DirectRoute:
    """Compiles each program by itself, to a method of one `.pte`. See `route.Route`."""

    options = {"allow_extensions": True}  # of the builder

    def __init__(self, programs: Sequence[Program]):
        self.failures: dict[int, Exception] = {}
        self._programs, methods = {}, {}
        for index, program in enumerate(programs):
            try:
                methods[str(index)], is_dynamic = _compile(program, self.options)
            except Exception as failure:  # whatever the compiler raises is a finding
                self.failures[index] = failure
            else:
                self._programs[index] = program, is_dynamic
        self._load(pte(methods) if methods else None)

    def _load(self, file: bytes | None) -> None:
        self._program = file and load(file)

    def _execute(self, method: str, arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._program.load_method(method).execute(arguments)

    def run(self, extent: int) -> dict[int, Sequence[torch.Tensor] | Exception]:
        results = {}
        for index, (program, is_dynamic) in self._programs.items():
            if is_dynamic or extent == EXTENTS[0]:
                try:
                    results[index] = self._execute(str(index), program.arguments(extent))
                except (RuntimeError, Refused) as error:
                    if extent >= _SMALLEST_EXTENT:
                        results[index] = error
        return results


class PortableRoute(DirectRoute):
    """Runs portable programs as ExecuTorch's own MLX delegate does."""

    options = {"portable": True}

    def _load(self, file: bytes | None) -> None:
        self._program = file and OfficialProgram(file, OFFICIAL)

    def _execute(self, method: str, arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._program.execute(method, arguments)


def _compile(program: Program, options: dict[str, bool]) -> tuple[SimpleNamespace, bool]:
    """Return the compiled method of a program, and whether the method accepts every extent.

    The method is an object with the attributes of `irprograms.Graph` that `irprograms.pte` reads.
    """
    if program.state:
        raise CaptureRefused("this route has no mutable buffers")
    traced, is_dynamic = _trace(program, program.is_dynamic)
    exported = _exported(program, traced)
    for node, reason in ProgramBuilder(exported, **options).check().items():
        if reason is not None:
            raise NotDelegated(f"{node.target}: {reason}")
    compiled = assemble(ProgramBuilder(exported, **options).build())
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    method = SimpleNamespace(
        data=compiled.constants,
        inputs=[_interface(n.meta["val"]) for n in placeholders[: len(program.inputs)]],
        outputs=[
            (*_interface(n.meta["val"])[:3], compiled.graph.tensor_meta[slot.idx].dim_order)
            for n, slot in zip(traced.graph.output_node().args[0], compiled.graph.output_map)
        ],
        payload=lambda: pack_payload(compiled.graph),
    )
    return method, is_dynamic


def _interface(value: torch.Tensor) -> tuple:
    """Return the description of an input or output as in `irprograms.Graph.inputs`: slot, shape, dtype, dim order."""
    shape = tuple(d if isinstance(d, int) else bounds(d) for d in value.shape)
    return None, shape, value.dtype, list(range(value.ndim))


# -- tracing -------------------------------------------------------------------------------------


def _trace(program: Program, is_dynamic: bool) -> tuple[GraphModule, bool]:
    """Return the core ATen graph of a program, and whether the graph is valid for every extent.

    The placeholders are the inputs, then the constants. If the graph would be valid only for some extents, the program
    is traced again for the single extent EXTENTS[0].
    """
    environment = ShapeEnv() if is_dynamic else None
    extent = _symbol(environment) if is_dynamic else EXTENTS[0]
    with FakeTensorMode(shape_env=environment), torch.no_grad():
        arguments = [
            torch.empty([extent if d == DYNAMIC else d for d in i.shape], dtype=i.dtype) for i in program.inputs
        ]
        arguments += [torch.empty(c.shape, dtype=c.dtype) for c in program.constant_values()]
        try:
            # pre_dispatch: after dispatch, operators such as attention would already be decomposed by torch.
            traced = make_fx(program.function(), decomposition_table=_decompositions(), pre_dispatch=True)(*arguments)
            if any(_writes(node) for node in traced.graph.nodes):  # some decompositions modify tensors in place
                traced = make_fx(functionalize(traced, remove="mutations"))(*arguments)
        except Exception as error:  # torch's own refusals have many types
            if is_dynamic:
                return _trace(program, False)
            raise CaptureRefused(f"{type(error).__name__}: {error}") from error
    if is_dynamic and (environment.replacements or not _has_whole_range(environment) or not _guards_hold(environment)):
        return _trace(program, False)
    traced.graph.eliminate_dead_code()
    return traced, is_dynamic


def _writes(node: Node) -> bool:
    """Whether a node modifies one of its arguments in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _symbol(environment: ShapeEnv) -> torch.SymInt:
    """Return a new symbol for the dynamic extent, from _SMALLEST_EXTENT to LARGEST_EXTENT."""
    symbol = environment.create_symbol(EXTENTS[0], ConstantSource(DYNAMIC), dynamic_dim=DimDynamic.DYNAMIC)
    environment.constrain_symbol_range(symbol, compiler_min=_SMALLEST_EXTENT, compiler_max=LARGEST_EXTENT)
    return environment.create_symintnode(symbol, hint=EXTENTS[0])


def _has_whole_range(environment: ShapeEnv) -> bool:
    """Whether tracing has not narrowed the range of the dynamic extent."""
    return all(v.lower <= _SMALLEST_EXTENT and v.upper >= LARGEST_EXTENT for v in environment.var_to_range.values())


def _guards_hold(environment: ShapeEnv) -> bool:
    """Whether the guards of a trace hold for every extent.

    A guard on an expression such as `n * n == 49` neither replaces the symbol nor narrows its range.
    """
    extents = range(_SMALLEST_EXTENT, LARGEST_EXTENT + 1)
    return all(
        guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, extent))
        for guard in environment.guards
        for extent in extents
    )


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """Return the decompositions that a trace applies. torch.export applies the same.

    They are torch's default decompositions, and those of the CompositeImplicitAutograd operators, which torch otherwise
    applies at dispatch. Operators for which the delegate has a handler are left out.
    """
    table = dict(default_decompositions().items())
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            target = getattr(getattr(torch.ops.aten, packet), overload or "default")
            table.setdefault(target, target.decompose)
    for target in REGISTRY.ops_to_preserve():
        table.pop(target, None)
    return table


def _exported(program: Program, traced: GraphModule) -> SimpleNamespace:
    """Return an object with the attributes of an ExportedProgram that the builder reads."""
    placeholders = [n.name for n in traced.graph.nodes if n.op == "placeholder"]
    constants = dict(zip(placeholders[len(program.inputs) :], program.constant_values()))
    inputs = [
        InputSpec(InputKind.PARAMETER, TensorArgument(name), name)
        if name in constants
        else InputSpec(InputKind.USER_INPUT, TensorArgument(name), None)
        for name in placeholders
    ]
    outputs = [
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in traced.graph.output_node().args[0]
    ]
    return SimpleNamespace(
        graph=traced.graph,
        graph_module=traced,
        graph_signature=SimpleNamespace(input_specs=inputs, output_specs=outputs, buffers_to_mutate={}),
        state_dict=constants,
        constants={},
    )
