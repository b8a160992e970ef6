"""What must not happen: crashes, leaks, wrong answers to wrong input."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fuzz import fuzz
from harness import Graph, Model, ir, lit, lits, var
from programs import PROGRAMS, decoder
from rows import random

HERE = Path(__file__).parent


def test_500_damaged_programs():
    ran, refused, wrong = fuzz(500, seed=42)
    assert not wrong
    assert ran + refused == 500 and ran > 10 and refused > 100


def test_loads_leave_nothing_behind():
    """In a process of its own: its memory is nobody else's."""
    output = subprocess.run(
        [sys.executable, str(HERE / "cycles.py"), "--count", "200"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    threads, megabytes = map(float, output.split()[:2])
    assert threads <= 0 and megabytes < 4, output


# -- inputs ----------------------------------------------------------------------


def narrow(**changes):
    """A program that ExecuTorch lets more through to than the delegate allows."""
    g = Graph()
    x = g.input(((1, 8), 4))
    g.emit(ir.ExpNode(x=x, out=g.output(((1, 8), 4))))
    g.meta[x.idx] = dataclasses.replace(g.meta[x.idx], **changes)
    return g


ROWS_1_TO_4 = [ir.ShapeDim(value=-1, min_value=2, max_value=4), ir.ShapeDim(value=4)]


@pytest.mark.parametrize(
    "changes, rows, said",
    [
        ({"shape": ROWS_1_TO_4}, 5, "float32[5,4] came, float32[2..4,4] was expected"),
        ({"shape": [ir.ShapeDim(value=-1, min_value=3, max_value=4), ir.ShapeDim(value=4)]}, 2,
         "float32[2,4] came, float32[3..4,4] was expected"),
        ({"shape": ROWS_1_TO_4[:1], "dim_order": [0]}, 3, "float32[3,4] came, float32[2..4] was expected"),
        ({"scalar_type": 3}, 3, "float32[3,4] came, int32[0..8,4] was expected"),
        ({"dim_order": [1, 0]}, 3, "dim_order [1,0] was expected"),
    ],
)
def test_wrong_inputs_are_errors(changes, rows, said, capfd):
    g = narrow(**changes)
    if "scalar_type" in changes:
        g.meta[g.inputs[0][0].idx].shape[0].min_value = 0
    model = g.load()
    with pytest.raises(RuntimeError):
        model(random(rows, 4))
    assert f'MLX execute: input 0 "x1": ' in (err := capfd.readouterr().err) and said in err


def test_right_inputs_still_pass_after_wrong_ones():
    model = narrow(shape=ROWS_1_TO_4).load()
    for rows in (5, 3, 8, 1):
        x = random(rows, 4)
        if rows <= 4:
            torch.testing.assert_close(model(x)[0], x.exp())
        else:
            with pytest.raises(RuntimeError):
                model(x)


def test_channels_last_inputs_are_read_in_their_order():
    g = Graph()
    x = g.input((1, 2, 3, 4))
    g.emit(ir.ContiguousNode(x=x, out=g.output((1, 2, 3, 4))))
    data = random(1, 2, 3, 4)
    assert torch.equal(g.run(data)[0], data)


@pytest.mark.parametrize(
    "shape, dtype, said",
    [
        ((2, 3), torch.int32, "the program made float32[2,3], int32[2,3] was expected"),
        ((3, 2), torch.float32, "the program made float32[2,3], float32[3,2] was expected"),
    ],
)
def test_wrong_outputs_are_errors(shape, dtype, said, capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.input((2, 3)), out=g.output(shape, dtype)))
    with pytest.raises(RuntimeError):
        g.run(random(2, 3))
    assert f"output 0: {said}" in capfd.readouterr().err


def test_outputs_of_another_float_dtype_become_it():
    g = Graph()
    g.emit(ir.ExpNode(x=g.input((2, 3)), out=g.output((2, 3), torch.float16)))
    x = random(2, 3)
    torch.testing.assert_close(g.run(x)[0], x.exp().half())


# -- programs --------------------------------------------------------------------


def refused(g, said, capfd, payload=None):
    with pytest.raises(RuntimeError, match="Failed to load method"):
        g.load(payload)
    assert said in capfd.readouterr().err


def test_truncated_payloads_are_refused(capfd):
    g, _ = decoder()
    payload = g.payload()
    for size in (0, 3, 24, 100, len(payload) // 2, len(payload) - 64):
        refused(g, "MLX init: payload: " if size else "", capfd, payload[:size])


def test_wrong_magic_is_refused(capfd):
    g, _ = decoder()
    refused(g, "the header does not say MLX0", capfd, g.payload().replace(b"MLX0", b"MLX9", 1))


def test_slots_out_of_range_are_refused(capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=ir.Tid(77), out=g.output((1,))))
    refused(g, "(ExpNode): x is tensor slot 77, there are 1", capfd)


def test_names_that_are_no_text_do_not_stop_the_log(capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.constant(torch.ones(2)), out=g.output((2,))))
    g.data.clear()
    refused(g, 'constant 0 "?1"', capfd, g.payload().replace(b"c1\0", b"\xff1\0"))


def test_writes_to_constants_and_inputs_are_refused(capfd):
    g = Graph()
    x = g.input((1,))
    g.emit(ir.ExpNode(x=x, out=x))
    refused(g, "(ExpNode): out writes tensor slot 0, an input", capfd)


def test_chains_that_run_themselves_are_refused(capfd):
    g = Graph()
    g.emit(ir.IfNode(cond=lit(1), then_chain_idx=0, else_chain_idx=0))
    refused(g, "chain 0 runs itself", capfd)


def test_missing_constants_are_refused(capfd):
    g = Graph()
    g.emit(ir.ExpNode(x=g.constant(torch.ones(2)), out=g.output((2,))))
    g.data.clear()
    refused(g, 'constant 0 "c1" is not in the named data', capfd)


def test_calls_that_would_not_end_are_errors(capfd):
    """Scans inside scans: a billion instructions in a few kilobytes."""
    g = Graph()
    x, row = g.input((1000, 1)), g.temp()

    def scan(body):
        return ir.ScanNode(
            originals=[x], sliced=[row], outputs=[], carry=[], body_chain_idx=body, scan_axis=0
        )

    g.emit(scan(g.chain(scan(g.chain(*[ir.NoopNode()] * 1000)))))
    with pytest.raises(RuntimeError):
        g.run(torch.zeros(1000, 1))
    assert "instructions in one call" in capfd.readouterr().err


# -- threads ---------------------------------------------------------------------


def in_thread(work):
    result = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


def test_any_thread_may_load_and_run():
    g, args = decoder()
    pte = g.pte()
    model = in_thread(lambda: Model(pte))
    want = [x.clone() for x in in_thread(lambda: model(*args))]
    assert all(map(torch.equal, model(*args), want))


def test_many_programs_at_once():
    jobs = []
    for make in PROGRAMS.values():
        g, args = make()
        for _ in range(2):
            model = g.load()
            jobs.append((model, args, [x.clone() for x in model(*args)]))
    wrong = []

    def run(model, args, want):
        for _ in range(50):
            if not all(torch.equal(a, b) for a, b in zip(model(*args), want, strict=True)):
                wrong.append(model)

    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_unseeded_draws_in_new_threads_leave_no_threads():
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
    assert count() <= before + 1


def test_values_may_leave_the_program():
    g = Graph()
    x, size, double = g.input(((1, 9),)), g.value(), g.value()
    g.emit(
        ir.SymSizeNode(a=x, dim=0, out=size), ir.MultiplyIntNode(a=var(size), b=lit(2), out=double)
    )
    g.output_value(double)
    assert g.run(torch.zeros(4)) == [8]
