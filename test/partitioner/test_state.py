"""Mutable buffers: which methods share them, what they start from, and what is refused."""

import itertools

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime

UNCHECKED = EdgeCompileConfig(_check_ir_validity=False)


class State(torch.nn.Module):
    """`write` adds its input to the buffer `s`, and `read` returns a function of it.

    `undelegated` names the method in which ExecuTorch's own kernels compute a value from the buffer.
    """

    def __init__(self, initial=0.0, has_constant=False, undelegated=None):
        super().__init__()
        self.register_buffer("s", torch.full((4,), initial))
        self.register_buffer("w", torch.arange(1.0, 5.0) if has_constant else None)
        self.undelegated = undelegated

    def scaled(self, x):
        return x if self.w is None else x * self.w

    def write(self, x):
        s = self.s + self.scaled(x)
        if self.undelegated == "write":
            s = s.double().cumsum(0).float()
        self.s.copy_(s)
        return self.s * 2

    def read(self, x):
        s = self.s.double().cumsum(0).float() if self.undelegated == "read" else self.s - 1
        return s + self.scaled(x)


class Method(torch.nn.Module):
    """A method of `module` as a module of its own."""

    def __init__(self, module, name="write"):
        super().__init__()
        self.module = module
        self.name = name

    def forward(self, *inputs):
        return getattr(self.module, self.name)(*inputs)


def export(method, *inputs):
    return torch.export.export(method, inputs)


def by_one_partitioner(programs, partitioner):
    return to_edge_transform_and_lower(programs, partitioner=[partitioner], compile_config=UNCHECKED)


def by_a_partitioner_for_each_method(programs, partitioner):
    return to_edge_transform_and_lower(
        programs, partitioner={name: [MLXPartitioner()] for name in programs}, compile_config=UNCHECKED
    )


def by_to_backend(programs, partitioner):
    return to_edge(programs, compile_config=UNCHECKED).to_backend(partitioner)


ENTRY_POINTS = [by_one_partitioner, by_a_partitioner_for_each_method, by_to_backend]
METHODS = {"writer": ["write"], "writers": ["write", "write"], "reader": ["write", "read"]}


def load(manager):
    return Runtime.get().load_program(bytes(manager.to_executorch().buffer))


@pytest.mark.parametrize("undelegated", [None, "write", "read"])
@pytest.mark.parametrize("names", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("lower", ENTRY_POINTS)
def test_methods_agree_with_eager_torch_or_are_refused(lower, names, undelegated):
    is_split = len(names) > 1 and undelegated in names and set(names) != {undelegated}
    for initial, has_constant in itertools.product([0.0, 3.0], [False, True]):
        module = State(initial, has_constant, undelegated)
        methods = {f"m{i}": Method(module, name) for i, name in enumerate(names)}
        programs = {name: export(method, torch.ones(4)) for name, method in methods.items()}
        if is_split:
            with pytest.raises(RuntimeError, match="buffer module.s: .*is not delegated"):
                lower(programs, MLXPartitioner())
            continue
        partitioner = MLXPartitioner()
        program = load(lower(programs, partitioner))
        if len(names) > 1 and undelegated in names:  # ExecuTorch keeps the buffer in all methods
            assert [b.name for b in partitioner.explain().kept_buffers] == ["module.s"] * len(names)
            continue
        loaded = {name: program.load_method(name) for name in methods}
        for call, name in enumerate([*methods, *reversed(methods), *methods]):
            x = torch.full((4,), float(call))
            torch.testing.assert_close(loaded[name].execute([x])[0], methods[name](x))
