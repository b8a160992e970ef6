"""A profiled call: the events that ExecuTorch's Inspector reads, and unchanged results."""

import pytest
import torch
from executorch.devtools import Inspector
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime
from executorch_mlx.serialization.infer_types import infer_types
from irprograms import Graph, ir, lit
from irprograms.examples import decoder
from loaded_method import LoadedMethod


def run_profiled(pte: bytes, calls: list[list], folder):
    """Return the outputs of each call, and the events of the MLX instructions."""
    program = Runtime.get().load_program(pte, enable_etdump=True, debug_buffer_size=0)
    method = program.load_method("forward")
    outputs = [[x.clone() for x in method.execute(inputs)] for inputs in calls]
    program.write_etdump_result_to_file(str(folder / "dump.etdp"), str(folder / "debug.bin"))
    return outputs, instruction_events(folder / "dump.etdp")


def instruction_events(path) -> list:
    blocks = Inspector(etdump_path=str(path)).event_blocks
    return [event for block in blocks for event in block.events if event.is_delegated_op]


def run_plain(pte: bytes, calls: list[list]):
    method = LoadedMethod(pte)
    return [[x.clone() for x in method.execute(inputs)] for inputs in calls]


def metadata(event) -> str:
    return event._delegate_debug_metadatas[0].decode()


def counter() -> Graph:
    """A program that adds its input to a buffer in place and returns exp(buffer)."""
    g = Graph()
    x, y, total = g.input((2, 3)), g.output((2, 3)), g.buffer((2, 3))
    g.emit(ir.AddNode(a=total, b=x, out=(t := g.new_temp())))
    update = {"dst": total, "update": t, "out": total}
    g.emit(ir.SliceUpdateNode(**update, axis=lit(0), start=lit(0), stop=lit(2)))
    g.emit(ir.ExpNode(x=total, out=y))
    return g


def test_every_instruction_has_an_event(delegate, tmp_path):
    calls = [[torch.full((2, 3), 0.1 * i)] for i in range(3)]
    pte = counter().pte()
    outputs, events = run_profiled(pte, calls, tmp_path)
    assert [e.name for e in events] == ["0.0 AddNode", "0.1 SliceUpdateNode", "0.2 ExpNode"]
    assert all(len(e.perf_data.raw) == 3 and min(e.perf_data.raw) >= 0 for e in events)
    assert "a=%2 float32[2,3]" in metadata(events[0]) and metadata(events[0]).endswith("-> %3 float32[2,3]")
    assert metadata(events[2]) == "x=%2 float32[2,3] -> %1 float32[2,3]"
    for profiled, plain in zip(outputs, run_plain(pte, calls), strict=True):
        assert torch.equal(profiled[0], plain[0])


def test_time_belongs_to_the_instruction(delegate, tmp_path):
    """A product takes longer than a reshape. The times of all instructions add up to less than the time of the call."""
    g = Graph()
    x, y = g.input((700, 700)), g.output((700, 700))
    g.emit(ir.AddmmNode(mat1=x, mat2=x, out=(a := g.new_temp())), ir.AddmmNode(mat1=a, mat2=x, out=(b := g.new_temp())))
    g.emit(ir.ReshapeNode(x=b, out=y, shape=[lit(700), lit(700)]))
    program = Runtime.get().load_program(g.pte(), enable_etdump=True, debug_buffer_size=0)
    method = program.load_method("forward")
    for _ in range(5):
        method.execute([torch.randn(700, 700)])
    program.write_etdump_result_to_file(str(tmp_path / "dump.etdp"), str(tmp_path / "debug.bin"))
    events = {e.name: e for b in Inspector(etdump_path=str(tmp_path / "dump.etdp")).event_blocks for e in b.events}
    instructions = [events[name].perf_data.raw for name in ("0.0 AddmmNode", "0.1 AddmmNode", "0.2 ReshapeNode")]
    first, second, reshape = map(min, instructions)
    assert min(first, second) > 3 * reshape
    calls = events["DELEGATE_CALL"].perf_data.raw
    assert len(calls) == 5
    assert all(sum(times) <= call for *times, call in zip(*instructions, calls, strict=True))


def test_branches_and_iterations_have_events(delegate, tmp_path):
    g = Graph()
    x, flag, y = g.input((2, 3)), g.input((1,), torch.int32), g.output((2, 3))
    cond, t, part, out = g.new_value(), g.new_temp(), g.new_temp(), g.new_temp()
    then = g.chain(ir.ExpNode(x=x, out=t))
    other = g.chain(ir.SinNode(x=x, out=t))
    body = g.chain(ir.SquareNode(x=part, out=out))
    g.emit(
        ir.ItemIntNode(x=flag, out=cond),
        ir.IfNode(cond=ir.IntOrVid(vid=cond, is_vid=True), then_chain_idx=then, else_chain_idx=other),
        ir.ScanNode(originals=[t], sliced=[part], outputs=[out], carry=[], body_chain_idx=body, scan_axis=1),
        ir.IdCopyNode(x=out, out=y),
    )
    x = torch.rand(2, 3)
    calls = [[x, torch.tensor([1], dtype=torch.int32)], [x, torch.tensor([0], dtype=torch.int32)]]
    outputs, events = run_profiled(g.pte(), calls, tmp_path)
    names = [e.name for e in events]
    assert {"1.0 ExpNode", "2.0 SinNode", "0.1 IfNode", "0.2 ScanNode"} <= set(names)
    iterations = {"3.0 SquareNode", "3.0 SquareNode #1", "3.0 SquareNode #2"}
    assert {name for name in names if "SquareNode" in name} == iterations
    torch.testing.assert_close([o[0] for o in outputs], [x.exp() ** 2, x.sin() ** 2])


def test_events_of_two_delegates_in_a_method(delegate, tmp_path):
    class Mixed(torch.nn.Module):
        def forward(self, x):
            return (x.exp() + 1).double().cumsum(0).float().exp()

    edge = to_edge_transform_and_lower(torch.export.export(Mixed(), (torch.rand(3),)), partitioner=[MLXPartitioner()])
    _, events = run_profiled(edge.to_executorch().buffer, [[torch.rand(3)]], tmp_path)
    assert [e.name for e in events] == ["0.0 ExpNode", "0.1 AddNode", "0.0 ExpNode"]


def test_profiling_does_not_change_results(delegate, tmp_path):
    g = decoder()[0]
    calls = []
    for position in range(4):
        token = torch.tensor([3 + position], dtype=torch.int32)
        calls.append([token, torch.tensor([position], dtype=torch.int32), torch.tensor([0.0])])
    pte = g.pte()
    outputs, events = run_profiled(pte, calls, tmp_path)
    for profiled, plain in zip(outputs, run_plain(pte, calls), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(profiled, plain, strict=True))
    names = {e.name for e in events}
    listed = [typed.instruction for typed in infer_types(g.graph())]
    assert names >= {f"0.{i.index} {i.op}Node" for i in listed if i.chain == 0}


def test_an_error_names_the_instruction(delegate, tmp_path, capfd):
    g = Graph()
    x, i, y = g.input((2, 3)), g.input((1,), torch.int32), g.output((1, 3))
    g.emit(ir.TakeNode(x=x, index=ir.IntOrVidOrTid(kind=2, tid=i), out=y, axis=0))
    with pytest.raises(RuntimeError):
        run_profiled(g.pte(), [[torch.rand(2, 3), torch.tensor([7], dtype=torch.int32)]], tmp_path)
    assert "instruction 0 (TakeNode): index 7" in capfd.readouterr().err
