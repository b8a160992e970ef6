"""Checkpoints of the Hugging Face Hub, of which only the files are downloaded that an export reads. Needs no torch."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

# The files of a checkpoint. A repository may also have the weights in other formats and in folders.
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_OTHERS = ("*/*.json", "*/*.safetensors", "*/*.model", "*/*.tiktoken", "consolidated*")
_OLD_WEIGHTS = ("pytorch_model*.bin",)  # read only if there are no others
_PARTS = "modules.json"  # the file of sentence-transformers that lists the parts of an encoder, some in folders
_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_GGUF_IN_ID = re.compile(rf"(?P<id>{_ID.pattern})/(?P<file>.+\.gguf)")


class HubError(ValueError):
    """Raised if the hub provides no checkpoint. The message has one line."""


def is_id(model: str) -> bool:
    """Whether `model` has the form of a hub id, `owner/name` or `name`, or of a GGUF file of a repository."""
    return _ID.fullmatch(model) is not None or _GGUF_IN_ID.fullmatch(model) is not None


def download(model: str) -> Path:
    """Return the local copy of the checkpoint with the hub id `model`: a folder, or a file for `owner/name/FILE.gguf`.

    Downloads what is missing or has changed. Without a network, the copy is what is there. Raises HubError.
    """
    try:
        if gguf := _GGUF_IN_ID.fullmatch(model):
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(gguf["id"], gguf["file"]))
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_OTHERS))
        if parts := _part_folders(folder):
            snapshot_download(model, allow_patterns=[f"{part}/{name}" for part in parts for name in _FILES])
        old = [part for part in ("", *parts) if not any((folder / part).glob("*.safetensors"))]
        if old:
            snapshot_download(model, allow_patterns=[str(Path(part, name)) for part in old for name in _OLD_WEIGHTS])
    except (OSError, ValueError) as error:  # no network, unknown id, no access
        reason = next(filter(None, map(str.strip, str(error).splitlines())), repr(error))
        raise HubError(f"{model} is not a folder or a GGUF file, and the hub did not provide it: {reason}") from error
    if not any((folder / name).is_file() for name in ("config.json", _PARTS)) and (names := _gguf_files(model)):
        raise HubError(f"{model}: got a repository of GGUF files, expected one of them, such as {model}/{names[0]}")
    return folder


def _part_folders(folder: Path) -> list[str]:
    """Return the folders of the parts of an encoder, such as `1_Pooling`."""
    try:
        entries = json.loads((folder / _PARTS).read_text(encoding="utf-8"))
        return [path for entry in entries if _ID.fullmatch(path := str(entry.get("path", "")))]
    except (OSError, ValueError, TypeError, AttributeError):  # the export says what is wrong with the file
        return []


def _gguf_files(model: str) -> list[str]:
    from huggingface_hub import HfApi

    try:
        return sorted(name for name in HfApi().list_repo_files(model) if name.endswith(".gguf"))
    except (OSError, ValueError):
        return []


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files that an export of `path` reads: `path` itself, or those of a folder, in the order of names."""
    if path.is_file():
        return [path]
    patterns = ("*", "*/*.jinja", *(f"{part}/*" for part in _part_folders(path)))
    files = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    patterns = _FILES if any(file.suffix == ".safetensors" for file in files) else _FILES + _OLD_WEIGHTS
    return sorted(file for file in files if any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns))
