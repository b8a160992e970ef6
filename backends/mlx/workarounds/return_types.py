"""Serialized names for torch's named tuples, such as `torch.return_types.median`.

ExecuTorch stores the structure of a program's outputs by the serialized names of the types. torch defines no serialized
names for its named tuples. Without the names, a program that returns a named tuple can be lowered but not stored.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree


def register_return_types() -> None:
    """Give each type in `torch.return_types` a serialized name, unless it has one. Changes torch's pytree registry."""
    entries, types = pytree.SUPPORTED_SERIALIZED_TYPES, pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    for type_ in torch.return_types.all_return_types:
        entry = entries.get(type_)
        if entry is not None and entry.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            name = f"torch.return_types.{type_.__name__}"
            entries[type_] = entry._replace(serialized_type_name=name)
            types[name] = type_
