"""What the delegate can be told before a program is loaded."""

import pytest
import torch
from harness import Graph, ir, lits
from options import option, set_option

INVALID_ARGUMENT, NOT_SUPPORTED = 0x12, 0x10


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("colour", "red", 'option "colour" is unknown, device, metal_kernels or kv_windows was expected'),
        ("device", "tpu", 'device: "tpu" came, "cpu" or "gpu" was expected'),
        ("kv_windows", "8,", 'kv_windows: "8," came, numbers of positions'),
        ("kv_windows", "8,-1", 'kv_windows: "8,-1" came'),
        ("kv_windows", "8,,1", 'kv_windows: "8,,1" came'),
        ("kv_windows", "99999999999", 'kv_windows: "99999999999" came'),
        ("metal_kernels", "yes", 'metal_kernels: a bool was expected, or "true" or "false"'),
        ("k" * 64, "1", "a key or a value is null or too long"),
        ("device", "c" * 256, "a key or a value is null or too long"),
    ],
)
def test_refused_options(delegate, key, value, said, capfd):
    assert set_option(key, value) == INVALID_ARGUMENT
    assert said in capfd.readouterr().err


def test_device():
    with option("device", "cpu"):
        g = Graph()
        g.emit(ir.NegNode(x=g.input((2,)), out=g.output((2,))))
        assert g.run(torch.ones(2))[0].tolist() == [-1, -1]


# -- Metal source ------------------------------------------------------------------


def metal():
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
        metal().load()
    err = capfd.readouterr().err
    assert "(MetalKernelNode): Metal source inside a program is not run: it takes a build with" in err


def test_metal_source_needs_a_build_and_a_gpu(delegate, capfd):
    """Allowing it does not make it run here: the option is refused, or else the program."""
    status = set_option("metal_kernels", "true")
    if status == NOT_SUPPORTED:
        assert "metal_kernels: this build is without EXECUTORCH_MLX_METAL_KERNELS" in capfd.readouterr().err
        return
    import mlx.core as mx

    assert status == 0
    with option("metal_kernels", "true"):
        if mx.metal.is_available():
            assert metal().run(torch.tensor([1.0, 2.0]))[0].tolist() == [1, 2]
            return
        with pytest.raises(RuntimeError):
            metal().load()
    assert "Metal source inside a program is not run: it takes Apple's GPU" in capfd.readouterr().err
