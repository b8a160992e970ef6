"""Recurrent layers of Hugging Face decoders, on `mlx::` operators."""

from __future__ import annotations

from .kernels import KERNELS, cache_argument, kernels_of
from .modules import use_cached_states

__all__ = ["KERNELS", "cache_argument", "kernels_of", "use_cached_states"]
