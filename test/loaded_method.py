"""A method of a program, loaded with ExecuTorch's runtime."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class LoadedMethod:
    """Keeps its program. ExecuTorch's own methods do not: one whose program is gone reads memory that is freed."""

    def __init__(self, program: bytes | Path, name: str = "forward", data: Path | None = None):
        from executorch_mlx import Runtime  # now, because the import loads the delegate

        self.program = Runtime.get().load_program(program, data_path=data)
        self.method = self.program.load_method(name)

    def execute(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return self.method.execute(inputs)
