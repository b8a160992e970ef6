"""Load options, and Metal source inside a program."""

import pytest
import torch
from irprograms import Graph, ir, lits
from irprograms.options import option, set_option

INVALID_ARGUMENT, NOT_SUPPORTED = 0x12, 0x10


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("colour", "red", 'option: got "colour", expected device, metal_kernels or kv_windows'),
        ("device", "tpu", 'device: got "tpu", expected "cpu" or "gpu"'),
        ("kv_windows", "8,", 'kv_windows: got "8,", expected numbers of positions'),
        ("kv_windows", "8,-1", 'kv_windows: got "8,-1", expected'),
        ("kv_windows", "8,,1", 'kv_windows: got "8,,1", expected'),
        ("kv_windows", "99999999999", 'kv_windows: got "99999999999", expected'),
        ("metal_kernels", "yes", 'metal_kernels: got "yes", expected a bool, "true" or "false"'),
        ("k" * 64, "1", "the key or the value is null or too long"),
        ("device", "c" * 256, "the key or the value is null or too long"),
    ],
)
def test_invalid_options_are_refused(delegate, key, value, message, capfd):
    assert set_option(key, value) == INVALID_ARGUMENT
    assert message in capfd.readouterr().err


def test_device_option_accepts_the_cpu():
    with option("device", "cpu"):
        g = Graph()
        g.emit(ir.NegNode(x=g.input((2,)), out=g.output((2,))))
        assert g.run(torch.ones(2))[0].tolist() == [-1, -1]


# -- Metal source ------------------------------------------------------------------


def metal_kernel():
    g = Graph()
    x, y = g.input((2,)), g.output((2,))
    node = ir.MetalKernelNode(
        name="copy", source="y[thread_position_in_grid.x] = x[thread_position_in_grid.x];",
        inputs=[x], outputs=[y], grid=lits(2), threadgroup=lits(2), input_names=["x"], output_names=["y"],
        output_shapes_flat=lits(2), output_shape_lengths=[1], output_dtypes=[6],
    )  # fmt: skip
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
