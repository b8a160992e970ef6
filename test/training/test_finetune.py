"""A training program against peft and torch's AdamW, its state, and fine-tuning that is interrupted."""

import json
import resource

import numpy
import pytest
import small_llm
import torch
from executorch_mlx.cli.main import main
from executorch_mlx.training import AdamW, LoRA, TrainingProgram, export_training, finetune
from executorch_mlx.training.adapter import write_adapter
from executorch_mlx.training.program import write_whole
from safetensors.torch import load_file
from torch.nn import functional as F

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


def killed_at(step):
    def progress(line):
        if line.startswith(f"step {step}/"):
            raise Killed

    return progress


def test_an_interrupted_training_ends_with_the_same_weights(folder, tmp_path):
    def train(output, progress=lambda line: None, **options):
        return finetune(folder, folder / "data.jsonl", output, progress=progress, **OPTIONS | options)

    whole = train(tmp_path / "whole")
    assert whole.step == 8 and whole.rows[-1][2] is None
    for step in (1, 4, 7):
        with pytest.raises(Killed):
            train(tmp_path / "killed", killed_at(step))
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


def test_a_failed_command_leaves_nothing_that_stops_the_next_one(folder, tmp_path, capsys):
    command = ["finetune", str(folder), str(folder / "data.jsonl"), "-o", str(tmp_path / "a"), "--length", "12"]
    assert main([*command, "--targets", "q_prj"]) == 1
    assert "targets: got q_prj, expected patterns of " in capsys.readouterr().err
    with pytest.raises(Killed):
        finetune(folder, folder / "data.jsonl", tmp_path / "a", progress=killed_at(1), **OPTIONS)  # before a save
    assert main([*command, "--steps", "1", "--targets", "q_proj"]) == 0


@pytest.mark.parametrize(
    "option, expected",
    [
        ({"steps": -1}, "steps: got -1, expected at least 0"),
        ({"r": 0}, "r: got 0, expected at least 1"),
        ({"epochs": 0}, "epochs: got 0, expected a number above 0"),
        ({"lr": float("nan")}, "lr: got nan, expected a number above 0"),
        ({"warmup": -1}, "warmup: got -1, expected at least 0"),
        ({"dropout": 1.0}, "dropout: got 1.0, expected 0 up to 1, exclusive"),
        ({"patience": 2, "validation": 0}, "patience: expected examples for validation"),
        ({"quantize": "int3"}, "quantize: got 'int3', expected one of none, int4, int8"),
    ],
)
def test_invalid_options_are_named(folder, tmp_path, option, expected):
    with pytest.raises(ValueError, match=f"finetune: {expected}"):
        finetune(folder, folder / "data.jsonl", tmp_path / "a", **option)
    assert not (tmp_path / "a").exists()


def test_a_loss_that_is_no_number_ends_the_training(folder, tmp_path):
    options = OPTIONS | {"lr": 1e39, "schedule": "constant", "max_norm": None}
    with pytest.raises(ValueError, match="the loss of step . is nan; use a lower lr"):
        finetune(folder, folder / "data.jsonl", tmp_path, **options)
    assert not (tmp_path / "adapter_config.json").exists()


def test_a_file_that_cannot_be_written_whole_keeps_its_content(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full disk
    try:
        with pytest.raises(OSError) as error:
            write_whole(tmp_path / "file", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(tmp_path / "file")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"old")]


def test_mlx_lm_loads_the_adapter(pte, tmp_path):
    mlx_lm = pytest.importorskip("mlx_lm")
    import mlx.core as mx

    program = TrainingProgram(pte)
    for step, batch in enumerate(batches(), 1):
        program.train_step(*batch, LR, step)
    small_llm.model().save_pretrained(tmp_path / "model")
    small_llm.tokenizer(None).save_pretrained(tmp_path / "model")
    write_adapter(tmp_path / "adapter", program, None)
    model, _ = mlx_lm.load(str(tmp_path / "model"), adapter_path=str(tmp_path / "adapter"))
    tokens, targets, mask = batches()[0]
    logits = torch.from_numpy(numpy.array(model(mx.array(tokens.numpy())).astype(mx.float32)))
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    assert program.eval_loss(tokens, targets, mask) == pytest.approx(
        ((losses * mask).sum() / mask.sum()).item(), abs=1e-3
    )
