"""Load options: invalid values, the device, limits of a call, and Metal source inside a program."""

import ctypes

import pytest
import torch
from executorch_mlx import memory
from irprograms import FLOAT32, Graph, ir, lits
from irprograms.options import option, set_option

INVALID_ARGUMENT, NOT_SUPPORTED = 0x12, 0x10


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("colour", "red", 'option: got "colour", expected one of device, metal_kernels, kv_windows, max_instructions'),
        ("max_instructions", "0", 'max_instructions: got "0", expected a number in [1, 16777216]'),
        ("max_instructions", "16777217", 'max_instructions: got "16777217", expected a number in [1, 16777216]'),
        ("max_operations", "1e9", 'max_operations: got "1e9", expected a number in [1, 1125899906842624]'),
        ("device", "tpu", 'device: got "tpu", expected "cpu" or "gpu"'),
        ("kv_windows", "8,", 'kv_windows: got "8,", expected numbers of positions'),
        ("kv_windows", "8,-1", 'kv_windows: got "8,-1", expected'),
        ("kv_windows", "8,,1", 'kv_windows: got "8,,1", expected'),
        ("kv_windows", "99999999999", 'kv_windows: got "99999999999", expected'),
        ("metal_kernels", "yes", 'metal_kernels: got "yes", expected a bool, "true" or "false"'),
        ("priority", "high", 'priority: got "high", expected "normal" or "low"'),
        ("k" * 64, "1", "the key or the value is null or too long"),
        ("device", "c" * 256, "the key or the value is null or too long"),
    ],
)
def test_invalid_options_are_refused(delegate, key, value, message, capfd):
    assert set_option(key, value) == INVALID_ARGUMENT
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    "function, arguments",
    [
        ("set_option", [None, None]),
        ("buffers_open", [None, None]),
        ("buffers_copy", [None] + 4 * [0]),
        ("buffers_read", [None] + 4 * [0]),
        ("buffers_write", [None] + 4 * [0]),
        ("buffers_reset", [None]),
        ("deferred_finish", [None]),
    ],
)
def test_null_pointers_are_errors(delegate, function, arguments):
    call = getattr(ctypes.CDLL(delegate), f"executorch_mlx_{function}")
    assert call(*(x if x is None else ctypes.c_int64(x) for x in arguments)) == INVALID_ARGUMENT


def test_null_pointers_are_ignored(delegate):
    library = ctypes.CDLL(delegate)
    library.executorch_mlx_buffers_describe.restype = ctypes.c_char_p
    library.executorch_mlx_buffers_count.restype = ctypes.c_size_t
    zero = ctypes.c_size_t(0)
    assert library.executorch_mlx_buffers_count(None) == 0
    assert library.executorch_mlx_buffers_describe(None, zero) == b""
    library.executorch_mlx_buffers_size(None, zero, None, None)
    assert library.executorch_mlx_has_ring_buffers(None) == 0
    library.executorch_mlx_buffers_close(None)
    library.executorch_mlx_deferred_free(None)


def test_device_option_accepts_the_cpu():
    with option("device", "cpu"):
        g = Graph()
        g.emit(ir.NegNode(x=g.input((2,)), out=g.output((2,))))
        assert g.run(torch.ones(2))[0].tolist() == [-1, -1]


def test_a_gpu_that_mlx_does_not_support_is_named(delegate, capfd):
    mx = pytest.importorskip("mlx.core")
    if mx.is_available(mx.Device(mx.gpu, 0)):
        pytest.skip("MLX supports the GPU of this machine")
    assert set_option("device", "gpu") == NOT_SUPPORTED
    assert 'device: got "gpu", which this build of MLX does not support' in capfd.readouterr().err


# -- limits --------------------------------------------------------------------------


def loop(iterations: int) -> Graph:
    """A program with a loop that runs two instructions in each iteration."""
    g = Graph()
    x, part = g.input((iterations, 8)), g.new_temp()
    body = g.chain(ir.AddNode(a=part, b=part, out=part), ir.ExpNode(x=part, out=part))
    g.emit(ir.ScanNode(originals=[x], sliced=[part], outputs=[], carry=[], body_chain_idx=body, scan_axis=0))
    return g


def product(width: int) -> Graph:
    """A program that multiplies [1, width] by [width, width], which takes width² multiplications."""
    g = Graph()
    x = g.input((1, width))
    g.emit(ir.AddmmNode(mat1=x, mat2=g.constant(torch.zeros(width, width)), out=g.output((1, width))))
    return g


def buffers() -> Graph:
    """A program with 1200 elements in mutable buffers."""
    g = Graph()
    g.buffer((600,))
    g.buffer((600,))
    return g


@pytest.mark.parametrize(
    "limit, make_graph, size_that_fits, message",
    [
        (("max_instructions", "32"), loop, 10, "more than 32 instructions in one call"),
        (("max_operations", "5000"), loop, 10, "more than 5000 operations in one call"),
        (("max_operations", "5000"), product, 30, "more than 5000 operations in one call"),
    ],
)
def test_limits_end_a_call(delegate, limit, make_graph, size_that_fits, message, capfd):
    def run(size):
        make_graph(size).run(torch.zeros(size, 8) if make_graph is loop else torch.zeros(1, size))

    with option(*limit):
        run(size_that_fits)
        with pytest.raises(RuntimeError):
            run(100)
    assert message in capfd.readouterr().err


def outer_product(g):
    x, y = g.constant(torch.zeros(4000, 1)), g.constant(torch.zeros(1, 4000))
    g.emit(ir.AddmmNode(mat1=x, mat2=y, out=g.output((4000, 4000))))


def attention_over_wide_values(g):
    q, v = g.constant(torch.zeros(1, 1, 4000, 1)), g.constant(torch.zeros(1, 1, 1, 4000))
    g.emit(ir.SdpaNode(q=q, k=g.constant(torch.zeros(1, 1, 1, 1)), v=v, out=g.output((1, 1, 4000, 4000)), scale=1.0))


@pytest.mark.parametrize("emit", [outer_product, attention_over_wide_values])
def test_limit_is_checked_before_a_kernel_writes_its_result(emit, capfd):
    emit(g := Graph())
    with option("max_operations", "1000000"):
        model = g.load()
    memory.reset_peak_memory()
    with pytest.raises(RuntimeError):
        model()
    assert "more than 1000000 operations in one call" in capfd.readouterr().err
    assert memory.get_peak_memory() < memory.get_active_memory() + (1 << 20)


def test_max_operations_limits_the_elements_of_buffers(delegate, capfd):
    with option("max_operations", "1200"):
        buffers().load()
    with option("max_operations", "1199"), pytest.raises(RuntimeError):
        buffers().load()
    assert "mutable buffers: got more elements than the option max_operations permits" in capfd.readouterr().err


# -- Metal source ------------------------------------------------------------------


def metal_kernel():
    g = Graph()
    x, y = g.input((2,)), g.output((2,))
    node = ir.MetalKernelNode(
        name="copy",
        source="y[thread_position_in_grid.x] = x[thread_position_in_grid.x];",
        inputs=[x],
        outputs=[y],
        grid=lits(2),
        threadgroup=lits(2),
        input_names=["x"],
        output_names=["y"],
        output_shapes_flat=lits(2),
        output_shape_lengths=[1],
        output_dtypes=[FLOAT32],
    )
    g.emit(node)
    return g


def test_metal_source_is_refused_by_default(delegate, capfd):
    with pytest.raises(RuntimeError):
        metal_kernel().load()
    err = capfd.readouterr().err
    assert "(MetalKernelNode): Metal source needs a build with EXECUTORCH_MLX_METAL_KERNELS and the load option" in err


def test_metal_source_needs_a_build_and_a_gpu(delegate, capfd):
    """A build without Metal kernels refuses the option. A machine without an Apple GPU refuses the program."""
    status = set_option("metal_kernels", "true")
    if status == NOT_SUPPORTED:
        assert "metal_kernels: needs a build with EXECUTORCH_MLX_METAL_KERNELS" in capfd.readouterr().err
        return
    import mlx.core as mx

    assert status == 0
    with option("metal_kernels", "true"):
        if mx.metal.is_available():
            assert metal_kernel().run(torch.tensor([1.0, 2.0]))[0].tolist() == [1, 2]
            return
        with pytest.raises(RuntimeError):
            metal_kernel().load()
    assert "Metal source needs an Apple GPU" in capfd.readouterr().err
