"""Weights of products are packed when a program is loaded. Results keep their bits."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch
from executorch_mlx import Runtime, memory
from executorch_mlx.custom_ops.packing import pack
from irprograms import Graph, ir, pte

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU kernels are built on Linux only")

N, K = 300, 1024
PANELS = 304 * K // 2  # bytes of the packed integers of 4 bits, in whole panels of 16 rows


def weights(bits=4, group_size=64, dtype=torch.float32, n=N):
    generator = torch.Generator().manual_seed(0)
    words = pack(torch.randint(0, 2**bits, (n, K), generator=generator).to(torch.uint8), bits)
    scales, biases = (torch.randn(n, K // group_size, generator=generator).to(dtype) for _ in range(2))
    return {"w": words, "scales": scales, "biases": biases}


def activations(rows):
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(1))


def graph_with_constants(rows, tensors, count=1, bits=4, group_size=64):
    g = Graph()
    x = g.input((rows, K))
    slots = {name: g.constant(tensor) for name, tensor in tensors.items()}
    emit_products(g, x, slots, rows, tensors, count, bits, group_size)
    return g


def emit_products(g, x, slots, rows, tensors, count, bits, group_size):
    for _ in range(count):
        out = g.output((rows, len(tensors["w"])))
        g.emit(ir.Int8QuantizedMatmulNode(x=x, out=out, group_size=group_size, bits=bits, **slots))


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits, group_size", [(4, 64), (8, 32)])
def test_results_are_those_of_weights_that_are_inputs(bits, group_size, dtype, rows):
    """Inputs are never packed."""
    tensors = weights(bits, group_size, dtype)
    g = Graph()
    x = g.input((rows, K))
    slots = {name: g.input(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    emit_products(g, x, slots, rows, tensors, 1, bits, group_size)
    (expected,) = g.run(activations(rows), *tensors.values())
    (result,) = graph_with_constants(rows, tensors, 1, bits, group_size).run(activations(rows))
    assert torch.equal(result, expected)


def test_packed_copies_are_active_memory_and_shared():
    """Two products by the same matrix, and two methods, share a copy."""
    tensors = weights()
    size = sum(tensor.nbytes for tensor in tensors.values())
    before = memory.get_active_memory()
    methods = {"a": graph_with_constants(1, tensors, 2), "b": graph_with_constants(3, tensors)}
    loaded = Runtime.get().load_program(pte(methods))
    a = loaded.load_method("a")
    with_copy = memory.get_active_memory() - before
    assert with_copy >= size + PANELS
    b = loaded.load_method("b")
    assert memory.get_active_memory() - before == with_copy
    (first, second), (third,) = a.execute([activations(1)]), b.execute([activations(3)])
    assert torch.equal(first, second)
    assert torch.equal(third, graph_with_constants(3, tensors).run(activations(3))[0])
    del a, b, loaded, first, second, third
    assert memory.get_active_memory() == before


def test_weights_are_not_packed_if_the_copy_would_exceed_the_memory_limit(limit):
    tensors = weights()
    g = graph_with_constants(1, tensors)
    (expected,) = g.run(activations(1))
    size = sum(tensor.nbytes for tensor in tensors.values())
    total = limit(size + PANELS // 2)
    model = g.load()
    (result,) = model(activations(1))
    assert torch.equal(result, expected)
    assert memory.get_peak_memory() <= total


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


def program_in_file(folder, tensors, methods, **options):
    """Load a program from a file. Return it, and a method that has loaded the weights but has no use for them.

    ExecuTorch's Python runtime locks the pages of what it loads. They are unlocked here, as in the engine.
    """
    idle = Graph()
    x = idle.input((1,))
    for tensor in tensors.values():
        idle.constant(tensor)
    idle.emit(ir.AddNode(a=x, b=x, out=idle.output((1,))))
    path = folder / "model.pte"
    path.write_bytes(pte({"idle": idle} | methods))
    program = Runtime.get().load_program(path, **options)
    method = program.load_method("idle")
    ctypes.CDLL(None).munlockall()
    return program, method


def test_a_copy_of_weights_in_a_file_takes_their_place(limit, tmp_path):
    """The limit leaves room for half a copy besides the weights."""
    import mlx.core as mx

    tensors = weights()
    g = graph_with_constants(1, tensors)
    (expected,) = g.run(activations(1))
    before, before_in_mlx = memory.get_active_memory(), mx.get_active_memory()
    total = limit(bytes_of(tensors) + PANELS // 2)
    program, idle = program_in_file(tmp_path, tensors, {"forward": g})
    method = program.load_method("forward")
    assert mx.get_active_memory() - before_in_mlx >= PANELS
    assert memory.get_active_memory() <= total
    assert torch.equal(method.execute([activations(1)])[0], expected)
    del method, idle, program
    assert memory.get_active_memory() == before


def test_weights_that_another_method_reads_count_beside_their_copy(limit, tmp_path):
    """The method `b` reads the weights themselves. Loaded after `a`, it has to fit beside the copy."""
    tensors = weights()
    b = Graph()
    slots = {name: b.constant(tensor) for name, tensor in tensors.items()}
    b.emit(ir.DequantizeNode(out=b.output((N, K)), group_size=64, bits=4, mode="affine", **slots))
    (expected,) = b.run()
    before = memory.get_active_memory()
    for first, second in ("ab", "ba"):
        limit(bytes_of(tensors) + PANELS // 2)
        program, idle = program_in_file(tmp_path, tensors, {"a": graph_with_constants(1, tensors), "b": b})
        methods = {first: program.load_method(first)}
        if first == "a":
            with pytest.raises(RuntimeError):
                program.load_method("b")
        memory.set_memory_limit(None)
        methods[second] = program.load_method(second)
        assert memory.get_active_memory() - before >= bytes_of(tensors) + PANELS
        assert torch.equal(methods["b"].execute([])[0], expected)
        del methods, idle, program
        assert memory.get_active_memory() == before


def test_rows_of_an_embedding_do_not_stay_in_memory(tmp_path):
    """The rows that a call reads, beside the packed copy, are released after the call. The values stay the same."""
    n = 64_000
    tensors = weights(n=n)
    g = Graph()
    x, ids, rows = g.input((1, K)), g.input((500,), torch.int32), g.output((500, K // 8), torch.uint32)
    slots = {name: g.constant(tensor) for name, tensor in tensors.items()}
    emit_products(g, x, slots, 1, tensors, 1, 4, 64)
    g.emit(ir.TakeNode(x=slots["w"], index=ir.IntOrVidOrTid(tid=ids, kind=2), out=rows, axis=0))
    program, idle = program_in_file(tmp_path, tensors, {"forward": g})
    method = program.load_method("forward")
    chosen = torch.arange(0, n, n // 500, dtype=torch.int32)[:500]
    expected = tensors["w"].view(torch.int32)[chosen.long()]
    for _ in range(2):
        taken, _ = method.execute([activations(1), chosen])
        assert torch.equal(taken.view(torch.int32), expected)
    assert mapped_bytes(tmp_path / "model.pte") < 1 << 20
    del method, idle, program


def mapped_bytes(path):
    """The memory of this process that maps a file."""
    sizes, is_in_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(None, 1)[0]
        if not first.endswith(":"):
            is_in_file = line.endswith(str(path))
        elif first == "Rss:" and is_in_file:
            sizes += int(line.split()[1]) * 1024
    return sizes


def test_weights_that_the_init_chain_may_change_are_not_packed():
    """The init chain doubles the scales."""
    tensors = weights()
    g = Graph()
    x, out = g.input((1, K)), g.output((1, N))
    slots = {name: g.constant(tensor) for name, tensor in tensors.items()}
    two = g.constant(torch.tensor(2.0))
    g.init_chain = g.chain(ir.MultiplyNode(a=slots["scales"], b=two, out=slots["scales"]))
    g.emit(ir.Int8QuantizedMatmulNode(x=x, out=out, group_size=64, bits=4, **slots))
    (result,) = g.run(activations(1))
    (expected,) = graph_with_constants(1, tensors | {"scales": 2 * tensors["scales"]}).run(activations(1))
    assert torch.equal(result, expected)


def test_weights_of_equal_bytes_and_another_shape_are_packed_separately():
    """A file stores equal bytes once, so that a program which is loaded from memory has them at one address."""
    tensors = {name: tensor[:16] for name, tensor in weights().items()}
    x, row = activations(1), torch.randn(1, 16 * K, generator=torch.Generator().manual_seed(2))

    def emit(g, add):
        for columns, reshaped in ((K, tensors), (16 * K, {name: t.reshape(1, -1) for name, t in tensors.items()})):
            n = len(reshaped["w"])
            slots = {name: add(tensor) for name, tensor in reshaped.items()}
            out = g.output((1, n))
            g.emit(ir.Int8QuantizedMatmulNode(x=g.input((1, columns)), out=out, group_size=64, bits=4, **slots))
        return g

    results = emit(g := Graph(), g.constant).run(x, row)
    # Inputs are never packed.
    arguments = []
    g = Graph()

    def add_input(tensor):
        arguments.append(tensor)
        return g.input(tuple(tensor.shape), tensor.dtype)

    emit(g, add_input)
    expected = g.run(*arguments[:3], x, *arguments[3:], row)
    assert all(map(torch.equal, results, expected))


# -- floats ------------------------------------------------------------------------


def emit_float_product(g, x, w, rows, n):
    transposed = g.new_temp()
    g.emit(ir.TransposeNode(x=w, out=transposed, perm=[1, 0]))
    g.emit(ir.AddmmNode(mat1=x, mat2=transposed, out=g.output((rows, n)), alpha=1.0, beta=1.0))
    return transposed


def float_graph(rows, matrices):
    g = Graph()
    x = g.input((rows, K), matrices[0].dtype)
    for w in matrices:
        emit_float_product(g, x, g.constant(w), rows, len(w))
    return g


def in_mlx(program, name):
    """The bytes that MLX allocates when a method is loaded, and the method."""
    import mlx.core as mx

    before = mx.get_active_memory()
    method = program.load_method(name)
    return mx.get_active_memory() - before, method


@pytest.mark.parametrize("rows", [1, 6, 12, 100])
@pytest.mark.parametrize("count", [1, 3])
def test_matrices_of_floats_in_a_file_are_packed(rows, count, limit, tmp_path):
    """Of a single product, and of products of the same rows. The limit leaves room for half a copy."""
    matrices = [torch.randn(N + i, K, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    expected = float_graph(rows, matrices).run(activations(rows))  # from memory, where they are not packed
    size = sum(w.nbytes for w in matrices)
    before = memory.get_active_memory()
    limit(size + size // 2 + rows * N * 4 * (count + 2))
    program, idle = program_in_file(
        tmp_path, {str(i): w for i, w in enumerate(matrices)}, {"forward": float_graph(rows, matrices)}
    )
    packed, method = in_mlx(program, "forward")
    assert size <= packed < 1.1 * size
    assert memory.get_active_memory() - before < 1.1 * size
    assert all(map(torch.equal, method.execute([activations(rows)]), expected))
    del method, idle, program
    assert memory.get_active_memory() == before


@pytest.mark.parametrize("reader", ["take", "transpose", "output", "bytes"])
def test_a_matrix_of_floats_is_not_packed_if_it_would_stay_in_memory(reader, tmp_path):
    """Another instruction reads it or its transpose, or the program is not in a file."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    g = Graph()
    slot = g.constant(w)
    transposed = emit_float_product(g, g.input((2, K)), slot, 2, N)
    if reader == "take":
        g.emit(ir.TakeNode(x=slot, index=ir.IntOrVidOrTid(literal=3), axis=0, out=g.output((K,))))
    elif reader == "transpose":
        g.emit(ir.AddNode(a=transposed, b=transposed, out=g.output((K, N))))
    elif reader == "output":
        g.emit(ir.TransposeNode(x=slot, out=g.output((K, N)), perm=[1, 0]))
    expected = g.run(activations(2))
    if reader == "bytes":
        program, idle = Runtime.get().load_program(pte({"forward": g})), None
    else:
        program, idle = program_in_file(tmp_path, {"w": w}, {"forward": g})
    packed, method = in_mlx(program, "forward")
    assert packed < w.nbytes // 2
    results = method.execute([activations(2)])
    assert all(map(torch.equal, results, expected))
    torch.testing.assert_close(results[0], activations(2) @ w.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("profile", [{}, {"enable_etdump": True, "debug_buffer_size": 0}], ids=["plain", "profiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_and_its_residual_do_not_read_the_weights_in_the_file(dtype, profile, tmp_path):
    """Their copy serves, also where one kernel computes both, and in a call that times each of the two."""
    w = torch.randn(4096, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    g = Graph()
    x, residual, product = g.input((1, K), dtype), g.input((1, len(w)), dtype), g.new_temp()
    transposed, y = g.new_temp(), g.output((1, len(w)), dtype)
    g.emit(ir.TransposeNode(x=g.constant(w), out=transposed, perm=[1, 0]))
    g.emit(ir.AddmmNode(mat1=x, mat2=transposed, out=product, alpha=1.0, beta=1.0))
    g.emit(ir.AddNode(a=residual, b=product, out=y))
    program, idle = program_in_file(tmp_path, {"w": w}, {"forward": g}, **profile)
    packed, method = in_mlx(program, "forward")
    if dtype == torch.bfloat16 and packed < w.nbytes:
        pytest.skip("the kernels of this processor do not pack bfloat16")
    assert packed >= w.nbytes
    ones = torch.ones(1, len(w), dtype=dtype)
    (result,) = method.execute([activations(1).to(dtype), ones])
    torch.testing.assert_close(result, activations(1).to(dtype) @ w.T + ones, atol=0.5, rtol=0.02)
    assert mapped_bytes(tmp_path / "model.pte") < 1 << 20
    del method, idle, program
