"""Composite operators: every text in `custom_kernel_ops` lowers by being traced."""

from __future__ import annotations

from .. import custom_kernel_ops
from ..builder.registry import REGISTRY


def _traced(text):
    def lower(P, **arguments):
        return P.trace(text, *arguments.values())[0]

    return lower


for _target, _text in custom_kernel_ops.COMPOSITES.items():
    REGISTRY.add(_target, _traced(_text))
