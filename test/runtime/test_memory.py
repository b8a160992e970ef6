"""`executorch_mlx.memory`: the sizes that it returns, and the limit that loads and calls must not exceed."""

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from executorch_mlx import MLXPartitioner, load_delegate, memory
from irprograms import FLOAT32, Graph, ir, lit, pte, value_of
from irprograms.memory_limit import FAILED, MEGABYTE, SLACK, products
from loaded_method import LoadedMethod

pytestmark = pytest.mark.usefixtures("delegate")  # loads the delegate before a test imports mlx.core

# -- sizes -------------------------------------------------------------------------


def test_arrays_of_mlx_core_are_active():
    import mlx.core as mx

    before = memory.get_active_memory()
    x = mx.zeros((1000, 1000))
    mx.eval(x)
    assert memory.get_active_memory() - before >= 4_000_000
    assert memory.get_peak_memory() >= memory.get_active_memory()
    del x
    assert memory.get_active_memory() == before
    memory.reset_peak_memory()
    assert memory.get_peak_memory() == before


def test_weights_used_in_place_are_active_until_the_program_is_unloaded():
    import mlx.core as mx

    g = Graph()
    g.emit(ir.AddNode(a=g.constant(torch.ones(1000)), b=g.input((1000,)), out=g.output((1000,))))
    before, before_in_mlx = memory.get_active_memory(), mx.get_active_memory()
    model = g.load()
    assert memory.get_active_memory() - before == 4000
    if mx.default_device() == mx.cpu:
        assert mx.get_active_memory() == before_in_mlx
    del model
    assert memory.get_active_memory() == before


def test_cache_can_be_limited_and_cleared():
    import mlx.core as mx

    previous = memory.set_cache_limit(1 << 30)
    try:
        x = mx.zeros((1000, 1000))
        mx.eval(x)
        del x
        assert memory.get_cache_memory() >= 4_000_000
        memory.clear_cache()
        assert memory.get_cache_memory() == 0
    finally:
        assert memory.set_cache_limit(previous) == 1 << 30


def test_wired_limit_has_no_effect_without_an_apple_gpu():
    import mlx.core as mx

    if mx.metal.is_available():
        assert memory.set_wired_limit(memory.set_wired_limit(0)) == 0
    else:
        assert memory.set_wired_limit(MEGABYTE) == memory.set_wired_limit(0) == 0


def test_setting_the_limit_returns_the_previous_one_and_restores_that_of_mlx(limit):
    import mlx.core as mx

    mlx_limit = mx.set_memory_limit(1 << 40)
    try:
        assert memory.get_memory_limit() is None
        assert memory.set_memory_limit(5 * MEGABYTE) is None
        assert memory.set_memory_limit(6 * MEGABYTE) == 5 * MEGABYTE
        assert memory.get_memory_limit() == 6 * MEGABYTE
        assert memory.set_memory_limit(None) == 6 * MEGABYTE
        assert mx.set_memory_limit(1 << 40) == 1 << 40
    finally:
        mx.set_memory_limit(mlx_limit)


@pytest.mark.parametrize(
    "function, value, message",
    [
        (memory.set_memory_limit, 0, r"set_memory_limit: got 0, expected 1 to \d+ bytes"),
        (memory.set_memory_limit, -1, "set_memory_limit: got -1, expected"),
        (memory.set_memory_limit, 1 << 64, "set_memory_limit: got 18446744073709551616, expected"),
        (memory.set_cache_limit, -1, "set_cache_limit: got -1, expected 0 to"),
        (memory.set_wired_limit, -1, "set_wired_limit: got -1, expected 0 to"),
    ],
)
def test_invalid_sizes_are_refused(function, value, message):
    with pytest.raises(ValueError, match=message):
        function(value)


def test_sizes_are_integers():
    with pytest.raises(TypeError):
        memory.set_memory_limit(1.5)


# -- loading -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "buffer"])
def test_load_beyond_the_limit_fails_before_it_allocates_and_works_with_a_higher_limit(limit, kind, capfd):
    g = Graph()
    x = g.input((MEGABYTE,))
    data = g.constant(torch.ones(MEGABYTE)) if kind == "constant" else g.buffer((MEGABYTE,))
    g.emit(ir.AddNode(a=data, b=x, out=g.output((MEGABYTE,))))
    program = Runtime.get().load_program(g.pte())
    total = limit(3 * MEGABYTE)
    before = memory.get_active_memory()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=FAILED):
            program.load_method("forward")
        sizes = f"asked for {4 * MEGABYTE} bytes, {before} bytes are active, the limit is {total} bytes"
        (line,) = (line for line in capfd.readouterr().err.splitlines() if "MLX" in line and "limit" in line)
        assert line.endswith(f"MLX init: memory limit: constants and buffers: {sizes}")
        assert memory.get_active_memory() == before
    assert memory.get_peak_memory() < total
    limit(20 * MEGABYTE)
    method = program.load_method("forward")
    assert method.execute([torch.ones(MEGABYTE)])[0].sum() == MEGABYTE * (1 + (kind == "constant"))


def test_methods_that_share_a_buffer_ask_for_it_once(limit):
    def method():
        g = Graph()
        buffer = g.buffer((MEGABYTE,))
        g.emit(ir.SumNode(x=buffer, out=g.output(()), axes=[]))
        return g

    program = Runtime.get().load_program(pte({"one": method(), "two": method()}))
    limit(5 * MEGABYTE)
    assert [program.load_method(name).execute([])[0].item() for name in ("one", "two")] == [0, 0]


def test_init_chain_keeps_the_limit(limit, capfd):
    g = Graph()
    full = g.new_temp()
    one = ir.FloatOrVid(literal=1.0)
    g.init_chain = g.chain(ir.FullNode(out=full, shape=[lit(MEGABYTE)], v=one, scalar_type=FLOAT32))
    g.emit(ir.SumNode(x=full, out=g.output(()), axes=[]))
    program = Runtime.get().load_program(g.pte())
    limit(MEGABYTE)
    with pytest.raises(RuntimeError, match=FAILED):
        program.load_method("forward")
    assert "MLX init: memory limit: Full float32[1048576]: asked for 4194304 bytes" in capfd.readouterr().err
    limit(5 * MEGABYTE)
    assert program.load_method("forward").execute([])[0].item() == MEGABYTE


# -- calls -------------------------------------------------------------------------


def test_large_call_fails_and_small_calls_work_before_and_after(limit, capfd):
    model = products(2048).load()
    small, large = torch.randn(16, 64) / 8, torch.randn(2048, 64) / 8
    expected = model(small)[0].clone(), model(large)[0].clone()
    total = limit(8 * MEGABYTE)  # the result of a product takes 16 MB
    before = memory.get_active_memory()
    for _ in range(3):
        assert torch.equal(model(small)[0], expected[0])
        with pytest.raises(RuntimeError, match=FAILED):
            model(large)
        (line,) = (line for line in capfd.readouterr().err.splitlines() if "memory limit" in line)
        assert "MLX execute: " in line and f"memory limit: float32[2048,2048]: asked for {16 * MEGABYTE} bytes" in line
        assert f"the limit is {total} bytes" in line
        assert memory.get_active_memory() == before
    assert memory.get_peak_memory() < total + SLACK
    memory.set_memory_limit(None)
    assert torch.equal(model(large)[0], expected[1])


@pytest.mark.parametrize("megabytes", [200, 100, 50, 35, 20])
def test_call_that_fits_only_if_it_frees_results_stays_within_the_limit(limit, megabytes):
    """The intermediate results take 160 MB together, but at most 33 MB have to exist at the same time."""
    model, x = products(2048, 5).load(), torch.randn(2048, 64) / 8
    expected = model(x)[0].clone()
    total = limit(megabytes * MEGABYTE)
    if megabytes > 33:
        assert torch.equal(model(x)[0], expected)
        assert memory.get_peak_memory() <= total + SLACK
        return
    with pytest.raises(RuntimeError, match=FAILED):
        model(x)
    assert memory.get_peak_memory() <= total + SLACK


def test_a_temporary_is_freed_after_its_last_read():
    """Each result has a slot of its own, takes 4 MB, and is read by the next instruction only."""
    g = Graph()
    x, matrix = g.input((1024, 1024)), g.constant(torch.eye(1024))
    temporaries = [x, *(g.new_temp() for _ in range(8))]
    for previous, out in zip(temporaries, temporaries[1:]):
        g.emit(ir.AddmmNode(mat1=previous, mat2=matrix, out=out))
    g.emit(ir.SumNode(x=temporaries[-1], out=g.output((1024,)), axes=[1]))
    model, ones = g.load(), torch.ones(1024, 1024)
    model(ones)
    memory.reset_peak_memory()
    before = memory.get_active_memory()
    assert torch.equal(model(ones)[0], torch.full((1024,), 1024.0))
    assert memory.get_peak_memory() - before < 13 * MEGABYTE


def test_a_slot_that_a_loop_or_a_later_call_reads_keeps_its_temporary():
    g = Graph()
    x, result = g.input((4,)), g.output((4,))
    doubled, count, remains, cond = g.new_temp(), g.new_temp(), g.new_temp(), g.new_value()
    one, zero = g.constant(torch.tensor(1)), g.constant(torch.tensor(0))
    g.init_chain = g.chain(ir.IdCopyNode(x=g.constant(torch.tensor(3)), out=count))
    condition = g.chain(ir.GreaterNode(a=count, b=zero, out=remains), ir.ItemIntNode(x=remains, out=cond))
    body = g.chain(ir.AddNode(a=result, b=doubled, out=result), ir.SubtractNode(a=count, b=one, out=count))
    g.emit(
        ir.AddNode(a=x, b=x, out=doubled),
        ir.MultiplyNode(a=doubled, b=doubled, out=result),
        ir.WhileNode(cond=value_of(cond), cond_chain_idx=condition, body_chain_idx=body, carry=[result, count]),
    )
    model = g.load()
    for _ in range(2):
        assert model(torch.arange(4.0))[0].tolist() == [0, 10, 28, 54]


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).flatten(1).sort(-1).values[:, ::5].cumsum(-1)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    "module, x", [(Convolutions(), torch.randn(2, 8, 96, 96)), (Encoder(), torch.randn(2, 512, 64))]
)
def test_models_give_the_same_results_under_any_limit_that_admits_them(limit, module, x):
    load_delegate()
    exported = torch.export.export(module.eval(), (x,))
    edge = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()])
    method = LoadedMethod(edge.to_executorch().buffer)
    expected = method.execute([x])[0].clone()
    admitted = []
    for kilobytes in (200_000, 40_000, 25_000, 15_000, 10_000, 6_000, 3_000, 200):
        total = limit(kilobytes << 10)
        try:
            result = method.execute([x])[0].clone()
        except RuntimeError:
            admitted.append(False)
        else:
            admitted.append(True)
            assert torch.equal(result, expected)
        assert memory.get_peak_memory() <= total + 4 * SLACK, kilobytes
    assert admitted == sorted(admitted, reverse=True)  # if a limit refuses the call, so do all lower limits
    assert admitted[0] and admitted[3] and not admitted[-1]


def test_while_loop_keeps_the_limit(limit):
    """Without a limit, MLX computes iterations in the background. Under a limit, the loop waits for each iteration."""
    g = Graph()
    n, x, mean = g.input((), torch.int64), g.new_temp(), g.new_temp()
    one, zero = g.constant(torch.tensor(1)), g.constant(torch.tensor(0))
    remaining, remains = g.new_temp(), g.new_temp()
    g.emit(
        ir.FullNode(out=x, shape=[lit(MEGABYTE)], v=ir.FloatOrVid(literal=1.0), scalar_type=FLOAT32),
        ir.IdCopyNode(x=n, out=remaining),
    )
    cond = g.new_value()
    condition = g.chain(ir.GreaterNode(a=remaining, b=zero, out=remains), ir.ItemIntNode(x=remains, out=cond))
    body = g.chain(ir.AddNode(a=x, b=x, out=x), ir.SubtractNode(a=remaining, b=one, out=remaining))
    g.emit(
        ir.WhileNode(cond=value_of(cond), cond_chain_idx=condition, body_chain_idx=body, carry=[x, remaining]),
        ir.MeanNode(x=x, out=mean, axes=[]),
        ir.IdCopyNode(x=mean, out=g.output(())),
    )
    model = g.load()
    assert model(torch.tensor(20))[0].item() == 2**20
    total = limit(9 * MEGABYTE)
    assert model(torch.tensor(20))[0].item() == 2**20
    assert memory.get_peak_memory() <= total + SLACK
    limit(7 * MEGABYTE)
    with pytest.raises(RuntimeError, match=FAILED):
        model(torch.tensor(20))
