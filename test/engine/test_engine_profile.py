"""Profiles of mlx_llm_runner and op_test_runner, read by ExecuTorch's Inspector."""

import subprocess

import pytest
from cpp_programs import find_program
from executorch.devtools import Inspector


def delegated_events(path) -> list:
    blocks = Inspector(etdump_path=str(path)).event_blocks
    return [event for block in blocks for event in block.events if event.is_delegated_op]


def calls_in_profile(llm, path) -> int:
    """Write a profile and return the number of calls of methods in it."""
    try:
        llm.program.write_profile(path)
    except RuntimeError as error:
        assert "no method ran" in str(error)
        return 0
    events = [event for block in Inspector(etdump_path=str(path)).event_blocks for event in block.events]
    return sum(len(event.perf_data.raw) for event in events if event.name == "Method::execute")


def test_unwritable_profile_is_an_error(run, successor, tmp_path):
    profile = tmp_path / "no" / "such.etdp"
    done = run(successor, "--prompt-ids", "10", "--profile", profile, "--max-new-tokens", "1", "--ids")
    assert done.code == 1 and "such.etdp: cannot write the file" in done.stderr


def test_profiles_beside_a_running_request(successor, tmp_path):
    """Profile can be written while a request runs, also after one that could not be written."""
    from executorch_mlx import LLM

    with LLM.load(successor, profile=True) as llm:
        with pytest.raises(OSError):
            llm.program.write_profile(tmp_path / "no" / "such.etdp")
        answer = llm.generate([10], max_new_tokens=300, ignore_eos=True, draft=0)
        calls = sum(calls_in_profile(llm, tmp_path / "part.etdp") for _ in range(20))
        answer.result()
        calls += calls_in_profile(llm, tmp_path / "part.etdp")
    assert calls == 300  # the call for the prompt returns the first token


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
