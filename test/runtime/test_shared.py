"""Several methods of one program: shared constants, buffers and caches."""

import threading

import pytest
import torch
from executorch_mlx import Runtime, reset
from irprograms import FLOAT32, Graph, Model, ir, lit, number, pte
from irprograms.graph import load
from irprograms.options import option


class Methods:
    """A loaded program. An attribute loads the method of that name and returns a function that calls it."""

    def __init__(self, program: bytes):
        self.program = Runtime.get().load_program(program)

    def __getattr__(self, name):
        method = self.program.load_method(name)

        def call(*args):
            return [x.tolist() if isinstance(x, torch.Tensor) else x for x in method.execute(args)]

        return call

    def unload(self, name):
        self.program._methods[name] = None


def counter(name="b1", initial=None, negated=False, init_chain=False, size=2):
    """A program that adds its input to a buffer and returns the sum, or its negative."""
    g = Graph()
    x, total = g.input((size,)), g.buffer((size,), initial=initial)
    g.buffers = [total]
    g.names[total.idx] = name
    if initial is not None:
        g.data = {name: initial}
    if init_chain:
        full = ir.FullNode(out=total, shape=[lit(size)], v=number(10.0), scalar_type=FLOAT32)
        g.init_chain = g.chain(full)
    node = ir.NegNode if negated else ir.IdCopyNode
    g.emit(ir.AddNode(a=total, b=x, out=total), node(x=total, out=g.output((size,))))
    return g


def two_counters(**options):
    return pte({"forward": counter(**options), "sample": counter(negated=True, **options)})


ONE = torch.ones(2)


@pytest.mark.parametrize("initial", [None, torch.tensor([5.0, 7.0])])
def test_methods_share_a_buffer(initial):
    first = [0.0, 0.0] if initial is None else initial.tolist()
    both = Methods(two_counters(initial=initial))
    assert both.forward(ONE) == [[x + 1 for x in first]]
    assert both.sample(ONE) == [[-x - 2 for x in first]]
    assert both.forward(ONE) == [[x + 3 for x in first]]


def test_two_loaded_programs_share_no_buffers():
    program = two_counters()
    one, other = Methods(program), Methods(program)
    assert [one.forward(ONE), one.sample(ONE)] == [[[1, 1]], [[-2, -2]]]
    assert [other.sample(ONE), other.forward(ONE)] == [[[-1, -1]], [[2, 2]]]
    assert one.sample(ONE) == [[-3, -3]]


def test_duplicate_buffer_names_are_refused(capfd):
    g = counter()
    duplicate = g.buffer((2,))
    g.names[duplicate.idx] = "b1"
    with pytest.raises(RuntimeError):
        g.load()
    assert "duplicate mutable buffer float32[2] b1" in capfd.readouterr().err


def test_buffers_with_another_name_or_shape_are_not_shared():
    methods = Methods(pte({"forward": counter(), "other": counter("b2"), "wide": counter(size=3)}))
    assert methods.forward(ONE) == methods.other(ONE) == [[1, 1]]
    assert methods.wide(torch.ones(3)) == [[1, 1, 1]]
    assert methods.forward(ONE) == [[2, 2]]


def test_a_buffer_lives_as_long_as_one_of_its_methods():
    both = Methods(two_counters())
    both.forward(ONE), both.sample(ONE)
    both.unload("forward")
    assert both.sample(ONE) == [[-3, -3]]
    assert both.forward(ONE) == [[4, 4]]
    both.unload("forward"), both.unload("sample")
    assert both.sample(ONE) == [[-1, -1]]


def test_loading_a_method_again_starts_another_session():
    """A session has its own buffers and one instance of each method. A method joins the first session that lacks it.

    ExecuTorch does the same for the buffers that it keeps.
    """
    both = Methods(two_counters())
    load = both.program._program.load_method
    first, second, of_first, of_second = map(load, ("forward", "forward", "sample", "sample"))
    assert [first([ONE])[0].tolist(), first([ONE])[0].tolist()] == [[1, 1], [2, 2]]
    assert second([ONE])[0].tolist() == [1, 1]
    assert of_first([ONE])[0].tolist() == [-3, -3]
    assert of_second([ONE])[0].tolist() == [-2, -2]


def test_the_init_chain_of_a_later_method_does_not_reset_the_buffer():
    both = Methods(two_counters(init_chain=True))
    assert both.forward(ONE) == [[11, 11]]
    assert both.sample(ONE) == [[-12, -12]]


def program_with_constant(size):
    """A program that adds its input to the first two elements of a constant with `size` floats."""
    g = Graph()
    x, y = g.input((2,)), g.new_temp()
    g.emit(
        ir.SliceNode(x=g.constant(torch.arange(float(size))), out=y, axis=lit(0), start=lit(0), stop=lit(2)),
        ir.AddNode(a=y, b=x, out=g.output((2,))),
    )
    return g


def test_constants_are_stored_and_loaded_once():
    import mlx.core as mx

    size = 1 << 20
    names = ["forward", "sample", "third"]
    program = pte({name: program_with_constant(size) for name in names})
    assert len(program) < 5 * size
    before = mx.get_active_memory()
    methods = Methods(program)
    for name in names:
        assert getattr(methods, name)(ONE) == [[1, 2]]
    # Zero if the memory of the file can be used in place.
    assert mx.get_active_memory() - before < 5 * size
    # A constant outlives the method that loaded it.
    methods.unload("forward")
    assert methods.sample(ONE) == [[1, 2]]
    del methods
    assert mx.get_active_memory() - before < size


def test_shared_buffers_are_updated_in_place():
    import mlx.core as mx

    capacity = 1 << 17
    graphs = {}
    for name in ("forward", "sample"):
        g = graphs[name] = Graph()
        x, b = g.input((1, 64)), g.buffer((capacity, 64))
        g.emit(
            ir.SliceUpdateNode(dst=b, update=x, out=b, axis=lit(0), start=lit(2), stop=lit(3)),
            ir.SliceNode(x=b, out=g.output((1, 64)), axis=lit(0), start=lit(2), stop=lit(3)),
        )
    both, update = Methods(pte(graphs)), torch.ones(1, 64)
    both.forward(update), both.sample(update)  # the first calls keep a backup and therefore copy the buffer
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        both.forward(update), both.sample(update)
    assert mx.get_peak_memory() - before < capacity * 64


def counter_with_take():
    """A counter that then takes an element at a given index, which may be out of range."""
    g = Graph()
    x, at, b = g.input((2,)), g.input((1,), torch.int64), g.buffer((2,))
    index = g.new_value()
    g.emit(
        ir.AddNode(a=b, b=x, out=b),
        ir.ItemIntNode(x=at, out=index),
        ir.TakeNode(x=b, index=ir.IntOrVidOrTid(kind=1, vid=index), out=g.new_temp(), axis=0),
        ir.IdCopyNode(x=b, out=g.output((2,))),
    )
    return g


def test_a_failed_call_does_not_change_shared_buffers(capfd):
    both = Methods(pte({"forward": counter(), "sample": counter_with_take()}))
    good, bad = torch.tensor([0]), torch.tensor([9])
    assert both.forward(ONE) == [[1, 1]]
    for _ in range(2):
        with pytest.raises(RuntimeError):
            both.sample(ONE, bad)
        assert both.forward(torch.zeros(2)) == [[1, 1]]
    assert both.sample(ONE, good) == [[2, 2]]
    with pytest.raises(RuntimeError):
        both.sample(ONE, bad)
    assert both.forward(ONE) == [[3, 3]]
    assert "index 9 is out of range [-2, 2)" in capfd.readouterr().err


def counter_with_float64(negated=False):
    """A counter whose evaluation fails if its second input is true: MLX's CPU kernels have no float64 GatherMM."""
    g = counter(negated=negated)
    flag, chosen, y = g.input((1,), torch.bool), g.new_value(), g.new_temp()
    wide = g.constant(torch.ones(1, 2, 2, dtype=torch.float64))
    which = g.constant(torch.tensor([0], dtype=torch.int32))
    bad = g.chain(
        ir.GatherMmNode(a=wide, b=wide, out=y, lhs_indices=which, rhs_indices=which),
        ir.AsTypeNode(x=y, out=y, scalar_type=FLOAT32),
        ir.SliceNode(x=y, out=y, axis=lit(0), start=lit(0), stop=lit(1)),
        ir.ReshapeNode(x=y, out=y, shape=[lit(4)]),
        ir.SliceNode(x=y, out=y, axis=lit(0), start=lit(0), stop=lit(2)),
        ir.AddNode(a=g.buffers[0], b=y, out=g.buffers[0]),
    )
    condition = ir.IntOrVid(vid=chosen, is_vid=True)
    g.emit(ir.ItemIntNode(x=flag, out=chosen), ir.IfNode(cond=condition, then_chain_idx=bad, else_chain_idx=g.chain()))
    return g


def test_buffers_are_undefined_for_all_methods_until_they_are_reset(capfd):
    graphs = {"forward": counter_with_float64(), "sample": counter_with_float64(negated=True), "other": counter("b2")}
    both = Methods(pte(graphs))
    good, bad = torch.tensor([False]), torch.tensor([True])
    for call in (both.forward, both.sample):
        assert [both.forward(ONE, good), both.sample(ONE, good), both.other(ONE)] == [[[1, 1]], [[-2, -2]], [[1, 1]]]
        with pytest.raises(RuntimeError):
            call(ONE, bad)
        assert "undefined now" in capfd.readouterr().err
        for refused in (lambda: both.forward(ONE, good), lambda: both.sample(ONE, good), lambda: both.other(ONE)):
            with pytest.raises(RuntimeError):
                refused()
            assert "undefined since a call failed" in capfd.readouterr().err
        reset()
        assert both.sample(ONE, good) == [[-1, -1]]
        reset()
    both.unload("forward"), both.unload("sample")
    assert both.sample(ONE, good) == [[-1, -1]]


@pytest.mark.parametrize("initial, init_chain", [(None, False), (torch.tensor([2.0, 3.0]), False), (None, True)])
def test_reset_gives_buffers_their_initial_contents(initial, init_chain):
    both = Methods(two_counters(initial=initial, init_chain=init_chain))
    start = [10.0, 10.0] if init_chain else [0.0, 0.0] if initial is None else initial.tolist()
    for call, sign in ((both.forward, 1), (both.sample, -1)) * 2:
        assert call(ONE) == [[sign * (x + 1) for x in start]]
        assert both.forward(ONE) == [[x + 2 for x in start]]
        reset()


def test_reset_is_for_one_program_and_one_call():
    first, second = Methods(two_counters()), Methods(two_counters())
    assert [first.forward(ONE), second.forward(ONE)] == [[[1, 1]], [[1, 1]]]
    reset()
    assert [first.forward(ONE), second.forward(ONE), first.sample(ONE)] == [[[1, 1]], [[2, 2]], [[-2, -2]]]


def test_reset_of_an_init_chain_that_replaces_a_constant():
    """The init chain doubles the constant. A reset must not double it again, nor change what the calls read."""
    g = Graph()
    x, total, scale = g.input((2,)), g.buffer((2,)), g.constant(torch.tensor([1.0, 2.0]))
    g.init_chain = g.chain(ir.AddNode(a=scale, b=scale, out=scale), ir.IdCopyNode(x=scale, out=total))
    g.emit(ir.AddNode(a=total, b=x, out=total), ir.AddNode(a=total, b=scale, out=g.output((2,))))
    model = g.load()
    for _ in range(3):
        reset()
        assert [model(ONE)[0].tolist(), model(ONE)[0].tolist()] == [[5, 9], [6, 10]]


def test_a_failed_load_does_not_affect_other_methods(capfd):
    broken = program_with_constant(8)
    graphs = {"forward": counter(), "broken": broken, "sample": counter(negated=True)}
    broken.data.clear()
    methods = Methods(pte(graphs))
    assert methods.forward(ONE) == [[1, 1]]
    with pytest.raises(RuntimeError):
        methods.broken(ONE)
    assert methods.sample(ONE) == [[-2, -2]]
    assert "is neither in the program nor in a data file" in capfd.readouterr().err


def test_concurrent_calls_are_serialized():
    both = Methods(two_counters())
    calls = [both.forward, both.sample] * 2
    threads = [threading.Thread(target=lambda c=c: [c(ONE) for _ in range(100)]) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert both.forward(torch.zeros(2)) == [[400, 400]]


def attention():
    g = Graph()
    q, k, v = (g.input((1, 1, (1, 4), 2)) for _ in range(3))
    position = g.input(((1, 4), 1), torch.int32)
    out = g.output((1, 1, (1, 4), 2))
    g.emit(ir.UpdateAndAttendNode(q=q, k=k, v=v, position=position, out=out, layer_id=0, scale=1.0))
    return g


def test_kv_windows_of_methods_that_share_kv_caches_must_agree(capfd):
    program = load(pte({"forward": attention(), "sample": attention()}))
    forward = program.load_method("forward")
    with option("kv_windows", "8"), pytest.raises(RuntimeError):
        program.load_method("sample")
    assert "kv_windows: got [8], expected []" in capfd.readouterr().err
    assert forward is not None and program.load_method("sample") is not None


def test_methods_share_kv_caches():
    both = Methods(pte({"forward": attention(), "sample": attention()}))

    def call_inputs(start, tokens):
        x = torch.randn(1, 1, tokens, 2)
        return [x, x, x, torch.arange(start, start + tokens, dtype=torch.int32).reshape(-1, 1)]

    first, second = call_inputs(0, 3), call_inputs(3, 1)
    both.forward(*first)
    history = torch.cat([first[0], second[0]], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(second[0], history, history, scale=1.0)
    torch.testing.assert_close(torch.tensor(both.sample(*second)[0]), expected)


# -- exported programs -------------------------------------------------------------


def test_exported_methods_share_buffers_and_weights():
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner

    class Cache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 64, bias=False)
            self.register_buffer("history", torch.zeros(4, 64))

        def append(self, x, position):
            self.history.index_copy_(0, position, x)
            return self.linear(self.history.sum(0, keepdim=True))

    class Logits(torch.nn.Module):
        def __init__(self, cache):
            super().__init__()
            self.cache = cache

        def forward(self, x, position):
            return self.cache.append(x, position)

    class Token(Logits):
        def forward(self, x, position):
            return self.cache.append(x, position).argmax(-1)

    torch.manual_seed(0)
    cache, args = Cache(), (torch.randn(1, 64), torch.tensor([0]))
    modules = {"forward": Logits(cache), "sample": Token(cache)}
    exported = {name: torch.export.export(module, args) for name, module in modules.items()}
    lowered = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch()
    assert len(lowered.buffer) < 2 * 64 * 64 * 4

    program = Methods(lowered.buffer)
    history = torch.zeros(4, 64)
    for position, name in enumerate(["forward", "sample", "sample", "forward"]):
        x = torch.randn(1, 64)
        history[position] = x
        expected = cache.linear(history.sum(0, keepdim=True))
        (result,) = program.program.load_method(name).execute([x, torch.tensor([position])])
        if name == "sample":
            assert result.tolist() == expected.argmax(-1).tolist()
        else:
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_a_method_that_only_reads_a_buffer_shares_it():
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner

    class State(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("history", torch.ones(4))
            self.register_buffer("count", torch.tensor(3))

    class Writer(torch.nn.Module):
        def __init__(self, state):
            super().__init__()
            self.state = state

        def forward(self, x):
            self.state.history.add_(x)
            self.state.count.add_(1)
            return x * 2

    class Reader(Writer):
        def forward(self, x):
            changed = self.state.history.index_copy(0, torch.tensor([1]), x[:1])  # a copy: the buffer keeps its value
            return changed * self.state.count

    state, x = State(), torch.arange(4.0)
    modules = {"forward": Writer(state), "sample": Reader(state)}
    exported = {name: torch.export.export(module, (x,)) for name, module in modules.items()}
    lowered = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch()
    program = Methods(lowered.buffer)
    for name in ("sample", "forward", "sample", "sample", "forward", "sample"):
        (result,) = program.program.load_method(name).execute([x])
        torch.testing.assert_close(result, modules[name](x))


def test_methods_can_be_unloaded_in_any_order():
    program = two_counters()
    for order in (("forward", "sample"), ("sample", "forward")):
        both = Methods(program)
        both.forward(ONE), both.sample(ONE)
        for name in order:
            both.unload(name)
    model, again = Model(program), Model(program)
    assert model(ONE)[0].tolist() == again(ONE)[0].tolist() == [1, 1]
    del model
    assert again(ONE)[0].tolist() == [2, 2]
