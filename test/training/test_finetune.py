"""A training program against peft and torch's AdamW, its state, and fine-tuning that is interrupted."""

import json
import os
import subprocess
from pathlib import Path

import executorch
import pytest
import small_llm
import torch
from compile_cpp import compile_cpp
from executorch_mlx.cli.main import main
from executorch_mlx.training import AdamW, LoRA, TrainingProgram, export_training, finetune
from executorch_mlx.training.adapter import write_adapter
from safetensors.torch import load_file
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("EXECUTORCH_MLX_BUILD", ROOT / "build"))
BATCH, LENGTH, STEPS = 2, 12, 6
LR = 1e-2
TARGETS = ("q_proj", "v_proj", "down_proj")
OPTIONS = {"length": LENGTH, "batch": BATCH, "lr": LR, "targets": TARGETS, "dropout": 0.1, "save_every": 2}


def batches():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, small_llm.VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=generator)
    masks = torch.rand(STEPS, BATCH, LENGTH, generator=generator) < 0.7
    return [(r[:, :-1].contiguous(), r[:, 1:].contiguous(), m.float()) for r, m in zip(rows, masks)]


def loss_of(model, tokens, targets, mask):
    losses = F.cross_entropy(model(input_ids=tokens).logits.transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum() / mask.sum()


def peft_model(program: TrainingProgram, folder):
    """Return peft's form of the model with the initial adapter of `program`."""
    from peft import PeftModel

    write_adapter(folder, program, None)
    return PeftModel.from_pretrained(small_llm.model(), folder, is_trainable=True)


@pytest.fixture(scope="module")
def pte(tmp_path_factory):
    """A program with accumulation, gradient checkpointing, weight decay and clipping."""
    path = tmp_path_factory.mktemp("training") / "training.pte"
    model = small_llm.model()
    program = export_training(
        model,
        lora=LoRA(r=4, alpha=8, targets=TARGETS),
        optimizer=AdamW(weight_decay=0.1, max_norm=0.5),
        batch=BATCH,
        length=LENGTH,
        accumulate=True,
        checkpoint_layers=model.model.layers,
    )
    path.write_bytes(program.buffer)
    return path


def test_steps_equal_those_of_peft_and_torch(pte, tmp_path):
    program = TrainingProgram(pte)
    model = peft_model(program, tmp_path)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)
    for step, batch in enumerate(batches(), 1):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        assert program.train_step(*batch, LR, step) == pytest.approx(loss.item(), abs=1e-4)
    with torch.no_grad():
        assert program.eval_loss(*batch) == pytest.approx(loss_of(model, *batch).item(), abs=1e-4)
    write_adapter(tmp_path, program, None)
    from peft import PeftModel

    with torch.no_grad():
        expected = model(batch[0]).logits
        actual = PeftModel.from_pretrained(small_llm.model(), tmp_path)(batch[0]).logits
    assert (actual - expected).abs().max() < 1e-3


def test_accumulated_batches_equal_one_batch(pte):
    one, two = TrainingProgram(pte), TrainingProgram(pte)
    tokens, targets, mask = batches()[0]
    one.train_step(tokens, targets, mask, LR, 1)
    for row in range(BATCH):
        part = torch.zeros_like(mask)
        part[row] = mask[row]
        two.accumulate(tokens, targets, part, row + 1)
    two.apply(LR, 1)
    for a, b in zip(one.state().values(), two.state().values()):
        assert (a - b).abs().max() < 1e-5


def test_state_is_saved_and_restored(pte, tmp_path):
    path, first = tmp_path / "state.safetensors", TrainingProgram(pte)
    first.train_step(*batches()[0], LR, 1)
    first.save_state(path, {"step": 1})
    second = TrainingProgram(pte)
    assert second.load_state(path) == {"step": 1}
    losses = [program.train_step(*batches()[1], LR, 2) for program in (first, second)]
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(first.state().values(), second.state().values()))


def test_a_damaged_state_and_that_of_another_program_are_refused(pte, tmp_path):
    path, program = tmp_path / "state.safetensors", TrainingProgram(pte)
    program.save_state(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="the checksum is wrong"):
        program.load_state(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="expected a state of a training program"):
        program.load_state(path)
    other = tmp_path / "other.pte"
    other.write_bytes(pte.read_bytes() + b"\0")
    program.save_state(path)
    with pytest.raises(ValueError, match="another program"):
        TrainingProgram(other).load_state(path)


# -- fine-tuning --------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and training data."""
    folder = tmp_path_factory.mktemp("model")
    small_llm.model().save_pretrained(folder)
    small_llm.tokenizer(None).save_pretrained(folder)
    lines = [{"prompt": f"Number {i} is", "completion": f" followed by {i + 1}, and so on"} for i in range(16)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


class Killed(Exception):
    pass


def test_an_interrupted_training_ends_with_the_same_weights(folder, tmp_path):
    def kill_at(step):
        def progress(line):
            if line.startswith(f"step {step}/"):
                raise Killed

        return progress

    def train(output, progress=lambda line: None, **options):
        return finetune(folder, folder / "data.jsonl", output, progress=progress, **OPTIONS | options)

    whole = train(tmp_path / "whole")
    assert whole.step == 8 and whole.rows[-1][2] is None
    for step in (1, 4, 7):
        with pytest.raises(Killed):
            train(tmp_path / "killed", kill_at(step))
    with pytest.raises(ValueError, match="an interrupted training with other arguments"):
        train(tmp_path / "killed", lr=0.5)
    resumed = train(tmp_path / "killed")
    assert [row[:5] for row in resumed.rows] == [row[:5] for row in whole.rows]
    adapters = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert adapters[0] == adapters[1]
    assert not (tmp_path / "killed" / ".training").exists()
    assert len((tmp_path / "killed" / "training.csv").read_text().splitlines()) == 9
    assert (tmp_path / "killed" / "training.png").read_bytes().startswith(b"\x89PNG")


def test_command(folder, tmp_path, capsys):
    arguments = ["--length", "12", "--targets", "q_proj", "o_proj", "--quantize", "int8", "--validation", "0.25"]
    arguments += ["--steps", "4", "--evaluate-every", "1", "--patience", "2", "--lr", "10", "--checkpoint"]
    assert main(["finetune", str(folder), str(folder / "data.jsonl"), "-o", str(tmp_path / "a"), *arguments]) == 0
    shown = capsys.readouterr()
    assert "adapter after" in shown.out and "validation" in shown.err
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["r"] == 8 and config["target_modules"][0].endswith("o_proj")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(tensors) == 4 and all(name.startswith("base_model.model.model.layers.0.") for name in tensors)


def test_command_reports_errors(folder, tmp_path, capsys):
    data = str(folder / "data.jsonl")
    assert main(["finetune", str(folder), data, "-o", str(tmp_path), "--schedule", "linear"]) == 1
    assert "schedule: got 'linear', expected one of constant, cosine" in capsys.readouterr().err


def test_the_example_in_cpp(pte, tmp_path):
    site = Path(executorch.__path__[0])
    libraries = [BUILD / "libmlx_delegate.so", BUILD / "libmlx_cpu_kernels.so"]
    libraries += [site / "lib" / f"lib{n}.so" for n in ("executorch", "executorch_kernels_optimized")]
    libraries += [site / "lib" / "libexecutorch_threadpool.so"]
    train = compile_cpp(
        tmp_path / "train",
        *("-DC10_USING_CUSTOM_GENERATED_MACROS", ROOT / "examples" / "cpp" / "train.cpp"),
        *(f"-I{path}" for path in (ROOT / "backends/mlx/runtime/include", site / "include")),
        f"-I{site / 'include/executorch/runtime/core/portable_type/c10'}",
        *("-Wl,--no-as-needed,--unresolved-symbols=ignore-in-shared-libs", *libraries),
        *(f"-Wl,-rpath,{path}" for path in (BUILD, site / "lib", site.parent / "mlx" / "lib")),
    )
    done = subprocess.run([train, pte, str(BATCH), str(LENGTH), "3"], capture_output=True, text=True, check=True)
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
