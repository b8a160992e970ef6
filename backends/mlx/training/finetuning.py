"""`finetune`: trains an adapter of a language model on a file of examples, and can be interrupted at any moment."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .adapter import write_adapter
from .data import Batches, Example, read_examples
from .export import export_training
from .lora import LoRA
from .optimizer import SCHEDULES, AdamW
from .options import FinetuneOptions
from .plot import line_chart
from .program import TrainingProgram, replacing, write_whole

SETTINGS_FILE, STATE_FILE = "settings.json", "state.safetensors"
_COLUMNS = ("step", "loss", "validation", "lr", "tokens", "tokens_per_second")


@dataclass
class Progress:
    """What a training has done. It is saved with the state, so that a resumed training goes on from there.

    `rows` has the step, the loss, the validation loss or None, the learning rate, the number of learned tokens, and the
    tokens per second of each step. `best` is the lowest validation loss, and `worse` the number of validations since.
    """

    rows: list[list[float | None]] = field(default_factory=list)
    best: float = math.inf
    worse: int = 0

    @property
    def step(self) -> int:
        return len(self.rows)


def finetune(
    model: str | Path,
    data: str | Path,
    output: str | Path,
    *,
    validation_data: str | Path | None = None,
    progress: Callable[[str], Any] = lambda line: None,
    **options: Any,
) -> Progress:
    """Train an adapter of `model` on `data`, and write it to the folder `output` in peft's format.

    `model` is a checkpoint folder, a GGUF file or a hub id. `data` is a `.jsonl` file as `read_examples` reads it, or a
    folder with `train.jsonl` and optionally `valid.jsonl`. `options` are the fields of `FinetuneOptions`. The folder
    also gets `training.csv` and `training.png`, the losses of all steps.

    A call with the same arguments resumes a training that was interrupted, and ends with the same bits as if nothing
    had happened. `progress` is called with each line for people.

    Raises ValueError for invalid arguments, if `output` has an interrupted training with other arguments, and if the
    loss is no longer a number.
    """
    settings, output = FinetuneOptions(**options), Path(output)
    train, validation = _files(Path(data), validation_data)
    checkpoint, tokenizer = _opened(model)
    batches, held_out = _batches(train, validation, tokenizer, settings)
    if settings.patience and held_out is None:
        raise ValueError("finetune: patience: expected examples for validation; use validation or validation_data")
    work, description = output / ".training", _description(model, train, validation, settings)
    if _is_new(work, description):
        progress("export the training step")
        _export(checkpoint, settings, work / "program.pte")
        write_whole(work / SETTINGS_FILE, description)
    steps = settings.steps or max(1, round(batches.per_epoch * settings.epochs / settings.accumulate))
    program = TrainingProgram(work / "program.pte")
    training = _Training(program, settings, steps, batches, held_out, work, progress)
    training.run()
    write_adapter(output, program, str(model))
    _write_losses(output, training.done)
    _discard(work)
    return training.done


class _Training:
    """The loop over the steps of one training."""

    def __init__(
        self,
        program: TrainingProgram,
        settings: FinetuneOptions,
        steps: int,
        batches: Batches,
        held_out: Batches | None,
        work: Path,
        progress: Callable[[str], Any],
    ):
        self.program, self.settings, self.steps = program, settings, steps
        self.batches, self.held_out, self.progress = batches, held_out, progress
        self.state, self.best = work / STATE_FILE, work / "best.safetensors"
        self.schedule = SCHEDULES[settings.schedule](settings.lr, steps, settings.warmup)
        self.done = Progress()
        if self.state.exists():
            self.done = Progress(**program.load_state(self.state))
            progress(f"resume after step {self.done.step}")

    def run(self) -> None:
        settings = self.settings
        while self.done.step < self.steps and not self._has_stopped():
            step = self.done.step + 1
            started = time.perf_counter()
            loss, tokens = self._update(step)
            if not math.isfinite(loss):
                raise ValueError(f"finetune: the loss of step {step} is {loss}; use a lower lr or a lower max_norm")
            rate = tokens / (time.perf_counter() - started)
            is_last = step == self.steps
            validation = None
            if self.held_out and (is_last or step % settings.evaluate_every == 0):
                validation = self._validate()
            self.done.rows.append([step, loss, validation, self.schedule(step), tokens, rate])
            noted = "" if validation is None else f", validation {validation:.4f}"
            self.progress(f"step {step}/{self.steps}: loss {loss:.4f}{noted}, {rate:.0f} tokens/s")
            if is_last or step % settings.save_every == 0 or self._has_stopped():
                self.program.save_state(self.state, asdict(self.done))
        if settings.patience and self.best.exists():
            self.program.load_state(self.best)

    def _has_stopped(self) -> bool:
        return 0 < self.settings.patience <= self.done.worse

    def _update(self, step: int) -> tuple[float, int]:
        """Update the parameters. Returns the mean loss of the learned tokens, and their number."""
        count = self.settings.accumulate
        first = (step - 1) * count
        batches = [self.batches.at(first + i) for i in range(count)]
        tokens = sum(batch.count for batch in batches)
        lr = self.schedule(step)
        if count == 1:
            (batch,) = batches
            return self.program.train_step(batch.tokens, batch.targets, batch.mask, lr, step), tokens
        total = 0.0
        for index, batch in enumerate(batches, first + 1):
            total += batch.count * self.program.accumulate(batch.tokens, batch.targets, batch.mask, index)
        self.program.apply(lr, step)
        return total / max(tokens, 1), tokens

    def _validate(self) -> float:
        total = count = 0.0
        for batch in self.held_out.all():
            total += batch.count * self.program.eval_loss(batch.tokens, batch.targets, batch.mask)
            count += batch.count
        loss = total / count
        if loss < self.done.best:
            self.done.best, self.done.worse = loss, 0
            if self.settings.patience:
                self.program.save_state(self.best)
        else:
            self.done.worse += 1
        return loss


def _files(data: Path, validation: str | Path | None) -> tuple[Path, Path | None]:
    if not data.is_dir():
        return data, None if validation is None else Path(validation)
    own = data / "valid.jsonl"
    return data / "train.jsonl", Path(validation) if validation is not None else own if own.exists() else None


def _description(model: str | Path, train: Path, validation: Path | None, settings: FinetuneOptions) -> bytes:
    """Return what identifies a training: its arguments, and the contents of its data."""
    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (train, validation) if path is not None]
    return json.dumps({"model": str(model), "data": contents, **asdict(settings)}, indent=2).encode()


def _is_new(work: Path, description: bytes) -> bool:
    """Whether a training begins. Makes the folder `work`, or empties it if nothing was saved there.

    The folder has the program and the state of a training, until the training has ended. The file with the description
    is written after the program, and removed before it. Raises ValueError if the folder has the state of a training
    with another description.
    """
    file = work / SETTINGS_FILE
    if file.exists() and file.read_bytes() == description:
        return False
    if file.exists() and (work / STATE_FILE).exists():
        raise ValueError(
            f"finetune: {work.parent} has an interrupted training with other arguments or data; delete {work} to begin "
            "a new one"
        )
    if work.exists():
        _discard(work)
    work.mkdir(parents=True)
    return True


def _discard(work: Path) -> None:
    """Remove the folder of a training. If this is interrupted, what is left does not count as a training."""
    (work / SETTINGS_FILE).unlink(missing_ok=True)
    shutil.rmtree(work)


def _opened(model: str | Path) -> tuple[Any, Any]:
    from ..llm.export.checkpoints.open import opened  # imports transformers

    checkpoint = opened(model, "finetune")
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise ValueError(f"finetune: model: {model} has no tokenizer")
    return checkpoint, tokenizer


def _batches(
    train: Path, validation: Path | None, tokenizer: Any, settings: FinetuneOptions
) -> tuple[Batches, Batches | None]:
    examples, held_out = read_examples(train, tokenizer, mask_prompt=settings.mask_prompt), []
    if validation is not None:
        held_out = read_examples(validation, tokenizer, mask_prompt=settings.mask_prompt)
    elif count := int(len(examples) * settings.validation):
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        held_out = [examples[i] for i in sorted(order[:count])]
        examples = [examples[i] for i in sorted(order[count:])]

    def batches(examples: list[Example]) -> Batches:
        return Batches(examples, settings.batch, settings.length, pack=settings.pack, seed=settings.seed)

    return batches(examples), batches(held_out) if held_out else None


def _export(checkpoint: Any, settings: FinetuneOptions, path: Path) -> None:
    from ..llm.export.quantization.conversion import convert_weights
    from ..llm.export.quantization.tuning import decoder_layers

    model = checkpoint.load(torch.float32)
    convert_weights(
        model, settings.quantize, None, torch.float32, tokenizer=None, calibrate=None, progress=lambda step: None
    )
    program = export_training(
        model,
        lora=LoRA(settings.r, settings.alpha, settings.dropout, tuple(settings.targets)),
        optimizer=AdamW(weight_decay=settings.weight_decay, max_norm=settings.max_norm),
        batch=settings.batch,
        length=settings.length,
        seed=settings.seed,
        accumulate=settings.accumulate > 1,
        checkpoint_layers=[layer for _, layer in decoder_layers(model)] if settings.checkpoint else (),
    )
    with replacing(path) as file:
        program.write_to_file(file)


def _write_losses(output: Path, done: Progress) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    writer.writerows(done.rows)
    write_whole(output / "training.csv", text.getvalue().encode())
    series = {name: [(row[0], row[column]) for row in done.rows] for column, name in enumerate(_COLUMNS[1:3], 1)}
    known = {name: [(x, y) for x, y in points if y is not None] for name, points in series.items()}
    write_whole(output / "training.png", line_chart(known))
