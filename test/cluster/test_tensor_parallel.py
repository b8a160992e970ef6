"""A model in several parts, each in a process of its own, gives the tokens of the whole model."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from executorch_mlx import LLM
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.processes import _environments, _free_ports, _processors, find_parts, part_path, read_hosts
from oprows.runner import BUILD
from tensor_parallel_models import model

import group_answers

SCRIPT = Path(group_answers.__file__)
RUNNER = BUILD / "mlx_llm_runner"
TIMEOUT = 600  # in seconds: far more than a test takes


def export(path, parts, quantize, batch):
    exported = export_llm(
        model("llama", 4, 2), quantize=quantize, max_context_len=128, chunk=32, batch=batch, tensor_parallel=parts,
        speculation=False, allow_extensions=True, verify=parts > 1,
    )  # fmt: skip
    exported.save(path)
    return exported


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with whole.pte and with the two parts of model.pte, and the exported parts.

    Both programs are float32 and have two rows.
    """
    folder = tmp_path_factory.mktemp("pair")
    export(folder / "whole.pte", 1, "none", 2)
    exported = export(folder / "model.pte", 2, "none", 2)
    return folder, exported


def run(path, *arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, path, *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT
    )


def tokens_of(path, *arguments):
    finished = run(path, *arguments)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_two_processes_give_the_tokens_of_one(pair):
    folder, exported = pair
    with LLM.load(folder / "whole.pte") as llm:
        expected = group_answers.answers(llm)
    assert tokens_of(folder / "model.pte", 2) == expected
    assert len(set(map(tuple, expected))) == len(expected)
    assert not exported.whole
    whole = (folder / "whole.pte").stat().st_size
    assert part_path(folder / "model.pte", 1, 2).stat().st_size < 0.75 * whole


def test_a_process_can_load_one_model_in_parts(pair):
    """After `close`, too. A program that the process starts does not inherit the rank that the process had."""
    code = """
import os, sys
from executorch_mlx import LLM
path, hosts, before = sys.argv[1], ["localhost"] * 2, set(os.environ)
LLM.load(path, hosts=hosts).close()
print(set(os.environ) - before - {"OMP_NUM_THREADS"})
for again in (hosts, None):
    try:
        LLM.load(path, hosts=again)
    except ValueError as error:
        print(error)
"""
    folder, _ = pair
    finished = subprocess.run(
        [sys.executable, "-c", code, folder / "model.pte"], capture_output=True, text=True, timeout=TIMEOUT
    )
    message = "model.pte: this process has started a group of processes before, and can be in one only\n"
    assert finished.stdout == "set()\n" + 2 * message, finished.stderr


def test_four_processes_share_two_key_heads_of_a_quantized_model(tmp_path):
    export(tmp_path / "whole.pte", 1, "int4", 1)
    export(tmp_path / "model.pte", 4, "int4", 1)
    with LLM.load(tmp_path / "whole.pte") as llm:
        expected = group_answers.answers(llm)
    assert tokens_of(tmp_path / "model.pte", 4) == expected


def test_a_part_outside_of_its_group_is_refused(pair):
    folder, _ = pair
    part = part_path(folder / "model.pte", 1, 2)
    for path in (part, folder / "model.pte"):
        with pytest.raises(ValueError, match="model.pte is a model in 2 parts, expected 2 hosts"):
            LLM.load(path)
    with pytest.raises(ValueError, match="hosts: got 3 for model.pte, expected 2"):
        LLM.load(folder / "model.pte", hosts=["localhost"] * 3)
    with pytest.raises(ValueError, match="whole.pte is a model in one part"):
        LLM.load(folder / "whole.pte", hosts=["localhost"] * 2)
    command = [RUNNER, part, "--ids", "--prompt-ids", "2"]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert alone.returncode == 2
    assert "part 1 of a model for 2 processes, but this process is alone" in alone.stderr


def test_parts_that_do_not_belong_together_are_refused(pair, tmp_path):
    folder, exported = pair
    first, second = (part_path(tmp_path / "model.pte", rank, 2) for rank in (0, 1))
    shutil.copy(part_path(folder / "model.pte", 0, 2), first)
    shutil.copy(first, second)
    twice = run(tmp_path / "model.pte", 2)
    assert twice.returncode == 1
    assert "process 1 has part 0 of the model, expected part 1" in twice.stderr
    # The id of the export is stored as an integer of 64 bits.
    content = part_path(folder / "model.pte", 1, 2).read_bytes()
    old = exported.metadata["tensor_parallel_export"].to_bytes(8, "little")
    assert old in content
    second.write_bytes(content.replace(old, (1).to_bytes(8, "little")))
    foreign = run(tmp_path / "model.pte", 2)
    assert foreign.returncode == 1
    assert "process 1 has a part of another export than process 0" in foreign.stderr


def test_a_dead_process_ends_the_run_with_an_error(pair):
    dead = run(pair[0] / "model.pte", 2, "kill")
    assert dead.returncode == 1
    assert "process 1" in dead.stderr and "ended" in dead.stderr


def test_the_others_end_when_process_0_is_killed(pair):
    process = subprocess.Popen(
        [sys.executable, SCRIPT, pair[0] / "model.pte", "2", "wait"], stdout=subprocess.PIPE, text=True
    )
    (other,) = json.loads(process.stdout.readline())
    # `other` is not a child of this process, so this process cannot wait for it. A pidfd becomes readable when its
    # process ends.
    handle = os.pidfd_open(other)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert select.select([handle], [], [], TIMEOUT)[0]
    os.close(handle)
    process.stdout.close()


def test_processes_that_a_launcher_has_started(pair):
    folder, _ = pair
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(2)]))
    arguments = ["--ids", "--prompt-ids", "9,8,7", "--max-new-tokens", "20", "--ignore-eos"]

    def start(rank):
        environment = os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile), "OMP_NUM_THREADS": "1"}
        command = [RUNNER, part_path(folder / "model.pte", rank, 2), *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    processes = [start(rank) for rank in (0, 1)]
    (output, errors), (nothing, other_errors) = (process.communicate(timeout=TIMEOUT) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], errors + other_errors
    with LLM.load(folder / "whole.pte") as llm:
        expected = llm.generate([9, 8, 7], max_new_tokens=20, ignore_eos=True).result().tokens
    assert [int(token) for token in output.split()] == expected
    assert not nothing


def test_hosts(tmp_path):
    assert read_hosts("a,b , c") == ["a", "b", "c"]
    plain = tmp_path / "hosts"
    plain.write_text("a\n\n# another\n  # and another\nb\n")
    assert read_hosts(str(plain)) == ["a", "b"]
    plain.write_text('[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "b"}]')
    assert read_hosts(str(plain)) == ["10.0.0.1", "b"]
    plain.write_text("[1]")
    with pytest.raises(ValueError, match="expected a hostfile"):
        read_hosts(str(plain))


def test_processes_on_one_machine_share_it(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    hosts = ["localhost", "127.0.0.1"]
    threads = str(max(1, _processors() // 2))
    assert [each["OMP_NUM_THREADS"] for each in _environments(hosts, uses_nccl=False)] == [threads] * 2
    assert [each["CUDA_VISIBLE_DEVICES"] for each in _environments(hosts, uses_nccl=True)] == ["5", "7"]
    with pytest.raises(
        ValueError, match="hosts: got 3 processes for this machine, expected at most 2, the number of GPUs"
    ):
        _environments([*hosts, "localhost"], uses_nccl=True)


@pytest.mark.parametrize("name", ["model.pte", "model[1].pte"])
def test_names_of_parts(name, tmp_path):
    path = tmp_path / name
    assert find_parts(path) is None
    assert part_path(path, 1, 2).name == f"{path.stem}-1-of-2.pte"
    part_path(path, 0, 2).touch()
    assert find_parts(path) == find_parts(part_path(path, 1, 2)) == (path, 2)
    part_path(path, 0, 4).touch()
    with pytest.raises(ValueError, match="several numbers of processes"):
        find_parts(path)
    path.touch()
    assert find_parts(path) is None
