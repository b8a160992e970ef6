"""What the files are that users name: programs, checkpoints, or something else."""

from __future__ import annotations

from pathlib import Path

from ..llm import hub
from .errors import CommandError

CHECKPOINTS = "a checkpoint folder of Hugging Face or mlx-lm, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B"
MODELS = f"a .pte file, {CHECKPOINTS}"
_PROGRAM = b"ET"  # at byte 4, followed by a version of two digits
# The beginnings of files, or their bytes from 8 on.
_KINDS = {
    b"GGUF": "a GGUF file",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"WEBP": "a WebP picture",
    b"WAVE": "a WAV sound file",
    b"fLaC": "a FLAC sound file",
    b"OggS": "an Ogg sound file",
    b"ID3": "an MP3 sound file",
    b"%PDF": "a PDF document",
    b"\x1f\x8b": "a gzip archive",
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
}
_SUFFIXES = {
    ".safetensors": "a safetensors file, one of the files of a checkpoint folder",
    ".bin": "a file of weights, one of the files of a checkpoint folder",
    ".onnx": "an ONNX model",
    ".ptd": "a data file of a program",
}


def is_program(path: Path) -> bool:
    """Whether `path` is a file that begins like a program of ExecuTorch."""
    return path.is_file() and _beginning(path)[4:6] == _PROGRAM


def describe(path: Path) -> str:
    """Return what `path` is, as a part of a message: `a PNG picture`."""
    if path.is_dir():
        if not any(path.iterdir()):
            return "an empty folder"
        if (path / "adapter_config.json").is_file():
            return "a folder with an adapter, which --adapter takes beside its model"
        if programs := sorted(path.glob("*.pte")):
            return f"a folder with a program, {programs[0]}"
        return "a folder without config.json"
    beginning = _beginning(path)
    if not beginning:
        return "an empty file"
    if beginning[4:6] == _PROGRAM:
        return "a program"
    for start, kind in _KINDS.items():
        if beginning.startswith(start) or beginning[8:].startswith(start):
            return kind
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    is_text = all(byte >= 32 or byte in b"\t\n\r\f" for byte in beginning)
    return "a text file" if is_text else "a file of an unknown format"


def check_checkpoint(model: str, expected: str = MODELS) -> None:
    """Raise CommandError if `model` is neither a checkpoint folder, nor a GGUF file, nor in the form of a hub id.

    Raises FileNotFoundError for a path where nothing is.
    """
    path = Path(model)
    if not path.exists():
        if path.suffix in (".pte", *_SUFFIXES) or not hub.is_id(model):
            raise CommandError(f"{model}: No such file or folder, expected {expected}")
    elif not any((path / name).is_file() for name in ("config.json", "modules.json")) and not (
        path.is_file() and _beginning(path).startswith(b"GGUF")
    ):
        raise CommandError(f"{model}: got {describe(path)}, expected {expected}")


def check_program(path: Path) -> None:
    """Raise CommandError if `path` is not a program."""
    if not path.exists():
        raise CommandError(f"{path}: No such file or folder")
    if not is_program(path):
        raise CommandError(f"{path}: got {describe(path)}, expected a .pte file")


def _beginning(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(64)
