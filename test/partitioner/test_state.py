"""Mutable buffers: which methods share them, what they start from, and what is refused."""

import pytest
import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
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


def by_one_partitioner(programs, partitioner=None):
    partitioners = [partitioner or MLXPartitioner()]
    return to_edge_transform_and_lower(programs, partitioner=partitioners, compile_config=UNCHECKED)


def by_a_partitioner_for_each_method(programs):
    return to_edge_transform_and_lower(
        programs, partitioner={name: [MLXPartitioner()] for name in programs}, compile_config=UNCHECKED
    )


def by_to_backend(programs):
    return to_edge(programs, compile_config=UNCHECKED).to_backend(MLXPartitioner())


def load(manager, **options):
    config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(**options))
    return Runtime.get().load_program(bytes(manager.to_executorch(config).buffer))


def check_calls(program, methods, rounds=2):
    """Call the methods by turns, and compare each result with eager torch."""
    loaded = {name: program.load_method(name) for name in methods}
    for call, name in enumerate([*methods, *reversed(methods)] * rounds):
        x = torch.full((4,), float(call))
        torch.testing.assert_close(loaded[name].execute([x])[0], methods[name](x), msg=f"call {call}, {name}")


MATRIX = {
    f"{kind}-{undelegated}": (names, undelegated)
    for kind, names in {"writer": ["write"], "writers": ["write", "write"], "reader": ["write", "read"]}.items()
    for undelegated in [None, *dict.fromkeys(names)]
}


@pytest.mark.parametrize("names, undelegated", MATRIX.values(), ids=MATRIX)
@pytest.mark.parametrize(
    "lower, initial, has_constant",
    [
        (by_one_partitioner, 0.0, False),
        (by_one_partitioner, 3.0, True),
        (by_to_backend, 3.0, False),
        (by_a_partitioner_for_each_method, 0.0, True),
    ],
)
def test_methods_agree_with_eager_torch_or_are_refused(lower, initial, has_constant, names, undelegated):
    module = State(initial, has_constant, undelegated)
    methods = {f"m{i}": Method(module, name) for i, name in enumerate(names)}
    programs = {name: export(method, torch.ones(4)) for name, method in methods.items()}
    if len(set(names)) > 1 and undelegated is not None:
        with pytest.raises(RuntimeError, match="buffer module.s: .*is not delegated"):
            lower(programs)
    elif len(names) > 1 and undelegated is not None:  # ExecuTorch keeps the buffer in all methods
        with pytest.warns(UserWarning, match="ExecuTorch keeps the mutable buffers module.s: .*share_mutable_buffers"):
            manager = lower(programs)
        check_calls(load(manager, share_mutable_buffers=True), methods)
    else:
        check_calls(load(lower(programs)), methods)


def test_report_names_a_buffer_that_stays_with_executorch():
    partitioner = MLXPartitioner()
    by_one_partitioner({"forward": export(Method(State(undelegated="write")), torch.ones(4))}, partitioner)
    (buffer,) = partitioner.explain().kept_buffers
    assert buffer.name == "module.s" and "torch.float64" in buffer.reason
    assert "buffer module.s stays with ExecuTorch" in str(partitioner.explain())


def test_two_modules_do_not_share_buffers_of_equal_name_and_contents():
    methods = {name: Method(State(3.0, has_constant=True)) for name in "ab"}
    programs = {name: export(method, torch.ones(4)) for name, method in methods.items()}
    check_calls(load(by_one_partitioner(programs)), methods)


def test_the_name_of_a_shared_buffer_may_differ():
    module = State(3.0)
    methods = {"a": Method(module), "b": Method(Method(module), "forward")}
    methods["c"] = Method(Method(module, "read"), "forward")
    programs = {name: export(method, torch.ones(4)) for name, method in methods.items()}
    check_calls(load(by_one_partitioner(programs)), methods)


def test_a_method_that_is_exported_later_shares_the_buffer():
    module = State()
    methods = {"write": Method(module), "read": Method(module, "read")}
    first = export(methods["write"], torch.ones(4))
    methods["write"](torch.ones(4))  # the buffer now starts at one, in both methods
    program = load(by_one_partitioner({"write": first, "read": export(methods["read"], torch.ones(4))}))
    check_calls(program, methods)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype, shape", [(torch.float32, ()), (torch.int64, (2, 3)), (torch.bool, (2,))])
def test_buffers_of_any_kind_are_shared(persistent, dtype, shape):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("s", torch.zeros(shape, dtype=dtype), persistent=persistent)

        def write(self, x):
            self.s.copy_((self.s + x.sum()).to(dtype))
            return self.s + x[0]

        def read(self, x):
            return self.s + x[0]

    module = Module()
    methods = {name: Method(module, name) for name in ("write", "read")}
    programs = {name: export(method, torch.ones(4)) for name, method in methods.items()}
    check_calls(load(by_one_partitioner(programs)), methods)


def test_buffers_that_overlap_are_refused():
    whole = torch.zeros(2, 4)

    class Part(torch.nn.Module):
        def __init__(self, tensor):
            super().__init__()
            self.register_buffer("s", tensor)

        def forward(self, x):
            self.s.add_(x)
            return self.s.sum()

    programs = {"whole": export(Part(whole), torch.ones(4)), "row": export(Part(whole[1]), torch.ones(4))}
    with pytest.raises(RuntimeError, match="buffer s: it shares memory with s"):
        by_one_partitioner(programs)


class Swap(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", torch.zeros(4))

    def swap(self, x):
        t = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(t + x)
        return self.a - self.b

    def copy(self, x):
        self.b.copy_(self.a)
        self.a.add_(x)
        return self.a - self.b

    def copy_input(self, x):
        self.a.copy_(x)
        return self.a - self.b

    def returned(self, x):
        self.a.add_(x)
        return self.a

    def returned_old(self, x):
        t = self.a.clone()
        self.a.add_(x)
        return t

    def view(self, x):
        self.a[1:3].mul_(2)
        return self.a.view(2, 2) + 1


@pytest.mark.parametrize("name", ["swap", "copy", "copy_input", "returned", "returned_old", "view"])
@pytest.mark.parametrize("lower", [by_one_partitioner, by_to_backend])
def test_new_values_of_buffers(lower, name):
    method = Method(Swap(), name)
    programs = {"forward": export(method, torch.ones(4))}
    if lower is by_to_backend and name in ("swap", "copy"):
        with pytest.raises(RuntimeError, match="its new value is the buffer module.[ab] itself.*to_edge_transform"):
            lower(programs)
    else:
        check_calls(load(lower(programs)), {"forward": method})


def test_a_later_lowering_knows_nothing_of_a_failed_one():
    module = State(undelegated="read")
    programs = {name: export(Method(module, name), torch.ones(4)) for name in ("write", "read")}
    with pytest.raises(RuntimeError, match="buffer module.s"):
        by_one_partitioner(programs)
    by_one_partitioner({"read": programs["read"]})  # without a delegate of its own
    by_one_partitioner({"write": programs["write"]})
