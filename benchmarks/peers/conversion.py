"""What the programs that convert a checkpoint for a peer have in common."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def links_to(checkpoint: Path) -> Iterator[Path]:
    """Yield a temporary folder with links to the files of `checkpoint`, to which further files can be added."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        for file in checkpoint.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        yield folder


def main(convert: Callable[[Path, str, Path], None]) -> None:
    """Call `convert` with the arguments CHECKPOINT FORMAT FOLDER. FOLDER appears when it is complete."""
    checkpoint, weight_format, target = sys.argv[1:]
    unfinished = Path(f"{target}.part").resolve()
    convert(Path(checkpoint).resolve(), weight_format, unfinished)
    unfinished.rename(target)
