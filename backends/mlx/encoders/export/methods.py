"""The methods of the program, and their export."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import TEXT_METHOD

SHORTEST = 2  # tokens in the example of an export: torch.export makes a dimension static whose length is 1


@dataclass
class Method:
    """A method of the program: a module, the example inputs, and the largest size of each dynamic axis.

    `sizes` has, for each input, the axes that are dynamic: axis → (name, largest size).
    """

    name: str
    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    sizes: tuple[dict[int, tuple[str, int]], ...]

    def export(self) -> torch.export.ExportedProgram:
        names = {name: most for axes in self.sizes for name, most in axes.values()}
        dims = {name: torch.export.Dim(name, min=1, max=most) for name, most in names.items()}
        shapes = tuple({axis: dims[name] for axis, (name, _) in axes.items()} for axes in self.sizes)
        with torch.no_grad():
            return torch.export.export(self.module, self.inputs, dynamic_shapes=shapes)


def text_method(
    module: torch.nn.Module, vocabulary: int, length: int, rows: int, fixed: bool, takes_types: bool
) -> Method:
    """Return the method that encodes texts of up to `length` tokens, or of exactly so many if `fixed`."""
    generator = torch.Generator().manual_seed(0)
    shown = length if fixed else max(SHORTEST, min(5, length))
    tokens = torch.randint(0, vocabulary, (min(3, rows), shown), generator=generator)
    mask = torch.ones_like(tokens)
    axes = {0: ("rows", rows)} if fixed else {0: ("rows", rows), 1: ("length", length)}
    if rows == 1:
        axes = {axis: entry for axis, entry in axes.items() if axis}
    inputs = (tokens,) if fixed else (tokens, mask, torch.zeros_like(tokens)) if takes_types else (tokens, mask)
    return Method(TEXT_METHOD, module, inputs, (axes,) * len(inputs))
