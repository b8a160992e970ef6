"""A program for inference and one for training that share a weights file, beside programs with their own weights."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import small_llm
import torch
from cpp_programs import build_project
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, Runtime, save_program
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM
from executorch_mlx.training import LoRA, TrainingProgram, export_training
from executorch_mlx.training.adapter import write_adapter
from executorch_mlx.weights_file import methods
from torch.nn import functional as F

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WEIGHTS = "app.ptd"  # as in docs/training.md
LENGTH, TARGETS = 12, ("q_proj", "v_proj", "down_proj")
PROMPT = [0, 5, 9, 300, 22]
TOKENS = torch.randint(0, small_llm.VOCABULARY, (1, LENGTH + 1), generator=torch.Generator().manual_seed(3))
BATCH = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous(), torch.ones(1, LENGTH)


def export(path, **options):
    return small_llm.export(path, adapters=1, lora_rank=4, outputs="both", **options)


def export_steps(path, **options):
    lora = LoRA(r=4, alpha=8, targets=TARGETS)
    save_program(export_training(small_llm.model(), lora=lora, length=LENGTH, **options), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`model.pte` and `train.pte` with a weights file, and `alone.pte` without one."""
    folder = tmp_path_factory.mktemp("weights")
    export(folder / "alone.pte")
    export(folder / "model.pte", weights_file=WEIGHTS)
    before = (folder / WEIGHTS).stat().st_size
    export_steps(folder / "train.pte", weights_file=WEIGHTS)
    assert (folder / WEIGHTS).stat().st_size < 1.2 * before  # the matrices of the embedding and the head are there
    return folder


@pytest.fixture
def programs(folder, tmp_path):
    """Copies of the programs without the weights file."""
    for name in ("model.pte", "train.pte"):
        shutil.copy(folder / name, tmp_path)
    return tmp_path


def tokens(llm, **options):
    return llm.generate(PROMPT, max_new_tokens=20, ignore_eos=True, **options).result().tokens


def test_programs_with_a_shared_weights_file_give_the_same_results(folder, tmp_path):
    weights = sum(p.nbytes for p in small_llm.model().parameters())
    assert (folder / "alone.pte").stat().st_size - (folder / "model.pte").stat().st_size > 0.9 * weights
    training = TrainingProgram(folder / "train.pte")
    with LLM.load(folder / "alone.pte") as alone, LLM.load(folder / "model.pte") as model:
        assert tokens(model) == tokens(alone)
        losses = [training.train_step(*BATCH, 1e-2, step) for step in range(1, 4)]
        write_adapter(tmp_path / "adapter", training, None)
        for llm in (alone, model):
            llm.load_adapter("trained", tmp_path / "adapter")
        assert tokens(model, adapter="trained") == tokens(alone, adapter="trained") != tokens(model)
    own = TrainingProgram(export_steps(tmp_path / "own.pte"))
    assert [own.train_step(*BATCH, 1e-2, step) for step in range(1, 4)] == losses


def test_a_trained_adapter_has_the_same_logits_in_peft(folder, tmp_path):
    """Compares log probabilities of the training program, of the adapter in peft, and of the adapter in an LLM."""
    from peft import PeftModel

    training = TrainingProgram(folder / "train.pte")
    for step in range(1, 9):
        training.train_step(*BATCH, 1e-2, step)
    write_adapter(tmp_path, training, None)
    inputs, targets, _ = BATCH
    with torch.no_grad():
        logits = PeftModel.from_pretrained(small_llm.model(), tmp_path).eval()(input_ids=inputs).logits
    expected = F.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).flatten()
    masks = torch.eye(LENGTH).split(1)
    actual = torch.tensor([-training.eval_loss(inputs, targets, mask.contiguous()) for mask in masks])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    with LLM.load(folder / "model.pte") as llm:
        llm.load_adapter("trained", tmp_path)
        text = TOKENS[0].tolist()
        (score,) = llm.score(text[:1], [text[1:]], adapter="trained")
        assert score.logprob == pytest.approx(expected.sum().item(), abs=1e-4 * LENGTH)
        assert llm.score(text[:1], [text[1:]])[0].logprob != pytest.approx(score.logprob, abs=1e-2)


def test_compact_removes_what_no_program_needs(folder, programs, capsys):
    weights = programs / WEIGHTS
    shutil.copy(folder / WEIGHTS, weights)
    shutil.copy(folder / "alone.pte", programs)
    assert main(["compact", str(weights)]) == 0
    assert weights.read_bytes() == (folder / WEIGHTS).read_bytes()
    assert "needed by model.pte, train.pte\n" in capsys.readouterr().out
    (programs / "train.pte").unlink()
    (programs / "model.pte").rename(programs / "model")
    assert main(["compact", str(weights)]) == 0
    assert "needed by model\n" in capsys.readouterr().out
    assert weights.stat().st_size < (folder / WEIGHTS).stat().st_size
    with LLM.load(folder / "alone.pte") as alone, LLM.load(programs / "model") as model:
        assert tokens(model) == tokens(alone)
    shutil.copy(folder / "train.pte", programs)
    with pytest.raises(RuntimeError, match="a data file .*is of another program"):
        TrainingProgram(programs / "train.pte").train_step(*BATCH, 1e-2, 1)
    export_steps(programs / "train.pte", weights_file=WEIGHTS)
    assert TrainingProgram(programs / "train.pte").train_step(*BATCH, 1e-2, 1) > 0
    assert {file.name for file in programs.iterdir()} == {"model", "train.pte", "alone.pte", WEIGHTS}


def test_compact_keeps_the_file_if_it_does_not_know_what_is_needed(folder, programs, capsys):
    weights = programs / WEIGHTS
    shutil.copy(folder / WEIGHTS, weights)
    contents = (programs / "model.pte").read_bytes()
    (programs / "model.pte").write_bytes(contents[: len(contents) // 2])
    assert main(["compact", str(weights)]) == 1
    assert "model.pte" in capsys.readouterr().err
    for name in ("model.pte", "train.pte"):
        (programs / name).unlink()
    assert main(["compact", str(weights)]) == 1
    assert "expected a program in its folder that needs it" in capsys.readouterr().err
    assert weights.read_bytes() == (folder / WEIGHTS).read_bytes()
    assert main(["compact", str(folder / "alone.pte")]) == 1
    assert "expected a data file of ExecuTorch" in capsys.readouterr().err
    assert main(["compact", str(programs / "missing.ptd")]) == 1


LOADED = """
import sys
from executorch_mlx.llm import LLM
with LLM.load(sys.argv[1]) as llm:
    llm.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True).result()
    print(flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_share_the_pages_of_a_weights_file(folder):
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", LOADED, folder / "model.pte"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        for process in begun:
            assert process.stdout.readline()
        size = (folder / WEIGHTS).stat().st_size
        for process in begun:
            memory = mapped(process.pid, WEIGHTS)
            assert memory["Rss"] > size / 2 / 1024
            assert memory["Private_Clean"] + memory["Private_Dirty"] == 0
    finally:
        for process in begun:
            process.communicate()


def mapped(pid, name):
    """Return the memory of a process that is mapped from a file of this name, in KiB, by kind."""
    sums, is_counted = Counter(), False
    with open(f"/proc/{pid}/smaps") as file:
        for words in map(str.split, file):
            if not words[0].endswith(":"):
                is_counted = words[-1].endswith(f"/{name}")
            elif is_counted and words[-1] == "kB":
                sums[words[0][:-1]] += int(words[1])
    return sums


def test_a_missing_weights_file_is_named(programs):
    with pytest.raises(FileNotFoundError, match=rf"model.pte: its weights file .*{WEIGHTS} is missing"):
        LLM.load(programs / "model.pte")
    with pytest.raises(FileNotFoundError, match=rf"train.pte: its weights file .*{WEIGHTS} is missing"):
        TrainingProgram(programs / "train.pte")
    with pytest.raises(ValueError, match=rf"data_path: the program in memory has its weights in {WEIGHTS}"):
        Runtime.get().load_program((programs / "train.pte").read_bytes())


def test_a_weights_file_of_another_program_is_refused(programs):
    other = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50))
    save_program(export_training(other, lora=None, length=4, weights_file=WEIGHTS), programs / "other.pte")
    with pytest.raises(ValueError, match="model.pte: .*its weights file is of another program"):
        LLM.load(programs / "model.pte")
    with pytest.raises(RuntimeError, match="a data file .*is of another program"):
        TrainingProgram(programs / "train.pte").eval_loss(*BATCH)


class Counts(torch.nn.Module):
    """Adds to a buffer of ones, by an operator that ExecuTorch's own MLX delegate lacks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("counts", torch.ones(2048))

    def forward(self, x):
        self.counts.add_(torch.erfinv(x))
        return self.counts.sum()


def test_a_weights_file_without_the_initial_value_of_a_buffer_is_refused(tmp_path):
    """The buffer would otherwise start from zero."""
    inputs = (torch.zeros(2048),)
    exported = torch.export.export(Counts(), inputs)
    partitioner = MLXPartitioner(weights_file=WEIGHTS, allow_extensions=True)
    options = {"compile_config": EdgeCompileConfig(_check_ir_validity=False), "constant_methods": methods(WEIGHTS)}
    lowered = to_edge_transform_and_lower(exported, partitioner=[partitioner], **options)
    save_program(lowered.to_executorch(), tmp_path / "counts.pte")
    assert Runtime.get().load_program(tmp_path / "counts.pte").load_method("forward").execute(inputs)[0] == 2048
    (tmp_path / WEIGHTS).unlink()
    export_steps(tmp_path / "train.pte", weights_file=WEIGHTS)
    with pytest.raises(RuntimeError, match="initial value of buffer .*counts.* a data file .*is of another program"):
        Runtime.get().load_program(tmp_path / "counts.pte").load_method("forward")


def test_a_file_that_is_no_weights_file_is_refused(programs):
    (programs / WEIGHTS).write_bytes(b"no weights" * 1000)
    with pytest.raises(ValueError, match=rf"{WEIGHTS}: not a weights file"):
        LLM.load(programs / "model.pte")
    with pytest.raises(RuntimeError):
        TrainingProgram(programs / "train.pte")
    with pytest.raises(ValueError, match=f"{WEIGHTS}: expected a data file of ExecuTorch"):
        export_steps(programs / "train.pte", weights_file=WEIGHTS)


@pytest.mark.parametrize("name", ["model.bin", "folder/model.ptd", ".ptd", "../model.ptd"])
def test_the_name_of_a_weights_file_is_checked(name, capsys):
    with pytest.raises(ValueError, match="expected the name of a .ptd file, without a folder"):
        export_training(small_llm.model(), weights_file=name)
    assert main(["export", "folder", "-o", "model.pte", "--weights-file", name]) != 0
    assert f"--weights-file: got {name}, expected the name of a .ptd file" in capsys.readouterr().err


def test_the_example_of_training_on_the_device(folder, tmp_path):
    """examples/personalize trains an adapter, goes on after a second start, and answers as `LLM` does."""
    for name, source in {"app.pte": "model.pte", "app-training.pte": "train.pte", WEIGHTS: WEIGHTS}.items():
        shutil.copy(folder / source, tmp_path / name)
    train = [build_project(EXAMPLES / "personalize", tmp_path / "build") / "personalize", tmp_path]
    text = TOKENS[0].tolist()

    def run(steps):
        command = [*train, steps, ",".join(map(str, text))]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        *lines, without, adapted = done.stdout.splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines], without, adapted

    losses = run(3)[0]
    more, without, adapted = run(2)
    training = TrainingProgram(folder / "train.pte")
    assert losses + more == pytest.approx([training.train_step(*BATCH, 1e-3, step) for step in range(1, 6)], rel=1e-4)
    write_adapter(tmp_path / "adapter", training, None)
    with LLM.load(folder / "model.pte") as llm:
        llm.load_adapter("trained", tmp_path / "adapter")
        for name, printed in ((None, without), ("trained", adapted)):
            answer = llm.generate(text[:1], max_new_tokens=8, adapter=name).result().tokens
            assert list(map(int, printed.partition(":")[2].split())) == answer
    (tmp_path / "adapter.state").write_bytes(b"damaged")
    done = subprocess.run(list(map(str, [*train, 1, "1,2"])), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "adapter.state: is of another training program" in done.stderr
