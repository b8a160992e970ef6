"""Lowers the composite operators of `custom_kernel_ops`, such as `mlx::sample`, by tracing their torch functions."""

from __future__ import annotations

from .. import custom_kernel_ops
from ..builder.registry import REGISTRY, tracing_handler

for _target, _function in custom_kernel_ops.COMPOSITES.items():
    REGISTRY.add(_target, tracing_handler(_target, _function))
