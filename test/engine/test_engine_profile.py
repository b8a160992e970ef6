"""Profiles of mlx_llm_runner and op_test_runner, read by ExecuTorch's Inspector."""

import subprocess

from executorch.devtools import Inspector
from llm_runner import find_program


def delegated_events(path) -> list:
    blocks = Inspector(etdump_path=str(path)).event_blocks
    return [event for block in blocks for event in block.events if event.is_delegated_op]


def test_unwritable_profile_is_an_error(run, successor, tmp_path):
    profile = tmp_path / "no" / "such.etdp"
    done = run(successor, "--prompt-ids", "10", "--profile", profile, "--max-new-tokens", "1", "--ids")
    assert done.code == 1 and "such.etdp: cannot write the file" in done.stderr


def test_op_test_runner_records_each_call(tmp_path):
    import torch
    from irprograms import Graph, ir

    g = Graph()
    x, y = g.input((2, 3)), g.output((2, 3))
    g.emit(ir.ExpNode(x=x, out=y))
    (tmp_path / "model.pte").write_bytes(g.pte())
    values = torch.rand(2, 3)
    header = b"MLXTNSR\0" + (6).to_bytes(4, "little") + (2).to_bytes(4, "little")
    sizes = b"".join(n.to_bytes(8, "little") for n in (2, 3))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.tensor").write_bytes(header + sizes + values.numpy().tobytes())
    command = [find_program("op_test_runner"), tmp_path / "model.pte", "--outputs", tmp_path / "out"]
    command += ["--inputs", tmp_path / "in", "--inputs", tmp_path / "in", "--profile", tmp_path / "run.etdp"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=60)
    (event,) = delegated_events(tmp_path / "run.etdp")
    assert event.name == "0.0 ExpNode" and len(event.perf_data.raw) == 2
