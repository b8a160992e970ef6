"""Names for torch's own named results, such as `torch.return_types.median`.

ExecuTorch stores what holds a program's outputs by the names of the types, and torch has given these
none: a module that returns one could be lowered, but not stored.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree


def give_names() -> None:
    """Names those that have none; again does nothing."""
    stored, types = pytree.SUPPORTED_SERIALIZED_TYPES, pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    for kind in torch.return_types.all_return_types:
        entry = stored.get(kind)
        if entry is not None and entry.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
            name = f"torch.return_types.{kind.__name__}"
            stored[kind] = entry._replace(serialized_type_name=name)
            types[name] = kind
