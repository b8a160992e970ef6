"""Digests of tensors, which identify the constants of a program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

_PREFIX = 64  # bytes


@dataclass(frozen=True)
class Digest:
    """`text` identifies dtype, shape and content of a tensor. `is_zero`: whether all bytes of the tensor are 0."""

    text: str
    is_zero: bool


class Digests:
    """Computes the digests of tensors, and remembers those of tensors in the memory of `lasting`.

    The memory of `lasting` must stay allocated and unchanged as long as this object is used. Other tensors may be
    freed, and their address may then belong to a different tensor. Their digests are therefore computed at each call.

    KV caches are large and start from zero. The digest of zeros is remembered for each dtype and shape.
    """

    def __init__(self, lasting: Iterable[torch.Tensor] = ()):
        plain = (t for t in lasting if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu")
        self._lasting = {t.untyped_storage().data_ptr() for t in plain}
        self._known: dict[tuple, Digest] = {}
        self._zeros: dict[tuple, Digest] = {}

    def of(self, tensor: torch.Tensor) -> Digest:
        """Return the digest of a contiguous tensor."""
        kind = tensor.dtype, tuple(tensor.shape)
        place = tensor.data_ptr(), *kind
        if place in self._known:
            return self._known[place]
        data = raw_bytes(tensor)
        if _is_zero(data):
            if kind not in self._zeros:
                self._zeros[kind] = Digest(_hash(kind, data), True)
            digest = self._zeros[kind]
        else:
            digest = Digest(_hash(kind, data), False)
        if tensor.untyped_storage().data_ptr() in self._lasting:
            self._known[place] = digest
        return digest


def raw_bytes(tensor: torch.Tensor) -> memoryview | bytes:
    """Return the bytes of a contiguous tensor, without a copy."""
    if tensor.numel() == 0:
        return b""
    # A dimension of size 1 may have any stride, which `view` to a narrower dtype would not accept.
    return memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())


def _is_zero(data: memoryview | bytes) -> bool:
    if any(data[:_PREFIX]):
        return False
    words = len(data) // 8 * 8
    return not any(data[words:]) and (words == 0 or not np.frombuffer(data[:words], np.uint64).max())


def _hash(kind: tuple[torch.dtype, tuple], data: memoryview | bytes) -> str:
    dtype, shape = kind
    digest = hashlib.sha256(f"{dtype}{shape}".encode())
    digest.update(data)
    return digest.hexdigest()[:16]
