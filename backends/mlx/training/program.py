"""`TrainingProgram`: runs a program of `export_training`, and saves and restores its state."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..bindings import import_runtime

STATE = ("parameters", "mean", "square")
SETTINGS = "training"  # the constant method with the settings of a program: a JSON object in UTF-8


class TrainingProgram:
    """A training program that is loaded. `settings` are those of `export_training`."""

    def __init__(self, path: str | Path):
        """Load the program. Raises ValueError if the file has no training program."""
        self.path = Path(path)
        self._program = import_runtime().get().load_program(str(path))
        if SETTINGS not in self._program.method_names:
            raise ValueError(f"TrainingProgram: {path}: expected a program of export_training")
        self.settings = json.loads(bytes(self._call(SETTINGS)[0].numpy()))
        self._digest: str | None = None

    def train_step(
        self, tokens: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, lr: float, step: int
    ) -> float:
        """Update the parameters by one batch, and return its loss before the update. The first step is 1."""
        return self._loss("train_step", tokens, targets, mask.float(), torch.tensor(float(lr)), torch.tensor(step))

    def accumulate(self, tokens: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, step: int) -> float:
        """Add the gradient of a batch to the sum, and return the loss. `step` is the number of this batch."""
        return self._loss("accumulate", tokens, targets, mask.float(), torch.tensor(step))

    def apply(self, lr: float, step: int) -> None:
        """Update the parameters by the mean gradient since the last call, and begin a new sum."""
        self._call("apply", torch.tensor(float(lr)), torch.tensor(step))

    def eval_loss(self, tokens: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> float:
        """Return the loss of a batch without dropout."""
        return self._loss("eval_loss", tokens, targets, mask.float())

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the vectors `parameters`, `mean` and `square`."""
        return {name: value.clone() for name, value in zip(STATE, self._call("read_state"))}

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the three vectors. Raises RuntimeError if their types are not those of `state()`."""
        self._call("write_state", *(state[name].contiguous() for name in STATE))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the trained tensors, by the names that they have in the model."""
        return self.split(self.state()["parameters"])

    def split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of a vector of the state, by the names of the trained tensors."""
        shapes: dict[str, list[int]] = self.settings["tensors"]
        parts = vector.split([math.prod(shape) for shape in shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}

    def join(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the vector of `tensors`, as `split` divides it. Raises ValueError unless their shapes are as there."""
        shapes: dict[str, list[int]] = self.settings["tensors"]
        for name, shape in shapes.items():
            if name not in tensors or list(tensors[name].shape) != shape:
                got = list(tensors[name].shape) if name in tensors else "no tensor"
                raise ValueError(f"TrainingProgram: {name}: got {got}, expected the shape {shape}")
        return torch.cat([tensors[name].detach().float().reshape(-1) for name in shapes])

    def save_state(self, path: str | Path, notes: Mapping[str, Any] | None = None) -> None:
        """Write the state with a checksum, and `notes`, which have to be JSON. `load_state` returns them.

        The file takes the place of an older one at once: after a crash, `path` has either the old or the new state.
        """
        state = self.state()
        metadata = {"program": self.digest(), "checksum": _checksum(state, notes), "notes": json.dumps(notes or {})}
        write_whole(path, save(state, metadata))

    def load_state(self, path: str | Path) -> dict[str, Any]:
        """Set the state that `save_state` wrote, and return its notes.

        Raises ValueError if the file is damaged or belongs to another program.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata, state = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
            notes = json.loads(metadata["notes"])
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"load_state: {path}: expected a state of a training program: {error}") from error
        if metadata["program"] != self.digest():
            raise ValueError(f"load_state: {path}: got the state of another program than {self.path}")
        if metadata["checksum"] != _checksum(state, notes):
            raise ValueError(f"load_state: {path}: the checksum is wrong; the file is damaged")
        self.set_state(state)
        return notes

    def digest(self) -> str:
        """Return the SHA-256 of the program file."""
        if self._digest is None:
            with open(self.path, "rb") as file:
                self._digest = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digest

    def _call(self, method: str, *inputs: torch.Tensor) -> Sequence[Any]:
        if method not in self._program.method_names:
            raise ValueError(f"TrainingProgram: {method}: the program was exported without this method")
        return self._program.load_method(method).execute(list(inputs))

    def _loss(self, method: str, *inputs: torch.Tensor) -> float:
        return float(self._call(method, *inputs)[0])


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file as `replacing` does."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file such that, after a crash at any moment, it has either its old or its new content."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.new")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # that of a full disk has no path
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name
    finally:
        os.close(folder)


def _checksum(state: Mapping[str, torch.Tensor], notes: Mapping[str, Any] | None) -> str:
    digest = hashlib.sha256(json.dumps(notes or {}).encode())
    for name in STATE:
        digest.update(state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
