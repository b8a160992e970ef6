"""The order in which models iterate over sets of names.

Models of `transformers` compute rotary embeddings in a loop over `set(config.layer_types)`, and torch.export records
them in the order of the iteration. For strings, this order depends on the hash seed of the process. Two exports of such
a model would differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class InstancesOfSet(type):
    """The class of SortedSet: code that asks for instances of `set` means any set."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, set)


class SortedSet(set, metaclass=InstancesOfSet):
    """A set that iterates over strings in ascending order."""

    def __iter__(self) -> Iterator:
        members = list(super().__iter__())
        return iter(sorted(members) if all(isinstance(member, str) for member in members) else members)


@contextmanager
def sorted_sets(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, the modules of `model` iterate over sets of strings in ascending order.

    This holds for sets that are public attributes of a module, and for those that its code makes with `set(...)`.
    """
    modules = list(model.modules())
    namespaces = [vars(sys.modules[name]) for name in dict.fromkeys(type(module).__module__ for module in modules)]
    namespaces = [names for names in namespaces if not names["__name__"].startswith("torch.") and "set" not in names]
    attributes = [
        (vars(module), name, value)
        for module in modules
        for name, value in vars(module).items()
        if type(value) is set and not name.startswith("_")
    ]
    try:
        for names in namespaces:
            names["set"] = SortedSet
        for names, name, value in attributes:
            names[name] = SortedSet(value)
        yield
    finally:
        for names in namespaces:
            del names["set"]
        for names, name, value in attributes:
            names[name] = value
