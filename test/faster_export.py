"""Makes torch.export faster for tests, which export thousands of small programs.

At every decomposition, torch 2.13

- collects all CompositeImplicitAutograd operators of all namespaces. This takes as long as the export of one operator.
  `remember_composites` keeps the collection until new operators are registered.
- registers functions for each of these operators, for the dispatch keys of all devices. `forget_other_devices` leaves
  only the keys of the CPU and of meta tensors.
"""

import torch
from torch.export import decomp_utils, exported_program


def remember_composites() -> None:
    collect = exported_program._collect_all_valid_cia_ops
    cache = {}

    def operator_counts():
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        sizes = (len(getattr(getattr(torch.ops, name), "_dir", ())) for name in torch.ops._dir)
        return len(registered), *sizes

    def remembered():
        key = operator_counts()
        if key not in cache:
            cache.clear()
            found = collect()
            cache[operator_counts()] = found  # the collection itself adds operators to the namespaces
            return found
        return cache[key]

    for module in (exported_program, decomp_utils):
        module._collect_all_valid_cia_ops = remembered


def forget_other_devices() -> None:
    for keys in (exported_program._AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE, exported_program._BACKEND_KEYS_TO_OVERRIDE):
        keys[:] = [key for key in keys if key.name.removeprefix("Autograd") in ("CPU", "Meta")]
