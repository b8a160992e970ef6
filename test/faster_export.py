"""Makes torch.export faster for tests, which export thousands of small programs.

At every decomposition, torch 2.13 collects all CompositeImplicitAutograd operators of all namespaces. This takes as
long as the export of one operator. `remember_composites` keeps the collection until new operators are registered.

Caches of torch and ExecuTorch hold every lowered program of the process. Python's garbage collector takes longer with
each of them: after thousands of programs, an export took five times as long. `forget_programs` clears these caches.
"""

import torch
from executorch.exir.backend.utils import is_same_node
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import decomp_utils, exported_program
from torch.fx.experimental.symbolic_shapes import ShapeEnv


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


def forget_programs() -> None:
    FakeTensorMode.cache_clear()
    for function in (is_same_node, *vars(ShapeEnv).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
