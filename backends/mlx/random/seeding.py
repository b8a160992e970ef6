"""`seed_random_ops`: makes the random operators of an exported program draw from a seed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from .torch_operators import DECOMPOSITIONS

aten = torch.ops.aten

# The attention operators. They are decomposed if they have dropout, which then gets a seed. Otherwise they stay whole.
ATTENTION = (aten.scaled_dot_product_attention.default, aten._scaled_dot_product_attention_math.default)


def seed_random_ops(program: ExportedProgram) -> ExportedProgram:
    """Return `program` with an additional input `seed`, one int64, from which all random operators draw.

    The random operators are those of torch, such as `torch.randn_like` and dropout in training mode, and those of this
    project, such as `mlx::sample`, that are called without a seed. `seed` is the last keyword argument of the program.
    Its results are a function of the inputs, in eager torch and on every device: the same seed draws the same numbers,
    so the caller passes another seed in every call. The numbers differ from those that torch's own generator draws.

    Draw i, in the order of the graph, uses the seed `seed ^ k`, where k is i with its 31 bits in reverse order: 0,
    2^30, 2^29, 2^30 + 2^29, …. A seed that fits in an int32 then gives seeds that fit, as ExecuTorch's own MLX delegate
    needs. Consecutive seeds share no seed of a draw: with 1,000 draws, two seeds that do lie at least 2^21 apart.

    Raises ValueError if the program has no random operator or already an input `seed`, and for a random operator
    that cannot take a seed: one in a branch or a loop body, one with a `torch.Generator`, or one of a distribution that
    `executorch_mlx.random` lacks.
    """
    calls = [n for n in _all_calls(program.graph_module) if _draws_without_seed(n)]
    _check(program, calls)
    attention = ATTENTION if any(n.target in ATTENTION for n in calls) else ()
    table = default_decompositions()
    seeded = program.run_decompositions({op: table[op] for op in attention} | DECOMPOSITIONS)
    draws = [n for n in _all_calls(seeded.graph_module) if _draws_without_seed(n)]
    for node in draws:
        if not _takes_seed(node) or node.graph is not seeded.graph:
            place = "" if node.graph is seeded.graph else " in a branch or a loop body"
            raise ValueError(f"seed_random_ops: {node.target}{place} has no form with a seed")
    seed = _add_seed(seeded.graph)
    for index, node in enumerate(draws):
        _set_argument(node, "seed", _seed_of_draw(seed, index, before=node))
    return _with_seed_input(seeded, seed)


def _check(program: ExportedProgram, calls: list[Node]) -> None:
    if not calls:
        raise ValueError("seed_random_ops: got a program without random operators")
    if any(n.op == "placeholder" and n.name == "seed" for n in program.graph.nodes):
        raise ValueError("seed_random_ops: got a program with an input seed, expected another name")
    for node in calls:
        if _argument(node, "generator") is not None:
            raise ValueError(f"seed_random_ops: {node.target}: generator: got a torch.Generator, expected none")


def _all_calls(module: GraphModule) -> Iterator[Node]:
    """Yield the calls of operators in the graph and in the graphs of its branches and loop bodies."""
    for submodule in module.modules():
        if isinstance(submodule, GraphModule):
            yield from (n for n in submodule.graph.nodes if isinstance(n.target, torch._ops.OpOverload))


def _draws_without_seed(node: Node) -> bool:
    """Whether a call of an operator draws random numbers without a seed."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if _takes_seed(node):
        return _argument(node, "seed") is None
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    training = [_argument(node, name, True) for name in ("train", "training")]
    probabilities = [_argument(node, name, 1.0) for name in ("dropout", "dropout_p")]
    return False not in training and all(probabilities)  # None is True for native_dropout


def _takes_seed(node: Node) -> bool:
    return node.target.namespace == "mlx" and any(a.name == "seed" for a in node.target._schema.arguments)


def _argument(node: Node, name: str, missing=None):
    """Return an argument of a call, or `missing` if the operator has no argument of this name."""
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, argument.default_value)
    return missing


def _set_argument(node: Node, name: str, value: Node) -> None:
    index = [a.name for a in node.target._schema.arguments].index(name)
    if index < len(node.args):
        node.update_arg(index, value)
    else:
        node.update_kwarg(name, value)


def _add_seed(graph: Graph) -> Node:
    """Add the input `seed` behind the other inputs."""
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        seed = graph.placeholder("seed")
    with detect_fake_mode([n.meta.get("val") for n in graph.nodes]):
        seed.meta["val"] = torch.empty((), dtype=torch.int64)
    return seed


def _seed_of_draw(seed: Node, index: int, before: Node) -> Node:
    if index == 0:
        return seed
    key = int(f"{index:031b}"[::-1], 2)
    with seed.graph.inserting_before(before):
        node = seed.graph.call_function(aten.bitwise_xor.Scalar, (seed, key))
    node.meta["val"] = seed.meta["val"]
    return node


def _with_seed_input(program: ExportedProgram, seed: Node) -> ExportedProgram:
    """Return `program` with the input `seed`, which its graph already has, added to its signature."""
    argument = TensorArgument(seed.name)
    signature = copy.deepcopy(program.graph_signature)
    signature.input_specs.append(InputSpec(InputKind.USER_INPUT, argument, target=None))
    program.graph_module.recompile()
    result = program._update(program.graph_module, signature)
    call = result.module_call_graph[0].signature
    args, kwargs = pytree.tree_unflatten(range(call.in_spec.num_leaves), call.in_spec)
    call.in_spec = pytree.tree_structure((args, {**kwargs, "seed": 0}))
    call.inputs.append(argument)
    if call.forward_arg_names is not None:
        call.forward_arg_names.append("seed")
    if result.example_inputs is not None:
        args, kwargs = result.example_inputs
        result.example_inputs = args, {**kwargs, "seed": torch.zeros((), dtype=torch.int64)}
    return result
