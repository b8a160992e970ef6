"""Defines operators in the torch library `mlx`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("mlx", "FRAGMENT")


def define(schema: str, eager: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Define the operator `mlx::<schema>` with its eager and fake kernels, and return its default overload.

    `eager` computes the result. `fake` returns an empty tensor of the result's shape and dtype. Raises ImportError if
    the process already has an operator of that name.
    """
    name = schema[: schema.index("(")]
    if f"mlx::{name}" in torch._C._dispatch_get_all_op_names():
        origin = torch._C._dispatch_dump(f"mlx::{name}").partition("debug: ")[2].partition("\n")[0]
        raise ImportError(
            f"executorch_mlx: torch operator mlx::{name} already exists ({origin}). Another MLX "
            "delegate is loaded in this process, probably executorch.backends.mlx of the "
            "executorch wheel; import only one of the two."
        )
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mlx::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mlx, name).default


def differentiate(operator: torch._ops.OpOverload, backward: Callable, save: Callable[[Any, tuple], Any]) -> None:
    """Give `operator`, which `define` returned, a gradient.

    `save(context, inputs)` stores in `context` what `backward(context, grad)` needs, which returns the gradient of each
    input, or None for an input without a gradient.
    """
    torch.library.register_autograd(
        operator._name.partition(".")[0],
        backward,
        setup_context=lambda ctx, inputs, output: save(ctx, inputs),
        lib=_LIBRARY,
    )
