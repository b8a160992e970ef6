"""Damaged programs, invalid inputs, memory and threads."""

import ctypes
import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import leaks
import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch.exir.schema import Buffer
from executorch_mlx.serialization.pack import pack_payload
from fuzz_payloads import fuzz
from irprograms import FLOAT32, INT32, Graph, Model, ir, lit, lits, number, value_of
from irprograms.examples import EXAMPLES, decoder
from irprograms.node_case import random
from loaded_method import LoadedMethod


def test_damaged_programs_run_or_return_an_error():
    counts = fuzz(300, seed=42)
    assert not counts.failures
    assert counts.ran + counts.refused == 300 and counts.ran > 10 and counts.refused > 100


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no /proc, from which the test reads threads and memory")
def test_programs_that_ran_and_were_unloaded_leave_no_threads_or_memory():
    command = [sys.executable, leaks.__file__, "--count", "200"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    threads, megabytes = map(float, output.split()[:2])
    assert threads <= 0 and megabytes < 4, output


# -- inputs and outputs ----------------------------------------------------------


def program_with_input(**changes):
    """A program with an input that the .pte declares as float32 [1..8, 4].

    The payload declares the same, except for `changes`: fields of the TensorMeta of the input.
    """
    g = Graph()
    x = g.input(((1, 8), 4))
    g.emit(ir.ExpNode(x=x, out=g.output(((1, 8), 4))))
    g.meta[x.idx] = dataclasses.replace(g.meta[x.idx], **changes)
    return g


SIZES_2_TO_4 = [ir.ShapeDim(value=-1, min_value=2, max_value=4), ir.ShapeDim(value=4)]


@pytest.mark.parametrize(
    "changes, size, message",
    [
        ({"shape": SIZES_2_TO_4}, 5, "got float32[5,4], expected float32[2..4,4]"),
        (
            {"shape": [ir.ShapeDim(value=-1, min_value=3, max_value=4), ir.ShapeDim(value=4)]},
            2,
            "got float32[2,4], expected float32[3..4,4]",
        ),
        ({"shape": SIZES_2_TO_4[:1], "dim_order": [0]}, 3, "got float32[3,4], expected float32[2..4]"),
        ({"scalar_type": INT32}, 3, "got float32[3,4], expected int32[0..8,4]"),
    ],
)
def test_invalid_inputs_are_errors(changes, size, message, capfd):
    g = program_with_input(**changes)
    if "scalar_type" in changes:
        g.meta[g.inputs[0][0].idx].shape[0].min_value = 0
    model = g.load()
    with pytest.raises(RuntimeError):
        model(random(size, 4))
    assert 'MLX execute: input 0 "x1": ' in (error := capfd.readouterr().err) and message in error


def test_valid_inputs_run_after_invalid_ones():
    model = program_with_input(shape=SIZES_2_TO_4).load()
    for size in (5, 3, 8, 1):
        x = random(size, 4)
        if size <= 4:
            torch.testing.assert_close(model(x)[0], x.exp())
        else:
            with pytest.raises(RuntimeError):
                model(x)


@pytest.mark.parametrize("declared", [[0, 1, 2, 3], [0, 2, 3, 1]], ids=str)
def test_channels_last_inputs_keep_their_values(declared):
    """The payload may declare another order than that in which ExecuTorch passes the elements."""
    g = Graph()
    x = g.input((1, 2, 3, 4), dim_order=(0, 2, 3, 1))
    g.meta[x.idx].dim_order = declared
    g.emit(ir.ContiguousNode(x=x, out=g.output((1, 2, 3, 4))))
    data = random(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert not data.is_contiguous()
    assert torch.equal(g.run(data)[0], data)


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        ((2, 3), torch.int32, "got float32[2,3], expected int32[2,3]"),
        ((3, 2), torch.float32, "got float32[2,3], expected float32[3,2]"),
    ],
)
def test_output_mismatches_are_errors(shape, dtype, message, capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.input((2, 3)), out=g.output(shape, dtype)))
    with pytest.raises(RuntimeError):
        g.run(random(2, 3))
    assert f"output 0: {message}" in capfd.readouterr().err


def test_outputs_are_cast_to_the_declared_float_dtype():
    g = Graph()
    g.emit(ir.ExpNode(x=g.input((2, 3)), out=g.output((2, 3), torch.float16)))
    x = random(2, 3)
    torch.testing.assert_close(g.run(x)[0], x.exp().half())


def test_integer_outputs_are_returned():
    g = Graph()
    x, size, double = g.input(((1, 9),)), g.new_value(), g.new_value()
    g.emit(ir.SymSizeNode(a=x, dim=0, out=size), ir.MultiplyIntNode(a=value_of(size), b=lit(2), out=double))
    g.output_value(double)
    assert g.run(torch.zeros(4)) == [8]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the memory map is unknown")
def test_output_that_is_a_constant_of_a_mapped_file_is_refused(tmp_path, capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.input((3,)), out=g.output((3,))))
    file = deserialize_pte_binary(g.pte())
    (plan,) = file.program.execution_plan
    output = plan.values[plan.outputs[0]].val
    output.data_buffer_idx, output.allocation_info = len(file.program.constant_buffer), None
    file.program.constant_buffer.append(Buffer(bytes(64)))
    path = tmp_path / "constant.pte"
    path.write_bytes(bytes(serialize_pte_binary(file)))
    with pytest.raises(RuntimeError):
        LoadedMethod(path).execute([torch.zeros(3)])
    assert "output 0: the tensor is a constant in a file, and cannot be written" in capfd.readouterr().err


def test_output_stays_a_tensor(capfd):
    """The two outputs of the delegate, a tensor and an integer, are the same value of ExecuTorch."""
    g = Graph()
    g.emit(ir.ExpNode(x=g.input((3,)), out=g.output((3,))))
    g.output_value(g.item(g.input((1,), torch.int64)))
    file = deserialize_pte_binary(g.pte())
    (plan,) = file.program.execution_plan
    arguments = plan.chains[0].instructions[0].instr_args.args
    arguments[3] = arguments[2]
    model = Model(bytes(serialize_pte_binary(file)))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(torch.zeros(3), torch.tensor([7]))
        assert "output 1: got a value with tag 4, expected tag 1" in capfd.readouterr().err


def test_deferred_call_without_outputs_is_no_source_of_tokens(delegate, capfd):
    g = Graph()
    tokens = g.input((1, 1), torch.int64)
    g.names[tokens.idx] = "tokens"
    model = g.load(pack_payload(dataclasses.replace(g.graph(), output_map=None)))
    library, elements = ctypes.CDLL(delegate), (ctypes.c_int64 * 1)(0)
    library.executorch_mlx_deferred_take.restype = ctypes.c_void_p
    library.executorch_mlx_defer(None, None, None, ctypes.c_size_t(0))
    model(torch.zeros(1, 1, dtype=torch.int64))
    source = ctypes.c_void_p(library.executorch_mlx_deferred_take())
    assert source
    library.executorch_mlx_defer(source, None, elements, ctypes.c_size_t(1))
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 1, dtype=torch.int64))
    library.executorch_mlx_deferred_free(source)
    assert "defer: the source has no output with this memory" in capfd.readouterr().err


# -- programs --------------------------------------------------------------------


def check_refused(g, message, capfd, payload=None):
    with pytest.raises(RuntimeError, match="Failed to load method"):
        g.load(payload)
    assert message in capfd.readouterr().err


def test_truncated_payloads_are_refused(capfd):
    g, _ = decoder()
    payload = g.payload()
    for size in (0, 3, 24, 100, len(payload) // 2, len(payload) - 64):
        check_refused(g, "MLX init: payload: " if size else "", capfd, payload[:size])


def test_wrong_magic_is_refused(capfd):
    g, _ = decoder()
    check_refused(g, "expected a header with the magic MLX0", capfd, g.payload().replace(b"MLX0", b"MLX9", 1))


def test_slots_out_of_range_are_refused(capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=ir.Tid(77), out=g.output((1,))))
    check_refused(g, "(ExpNode): x: tensor slot 77 is out of range [0, 1)", capfd)


def test_names_with_invalid_utf8_are_logged(capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.constant(torch.ones(2)), out=g.output((2,))))
    g.data.clear()
    check_refused(g, 'constant 0 "?1"', capfd, g.payload().replace(b"c1\0", b"\xff1\0"))


@pytest.mark.parametrize("kind", ["a constant", "an input"])
def test_writes_to_constants_and_inputs_are_refused(kind, capfd):
    g = Graph()
    x = g.constant(torch.ones(1)) if kind == "a constant" else g.input((1,))
    g.emit(ir.ExpNode(x=x, out=x))
    check_refused(g, f"(ExpNode): out: tensor slot 0 is {kind} and cannot be written", capfd)


def test_chains_that_call_themselves_are_refused(capfd):
    g = Graph()
    g.emit(ir.IfNode(cond=lit(1), then_chain_idx=0, else_chain_idx=0))
    check_refused(g, "chain 0 calls itself", capfd)


def test_at_most_64_nested_chains_are_accepted_also_if_the_innermost_comes_first(capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.input((1,)), out=g.output((1,))))
    chain = g.chain()
    for _ in range(63):
        chain = g.chain(ir.IfNode(cond=lit(1), then_chain_idx=chain, else_chain_idx=chain))
    assert g.run(torch.zeros(1))[0] == 1
    chain = g.chain(ir.IfNode(cond=lit(1), then_chain_idx=chain, else_chain_idx=chain))
    check_refused(g, f"chain {chain}: expected at most 64 nested chains", capfd)


def test_missing_constants_are_refused(capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.constant(torch.ones(2)), out=g.output((2,))))
    g.data.clear()
    check_refused(g, 'constant 0 "c1" is neither in the program nor in a data file', capfd)


def test_nested_scans_stop_at_the_instruction_limit(capfd):
    """A few kilobytes of nested scans would run a billion instructions."""
    g = Graph()
    x, part = g.input((1000, 1)), g.new_temp()

    def scan(body):
        return ir.ScanNode(originals=[x], sliced=[part], outputs=[], carry=[], body_chain_idx=body, scan_axis=0)

    g.emit(scan(g.chain(scan(g.chain(*[ir.NoopNode()] * 1000)))))
    with pytest.raises(RuntimeError):
        g.run(torch.zeros(1000, 1))
    assert "instructions in one call" in capfd.readouterr().err


def attention_without_heads(g):
    q, k = broadcast(g, 1, 2, 1, 4), broadcast(g, 1, 0, 8, 4)
    g.emit(ir.RowSdpaNode(q=q, k=k, v=k, out=g.output((1, 2, 1, 4)), starts=lits(0), stops=lits(3), scale=1.0))


def broadcast(g, *shape, dtype=torch.float32):
    x = g.constant(torch.ones(1, dtype=dtype))
    g.emit(ir.BroadcastToNode(x=x, out=(y := g.new_temp()), shape=lits(*shape)))
    return y


def joined(g):
    x, y = g.constant(torch.ones(65536)), g.constant(torch.ones(65600))
    g.emit(ir.ConcatenateNode(tensors=[x] * 65535 + [y], axis=0, out=g.output((64,))))


def stacked(g):
    g.emit(ir.StackNode(tensors=[g.constant(torch.ones(65536))] * 65536, axis=1, out=g.output((64,))))


def empty_while(g):
    g.emit(ir.WhileNode(cond=lit(1), carry=[], cond_chain_idx=g.chain(), body_chain_idx=g.chain()))


def empty_scan(g):
    x, part = broadcast(g, 2**31 - 1, dtype=torch.uint8), g.new_temp()
    g.emit(ir.ScanNode(originals=[x], sliced=[part], outputs=[], carry=[], body_chain_idx=g.chain(), scan_axis=0))


def large_outputs_of_a_scan(g):
    x, part, y = broadcast(g, 2**20, dtype=torch.uint8), g.new_temp(), g.new_temp()
    body = g.chain(ir.FullNode(out=y, shape=lits(2**12), v=number(1.0), scalar_type=FLOAT32))
    g.emit(ir.ScanNode(originals=[x], sliced=[part], outputs=[y], carry=[], body_chain_idx=body, scan_axis=0))


def row_of_states(g):
    """The row is computed in a branch, so that the host does not know it."""
    row, start = g.input((1,), torch.int64), g.constant(torch.ones(1, dtype=torch.int64))
    states, computed = g.constant(torch.zeros(1, 1, 0, 4)), g.new_temp()
    read = ir.ReadLayerStateNode(states=states, start=start, row=computed, out=g.output((1, 4)))
    chain = g.chain(ir.AddNode(a=row, b=row, out=computed), read)
    g.emit(ir.IfNode(cond=lit(1), then_chain_idx=chain, else_chain_idx=g.chain()))


def wide_entries(g):
    """The numbers of groups of the three tensors add up to 1 in 32 bits."""
    xs = [broadcast(g, 1, 1, 1, width, dtype=torch.bfloat16) for width in (2**31 - 1, 2**31 - 32, 32)]
    entries, scales = g.output((1, 1, 1, 32), torch.uint8), g.output((1, 1, 1, 2))
    g.emit(
        ir.QuantizeEntriesNode(
            xs=xs, out=entries, out_scales=scales, bits=8, group_size=32, rotate=False, scale_type=FLOAT32
        )
    )


def too_many_matrices(g):
    """The constant has 2^32 matrices without elements."""
    x, index = g.constant(torch.zeros(65536, 65536, 1, 0)), g.constant(torch.zeros(1, dtype=torch.int32))
    g.emit(ir.GatherMmNode(a=x, b=broadcast(g, 1, 0, 1), lhs_indices=index, rhs_indices=index, out=g.output((1, 1, 1))))


@pytest.mark.parametrize(
    "emit, message",
    [
        (too_many_matrices, "expected at most 2^31 - 1 matrices"),
        (joined, "result size 4294967360 does not fit in 32 bits"),
        (stacked, "expected fewer than 2^31 elements"),
        (empty_while, "instructions in one call"),
        (empty_scan, "instructions in one call"),
        (large_outputs_of_a_scan, "result of shape [1048576,4096]: expected fewer than 2^31 elements"),
        (row_of_states, "expected none, because the axis is empty"),
        (wide_entries, "got 134217728 groups"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_damaging_instructions_are_errors(emit, message, capfd):
    g = Graph()
    emit(g)
    with pytest.raises(RuntimeError):
        g.run(*(torch.tensor([10**9]) for _ in g.inputs))
    assert message in capfd.readouterr().err


def test_computed_row_of_states_is_clamped():
    g = Graph()
    row, computed, out = g.input((1,), torch.int64), g.new_temp(), g.output((1, 4))
    states, start = g.constant(torch.arange(8.0).reshape(1, 1, 2, 4)), g.constant(torch.ones(1, dtype=torch.int64))
    read = ir.ReadLayerStateNode(states=states, start=start, row=computed, out=out)
    chain = g.chain(ir.AddNode(a=row, b=row, out=computed), read)
    g.emit(ir.IfNode(cond=lit(1), then_chain_idx=chain, else_chain_idx=g.chain()))
    assert g.run(torch.tensor([10**9]))[0].tolist() == [[4, 5, 6, 7]]


def test_attention_of_rows_without_key_heads_is_zero():
    g = Graph()
    attention_without_heads(g)
    assert g.run()[0].eq(0).all()


def test_part_of_a_split_may_replace_its_operand():
    g = Graph()
    x, t = g.input((6,)), g.new_temp()
    g.emit(
        ir.IdCopyNode(x=x, out=t),
        ir.SplitNode(x=t, sizes=lits(2, 2, 2), axis=0, outs=[g.output((2,)), t, g.output((2,))]),
    )
    first, last = g.run(torch.arange(6.0))
    assert first.tolist() == [0, 1] and last.tolist() == [4, 5]


# -- threads ---------------------------------------------------------------------


def in_thread(work):
    result = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


def test_any_thread_can_load_and_run():
    g, args = decoder()
    pte = g.pte()
    model = in_thread(lambda: Model(pte))
    expected = [x.clone() for x in in_thread(lambda: model(*args))]
    assert all(map(torch.equal, model(*args), expected))


def test_threads_run_different_programs_at_once():
    jobs = []
    for make in EXAMPLES.values():
        g, args = make()
        for _ in range(2):
            model = g.load()
            jobs.append((model, args, [x.clone() for x in model(*args)]))
    correct = []

    def run(model, args, expected):
        for _ in range(50):
            correct.append(all(torch.equal(a, b) for a, b in zip(model(*args), expected, strict=True)))

    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(correct) == 50 * len(jobs) and all(correct)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no /proc, from which the test reads the threads")
def test_unseeded_random_bits_create_no_threads():
    g = Graph()
    g.emit(ir.RandomBitsNode(out=g.output((4,), torch.uint32), shape=lits(4)))
    model = g.load()
    model()

    def count():
        status = Path("/proc/self/status").read_text()
        return int(status.split("Threads:")[1].split()[0])

    before = count()
    for _ in range(20):
        in_thread(lambda: model()[0].clone())
    assert count() < before + 10  # other parts of this process may start threads, but not one for each call
